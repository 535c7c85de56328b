// The names of `device.cuh`, for a CPU: so that the very sources of the kernels can be run in tests.
//
// Blocks run one after another. Each thread of a block is a fiber; waiting for the block or meeting the lanes of a warp
// gives way to the next one. In which order threads and blocks run is chosen by the caller: results must not depend on
// it. Shared memory is filled with NaN when a block begins. A thread that ends while others wait, lanes that do not all
// come, and too much shared memory are errors. What this does not show: races between threads that always fall between
// the same two waits, and anything about speed.
#ifndef DEVICE_CUH
#define DEVICE_CUH

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

typedef uint8_t u8;
typedef int8_t i8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct Index {
    u32 x, y, z;
};

extern thread_local Index threadIdx, blockIdx, blockDim;

namespace shim {
// Memory of the running block, the same for each key; filled with NaN when the block begins.
void* block_memory(const void* key, size_t bytes);
// Gives way until all threads of the block wait.
void wait_for_block();
// Puts down a value and gives way until all lanes of the warp have; the value of lane `own ^ mask`.
float exchange(float value, int mask);
}  // namespace shim

#define KERNEL(name) static void name
#define DEVICE inline
#define SHARED(type, name, dimensions)   \
    typedef type name##_type dimensions; \
    static const char name##_key = 0;    \
    name##_type& name = *(name##_type*)shim::block_memory(&name##_key, sizeof(name##_type))

DEVICE void block_wait() {
    shim::wait_for_block();
}

DEVICE float from_lane_xor(float value, int mask) {
    return shim::exchange(value, mask);
}

DEVICE float fused(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}

DEVICE float square_root(float value) {
    return __builtin_sqrtf(value);
}

DEVICE float quotient(float a, float b) {
    return a / b;
}

DEVICE float round_to_even(float value) {
    return __builtin_rintf(value);
}

DEVICE u32 bits_of(float value) {
    u32 bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

DEVICE float float_of(u32 bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

DEVICE float from_half(u16 bits) {
    u32 sign = (u32)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    if (exponent == 31) {
        return float_of(sign | 0x7f800000u | fraction << 13);
    }
    if (exponent == 0) {
        float value = (float)fraction * (1.0f / 16777216.0f);
        return sign ? -value : value;
    }
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

DEVICE u16 to_half(float value) {
    u32 bits = bits_of(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) {
        return 0x7fff;
    }
    if (rest >= 0x47800000u) {
        return (u16)(sign | 0x7c00);
    }
    if (rest < 0x38800000u) {
        // A subnormal half is a multiple of 2^-24: adding 0.5 rounds to it, to even between two.
        return (u16)(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000u));
    }
    u32 odd = rest >> 13 & 1;
    return (u16)(sign | ((rest - 0x38000000u + 0xfff + odd) >> 13));
}

#endif

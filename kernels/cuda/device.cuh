// What the kernels take from the GPU itself, and nothing else: they include no header of a toolkit, so the
// run-time compiler alone is enough to build them. `shim/cuda_on_cpu.h` gives the same names for the CPU.
//
// Arithmetic: products and sums are written as `fused` where they are meant to be one, and the compiler is told not
// to make others (`--fmad=false`), so each kernel is a fixed sequence of IEEE operations with the same bits on
// every GPU, and on the CPU through the shim.
#ifndef DEVICE_CUH
#define DEVICE_CUH

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A kernel, under the name by which the launch code asks for it.
#define KERNEL(name) extern "C" __global__ void name
// Code of the device, inlined.
#define DEVICE __device__ __forceinline__
// A variable, or an array of the dimensions behind it, that the threads of a block share. It begins undefined.
#define SHARED(type, name, dimensions) __shared__ type name dimensions
// Waits for all threads of the block.
DEVICE void block_wait() {
    __syncthreads();
}

// The value of the lane of this warp whose number differs in the bits of `mask`. All 32 lanes take part.
DEVICE float from_lane_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

DEVICE float fused(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}

DEVICE float square_root(float value) {
    return __fsqrt_rn(value);
}

DEVICE float quotient(float a, float b) {
    return __fdiv_rn(a, b);
}

// To the nearest whole number; between two, the even one.
DEVICE float round_to_even(float value) {
    return rintf(value);
}

DEVICE u32 bits_of(float value) {
    return __float_as_uint(value);
}

DEVICE float float_of(u32 bits) {
    return __uint_as_float(bits);
}

DEVICE float from_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Rounds to the nearest half, between two to the even one.
DEVICE u16 to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif

// Pages of K and V, as the pool lays them out (on the CPU as well): K of a page is transposed, `[head_dim][PAGE]`, so
// that a thread can own keys; then V as `[PAGE][head_dim]`, so that a thread can own channels. Values are f16, f32, or
// int8 with a scale for each token and block of 32 channels; scales lie apart from the pages, for each page those of K as
// `[blocks][PAGE]`, then those of V as `[PAGE][blocks]`.
#ifndef PAGES_CUH
#define PAGES_CUH
#include "numbers.cuh"

// Tokens of a page.
#define PAGE 16u
// Channels that share a scale.
#define SCALE_BLOCK 32u

struct KvF16 {
    typedef u16 Stored;
    static const bool SCALED = false;
    DEVICE static Stored store(float value) { return to_half(value); }
    // Two neighbours.
    DEVICE static void load(const Stored* at, float* two) {
        u32 pair = *(const u32*)at;
        two[0] = from_half((u16)pair), two[1] = from_half((u16)(pair >> 16));
    }
};

struct KvF32 {
    typedef float Stored;
    static const bool SCALED = false;
    DEVICE static Stored store(float value) { return value; }
    DEVICE static void load(const Stored* at, float* two) {
        float2 pair = *(const float2*)at;
        two[0] = pair.x, two[1] = pair.y;
    }
};

struct KvInt8 {
    typedef u8 Stored;
    static const bool SCALED = true;
    // Of a value in units of its scale.
    DEVICE static Stored store(float value) { return (u8)(i8)(int)round_to_even(value); }
    DEVICE static void load(const Stored* at, float* two) {
        u32 pair = *(const u16*)at;
        two[0] = float_of_signed(pair), two[1] = float_of_signed(pair >> 8);
    }
};

// Scales of a token's K, and of its V.
template <class Kv>
DEVICE u32 scales_of(u32 head_dim) {
    return Kv::SCALED ? (head_dim + SCALE_BLOCK - 1) / SCALE_BLOCK : 0;
}

// A page inside the pool.
template <class Stored>
struct PageAt {
    Stored *keys, *values;
    float *key_scales, *value_scales;
    u32 head_dim, blocks;

    DEVICE PageAt(Stored* pages, float* scales, u64 page, u32 head_dim, u32 blocks)
        : head_dim(head_dim), blocks(blocks) {
        keys = pages + page * 2 * PAGE * head_dim;
        values = keys + PAGE * head_dim;
        key_scales = scales + page * 2 * PAGE * blocks;
        value_scales = key_scales + PAGE * blocks;
    }

    DEVICE Stored& key(u32 slot, u32 channel) const { return keys[channel * PAGE + slot]; }
    DEVICE Stored& value(u32 slot, u32 channel) const { return values[slot * head_dim + channel]; }
    DEVICE float& key_scale(u32 slot, u32 block) const { return key_scales[block * PAGE + slot]; }
    DEVICE float& value_scale(u32 slot, u32 block) const { return value_scales[slot * blocks + block]; }
};

// Calls `make(Kv, name)` for each type of K and V.
#define FOR_EACH_KV(make) make(KvF16, f16) make(KvF32, f32) make(KvInt8, int8)

#endif

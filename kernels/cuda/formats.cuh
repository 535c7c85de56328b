// Weights of a row, eight at a time, as the values that the file format defines.
//
// On the device a row is stored in planes: a field of all its blocks, then the next field, the one with the largest
// elements first, so that every load is aligned and neighbouring lanes read neighbouring bytes. The launch code makes
// planes when a matrix is loaded (`src/cuda/matrix.rs` has the same fields in the same order) and pads rows to 16 bytes.
//
// A format has `load(row, blocks, k, out)`: the eight values from input `k` on, `k` a multiple of eight. `blocks` is
// the number of blocks of a row; a block of a float format is one value. Products of a scale and a code are exact in
// f32, so a fused multiply-add gives the value of the format.
#ifndef FORMATS_CUH
#define FORMATS_CUH
#include "numbers.cuh"

// Values that a lane takes at once.
#define RUN 8u

DEVICE u32 u32_at(const u8* bytes) {
    return *(const u32*)bytes;
}

DEVICE float half_at(const u8* bytes) {
    return from_half(*(const u16*)bytes);
}

// Code `i` of a word of four codes in bytes.
DEVICE u32 byte_of(u32 word, u32 i) {
    return (word >> (8u * i)) & 0xffu;
}

struct F32 {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        const uint4* at = (const uint4*)(row + 4ull * k);
        uint4 low = at[0], high = at[1];
        out[0] = float_of(low.x), out[1] = float_of(low.y), out[2] = float_of(low.z), out[3] = float_of(low.w);
        out[4] = float_of(high.x), out[5] = float_of(high.y), out[6] = float_of(high.z), out[7] = float_of(high.w);
    }
};

struct F16 {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        uint4 words = *(const uint4*)(row + 2ull * k);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
        for (u32 i = 0; i < 4; i++) {
            out[2 * i] = from_half((u16)word[i]);
            out[2 * i + 1] = from_half((u16)(word[i] >> 16));
        }
    }
};

struct BF16 {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        uint4 words = *(const uint4*)(row + 2ull * k);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
        for (u32 i = 0; i < 4; i++) {
            out[2 * i] = float_of(word[i] << 16);
            out[2 * i + 1] = float_of(word[i] & 0xffff0000u);
        }
    }
};

// Four-bit codes of 32: the low halves of 16 bytes come first. `k` is the first input of the run.
DEVICE void nibbles_of_32(const u8* codes, u32 k, u32* out) {
    const u8* at = codes + (k / 32) * 16ull + k % 16;
    u32 shift = (k % 32) / 16 * 4;
    out[0] = (u32_at(at) >> shift) & 0x0f0f0f0fu;
    out[1] = (u32_at(at + 4) >> shift) & 0x0f0f0f0fu;
}

// The high bits of five-bit codes, four bytes to 32 of them, put above the nibbles.
DEVICE void add_fifth_bits(u32 high, u32 k, u32* codes) {
    u32 bits = high >> (k % 32);
    for (u32 i = 0; i < 8; i++) {
        codes[i / 4] |= ((bits >> i) & 1u) << (8u * (i % 4) + 4u);
    }
}

// `scale * code + offset` for eight codes.
DEVICE void scaled(const u32* codes, float scale, float offset, float* out) {
    for (u32 i = 0; i < RUN; i++) {
        out[i] = fused(scale, float_of_small(byte_of(codes[i / 4], i % 4)), offset);
    }
}

// `scale * (code - middle)` for eight codes.
DEVICE void centred(const u32* codes, float scale, float middle, float* out) {
    for (u32 i = 0; i < RUN; i++) {
        out[i] = scale * (float_of_small(byte_of(codes[i / 4], i % 4)) - middle);
    }
}

// Planes: 16 bytes of codes, a scale.
struct Q4_0 {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        u32 codes[2];
        nibbles_of_32(row, k, codes);
        centred(codes, half_at(row + 16ull * blocks + 2ull * (k / 32)), 8.0f, out);
    }
};

// Planes: 16 bytes of codes, scale and minimum.
struct Q4_1 {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        u32 codes[2];
        nibbles_of_32(row, k, codes);
        u32 pair = u32_at(row + 16ull * blocks + 4ull * (k / 32));
        scaled(codes, from_half((u16)pair), from_half((u16)(pair >> 16)), out);
    }
};

// Planes: 16 bytes of low bits, 4 of high bits, a scale.
struct Q5_0 {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        u32 codes[2];
        nibbles_of_32(row, k, codes);
        add_fifth_bits(u32_at(row + 16ull * blocks + 4ull * (k / 32)), k, codes);
        centred(codes, half_at(row + 20ull * blocks + 2ull * (k / 32)), 16.0f, out);
    }
};

// Planes: 16 bytes of low bits, 4 of high bits, scale and minimum.
struct Q5_1 {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        u32 codes[2];
        nibbles_of_32(row, k, codes);
        add_fifth_bits(u32_at(row + 16ull * blocks + 4ull * (k / 32)), k, codes);
        u32 pair = u32_at(row + 20ull * blocks + 4ull * (k / 32));
        scaled(codes, from_half((u16)pair), from_half((u16)(pair >> 16)), out);
    }
};

// Planes: 32 signed bytes, a scale.
struct Q8_0 {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        u32 codes[2] = {u32_at(row + k), u32_at(row + k + 4)};
        float scale = half_at(row + 32ull * blocks + 2ull * (k / 32));
        for (u32 i = 0; i < RUN; i++) {
            out[i] = scale * float_of_signed(byte_of(codes[i / 4], i % 4));
        }
    }
};

// Scale and minimum of part `part` of a block of 256: six-bit multiples of two halves. `header` has the halves, then
// twelve bytes: the first four pairs are the low bits of bytes 0..4 and 4..8, the others have their low four bits in
// bytes 8..12 and their high two at the top of the first eight.
DEVICE void scale_and_minimum(const u8* header, u32 part, float* scale, float* minimum) {
    uint4 words = *(const uint4*)header;
    u32 at = 8u * (part % 4);
    u32 first = words.y >> at, second = words.z >> at, third = words.w >> at;
    u32 s = part < 4 ? first & 63u : (third & 15u) | ((first >> 2) & 0x30u);
    u32 m = part < 4 ? second & 63u : ((third >> 4) & 15u) | ((second >> 2) & 0x30u);
    *scale = from_half((u16)words.x) * float_of_small(s);
    *minimum = from_half((u16)(words.x >> 16)) * float_of_small(m);
}

// Four-bit codes of 256: 32 bytes hold two runs of 32, low halves first.
DEVICE void nibbles_of_256(const u8* codes, u32 k, u32* out) {
    const u8* at = codes + (k / 64) * 32ull + k % 32;
    u32 shift = (k % 64) / 32 * 4;
    out[0] = (u32_at(at) >> shift) & 0x0f0f0f0fu;
    out[1] = (u32_at(at + 4) >> shift) & 0x0f0f0f0fu;
}

// Planes: 128 bytes of codes, 16 of scales and minima.
struct Q4_K {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        u32 codes[2];
        float scale, minimum;
        nibbles_of_256(row, k, codes);
        scale_and_minimum(row + 128ull * blocks + 16ull * (k / 256), k % 256 / 32, &scale, &minimum);
        scaled(codes, scale, -minimum, out);
    }
};

// Planes: 128 bytes of low bits, 32 of high bits, 16 of scales and minima.
struct Q5_K {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        u32 codes[2];
        float scale, minimum;
        nibbles_of_256(row, k, codes);
        // Bit `part` of byte `i` belongs to code `i` of that part.
        u32 part = k % 256 / 32;
        const u8* high = row + 128ull * blocks + 32ull * (k / 256) + k % 32;
        codes[0] |= ((u32_at(high) >> part) & 0x01010101u) << 4;
        codes[1] |= ((u32_at(high + 4) >> part) & 0x01010101u) << 4;
        scale_and_minimum(row + 160ull * blocks + 16ull * (k / 256), part, &scale, &minimum);
        scaled(codes, scale, -minimum, out);
    }
};

// Planes: 128 bytes of low bits, 64 of high bits, 16 signed scales, their unit.
struct Q6_K {
    DEVICE static void load(const u8* row, u32 blocks, u32 k, float* out) {
        u32 block = k / 256, i = k % 256;
        // Halves of 128 codes: 64 bytes of low bits, low nibbles first, and 32 of high bits, two to a code.
        const u8* low = row + 128ull * block + i / 128 * 64 + i % 64;
        const u8* high = row + 128ull * blocks + 64ull * block + i / 128 * 32 + i % 32;
        u32 shift = i % 128 / 64 * 4, above = i % 128 / 32 * 2;
        u32 codes[2];
        for (u32 w = 0; w < 2; w++) {
            codes[w] = (u32_at(low + 4 * w) >> shift) & 0x0f0f0f0fu;
            codes[w] |= ((u32_at(high + 4 * w) >> above) & 0x03030303u) << 4;
        }
        float scale = float_of_signed(row[192ull * blocks + 16ull * block + i / 16]);
        centred(codes, half_at(row + 208ull * blocks + 2ull * block) * scale, 32.0f, out);
    }
};

// Calls `make(Format, name, size of a block)` for each format.
#define FOR_EACH_FORMAT(make) \
    make(F32, f32, 1) make(F16, f16, 1) make(BF16, bf16, 1) make(Q4_0, q4_0, 32) make(Q4_1, q4_1, 32) \
    make(Q5_0, q5_0, 32) make(Q5_1, q5_1, 32) make(Q8_0, q8_0, 32) make(Q4_K, q4_k, 256) \
    make(Q5_K, q5_k, 256) make(Q6_K, q6_k, 256)

#endif

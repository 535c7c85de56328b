// Numbers that several kernels share: `exp`, and sums in one fixed order.
#ifndef NUMBERS_CUH
#define NUMBERS_CUH
#include "device.cuh"

// Lanes of a warp.
#define LANES 32u

// The larger one. Where one is NaN, `a`.
DEVICE float larger(float a, float b) {
    return b > a ? b : a;
}

DEVICE float magnitude(float value) {
    return float_of(bits_of(value) & 0x7fffffffu);
}

// e^x, within two units in the last place on -87..88 and clamped outside; NaN stays NaN. The operations are those of
// the CPU's `exp`, in the same order.
DEVICE float exp_of(float x) {
    const float LOW = -87.0f, HIGH = 88.0f;
    const float LOG2_E = 1.44269504088896340736f;
    // Adding it rounds to the nearest integer, kept in the low bits.
    const float SHIFT = 12582912.0f;
    // ln 2 in two parts, the first with few bits so that its multiples are exact.
    const float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194442e-4f;
    x = x < LOW ? LOW : x;
    x = x > HIGH ? HIGH : x;
    float shifted = fused(x, LOG2_E, SHIFT);
    float n = shifted - SHIFT;
    float r = fused(n, -LN2_LOW, fused(n, -LN2_HIGH, x));
    float q = 0.001381454f;
    q = fused(q, r, 0.008368745f);
    q = fused(q, r, 0.04166839f);
    q = fused(q, r, 0.16666521f);
    q = fused(q, r, 0.49999994f);
    float p = fused(r * r, q, r + 1.0f);
    return p * float_of((bits_of(shifted) << 23) + (127u << 23));
}

// The sum over the lanes of a warp, in all of them: neighbours first, then pairs, fours and so on.
DEVICE float warp_sum(float value) {
    for (int mask = 1; mask < 32; mask *= 2) {
        value = value + from_lane_xor(value, mask);
    }
    return value;
}

// The largest value of the lanes of a warp, in all of them.
DEVICE float warp_largest(float value) {
    for (int mask = 1; mask < 32; mask *= 2) {
        value = larger(value, from_lane_xor(value, mask));
    }
    return value;
}

// A small whole number, exactly: conversion instructions run at a quarter of the rate of this addition.
DEVICE float float_of_small(u32 value) {
    return float_of(0x4b000000u | value) - 8388608.0f;
}

// The signed byte in the low bits of `value`.
DEVICE float float_of_signed(u32 value) {
    return float_of_small((value & 0xffu) ^ 0x80u) - 128.0f;
}

#endif

// `append_TYPE`: rounds rows of K and V to the type of the pool and writes them to their pages.
//
// A block owns a row and a KV head. `rows` has four numbers for each row: its place in k and v, the index of its token in
// the sequence, the start of its group's tables, and pages of each of them; `tables` the page ids of all groups,
// `[KV head][page]`. A warp owns a block of 32 channels: where values are scaled, its lanes find the largest magnitude, so
// that a token's bits depend on that token alone.
//
// Roofline: memory, 4 bytes read and 1 to 4 written a channel, K with a stride of a page; a few thousand channels a step,
// so the start of the launch is what it costs.
#include "pages.cuh"

#define APPEND_THREADS 64u

// A value of a block of channels, and the scale of the block.
template <class Kv>
DEVICE typename Kv::Stored rounded(float value, float* scale) {
    if (!Kv::SCALED) {
        return Kv::store(value);
    }
    float largest = warp_largest(magnitude(value));
    *scale = quotient(largest, 127.0f);
    return Kv::store(value * (largest > 0.0f ? quotient(127.0f, largest) : 0.0f));
}

template <class Kv>
DEVICE void append(typename Kv::Stored* pages, float* scales, u32 kv_heads, u32 head_dim, const u32* rows,
                   const u32* tables, const float* k, const float* v) {
    const u32* row = rows + 4ull * blockIdx.x;
    const u32 head = blockIdx.y, token = row[1], slot = token % PAGE;
    const u32 page = tables[row[2] + (u64)head * row[3] + token / PAGE];
    const PageAt<typename Kv::Stored> to(pages, scales, page, head_dim, scales_of<Kv>(head_dim));
    const u64 from = ((u64)row[0] * kv_heads + head) * head_dim;
    // Whole warps go round, so that all lanes take part in finding the largest.
    const u32 rounds = (head_dim + LANES - 1) / LANES * LANES;
    for (u32 channel = threadIdx.x; channel < rounds; channel += APPEND_THREADS) {
        bool inside = channel < head_dim;
        float key_scale = 0.0f, value_scale = 0.0f;
        typename Kv::Stored key = rounded<Kv>(inside ? k[from + channel] : 0.0f, &key_scale);
        typename Kv::Stored value = rounded<Kv>(inside ? v[from + channel] : 0.0f, &value_scale);
        if (inside) {
            to.key(slot, channel) = key;
            to.value(slot, channel) = value;
        }
        if (Kv::SCALED && channel % SCALE_BLOCK == 0) {
            to.key_scale(slot, channel / SCALE_BLOCK) = key_scale;
            to.value_scale(slot, channel / SCALE_BLOCK) = value_scale;
        }
    }
}

#define APPEND(Kv, name)                                                                                      \
    KERNEL(append_##name)(Kv::Stored* pages, float* scales, u32 kv_heads, u32 head_dim, const u32* rows,      \
                          const u32* tables, const float* k, const float* v) {                                \
        append<Kv>(pages, scales, kv_heads, head_dim, rows, tables, k, v);                                    \
    }
FOR_EACH_KV(APPEND)

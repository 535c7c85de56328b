// `attention_decode_TYPE`, `attention_merge`, `attention_prefill_TYPE`: causal attention of rows over the pages of their
// sequences. See `attention.cuh` for the order of every sum.
//
// All (row, head) pairs of a block share their KV head, so K and V are read once for as many query heads as there are to a
// KV head (GQA). Work items have five numbers: place of the first row in q and out, the index of its token, rows (decode:
// the number of the partition), the start of the group's tables, and pages of each of them. `softmax` is null or takes for
// each (row, head) the largest score and the sum of the weights; the log-sum-exp is the first plus the logarithm of the
// second.
//
// Decode: a block takes a partition of one row; `attention_merge` adds the partitions. Roofline: memory. K and V are read
// once: 4 bytes a channel and token at f16 for 4 operations a head, at 8 heads to a KV head 40 T operations/s at
// 4.8 TB/s: there the f32 units (67 T) are as near as the memory.
// Prefill: a block takes a tile of rows and walks their partitions. Roofline: arithmetic, on the f32 units; 16 pairs share
// what is read, so the second-level cache gives a byte for 16 operations.
#include "attention.cuh"

#define DECODE_PAIRS 8u
#define PREFILL_PAIRS 16u

// Pairs of an item: `rows` rows from the item's first, and the heads of tile `tile` of the KV head.
DEVICE Pairs pairs_of(const Context& context, const u32* item, const u32* tables, u32 rows, u32 kv_head, u32 tile,
                      u32 most) {
    const u32 per_kv = context.heads / context.kv_heads;
    Pairs pairs;
    pairs.table = tables + item[3] + (u64)kv_head * item[4];
    pairs.row = item[0], pairs.token = item[1];
    pairs.head = kv_head * per_kv + tile * most;
    pairs.heads = per_kv - tile * most < most ? per_kv - tile * most : most;
    pairs.count = rows * pairs.heads;
    return pairs;
}

template <class Kv>
DEVICE void decode(typename Kv::Stored* pages, float* scales, const Context& context, const u32* items,
                   const u32* tables, const float* q, float* partial) {
    SHARED(Scratch<DECODE_PAIRS>, scratch, );
    const u32* item = items + 5ull * blockIdx.x;
    const Pairs pairs = pairs_of(context, item, tables, 1, blockIdx.y, blockIdx.z, DECODE_PAIRS);
    Partition<Kv, DECODE_PAIRS> part = {context, pairs, scratch, pages, scales, item[2] * PART};
    // For each head of the item the largest score, the sum and the weighted values.
    const u32 width = context.head_dim + 2;
    float* slots = partial + ((u64)blockIdx.x * context.heads + pairs.head) * width;
    part.prepare(q);
    part.each_value([=](u32 n, u32 channel, float value) { slots[(u64)n * width + 2 + channel] = value; });
    if (threadIdx.x < pairs.count) {
        slots[(u64)threadIdx.x * width] = scratch.part[threadIdx.x].largest;
        slots[(u64)threadIdx.x * width + 1] = scratch.part[threadIdx.x].sum;
    }
}

// Adds the partitions of each row. `rows` has three numbers for each: its place in out, its first item, and items.
KERNEL(attention_merge)(const u32* rows, const float* partial, u32 heads, u32 head_dim, float* out, Softmax* softmax) {
    const u32* row = rows + 3ull * blockIdx.x;
    const u32 head = blockIdx.y, width = head_dim + 2;
    const u64 at = (u64)row[0] * heads + head;
    for (u32 channel = threadIdx.x; channel < head_dim; channel += blockDim.x) {
        Softmax all = {0.0f, 0.0f};
        float value = 0.0f;
        for (u32 i = 0; i < row[2]; i++) {
            const float* slot = partial + ((u64)(row[1] + i) * heads + head) * width;
            Softmax part = {slot[0], slot[1]};
            Merging merging = merge(all, part);
            if (!merging.skip) {
                value = merged(merging, value, slot[2 + channel]);
            }
        }
        out[at * head_dim + channel] = quotient(value, all.sum);
        if (softmax && channel == 0) {
            softmax[at] = all;
        }
    }
}

template <class Kv>
DEVICE void prefill(typename Kv::Stored* pages, float* scales, const Context& context, const u32* items,
                    const u32* tables, const float* q, float* out, Softmax* softmax) {
    SHARED(Scratch<PREFILL_PAIRS>, scratch, );
    SHARED(Softmax, all, [PREFILL_PAIRS]);
    SHARED(Merging, mergings, [PREFILL_PAIRS]);
    const u32* item = items + 5ull * blockIdx.x;
    const Pairs pairs = pairs_of(context, item, tables, item[2], blockIdx.y, blockIdx.z, PREFILL_PAIRS);
    const u32 end = pairs.end(pairs.count - 1), dim = context.head_dim;
    // A pair's softmax belongs to one thread until the last partition.
    if (threadIdx.x < PREFILL_PAIRS) {
        all[threadIdx.x].sum = 0.0f;
    }
    for (u32 first = pairs.begin(0, context.window) / PART * PART; first < end; first += PART) {
        Partition<Kv, PREFILL_PAIRS> part = {context, pairs, scratch, pages, scales, first};
        part.prepare(q);
        if (threadIdx.x < pairs.count) {
            mergings[threadIdx.x] = merge(all[threadIdx.x], scratch.part[threadIdx.x]);
        }
        // What is merged so far waits in `out`, where only this block comes.
        part.each_value([&](u32 n, u32 channel, float value) {
            if (!mergings[n].skip) {
                float* to = out + ((u64)pairs.row_of(n) * context.heads + pairs.head_of(n)) * dim + channel;
                *to = merged(mergings[n], *to, value);
            }
        });
    }
    for (u32 i = threadIdx.x; i < pairs.count * dim; i += ATTENTION_THREADS) {
        u32 n = i / dim;
        u64 at = (u64)pairs.row_of(n) * context.heads + pairs.head_of(n);
        out[at * dim + i % dim] = quotient(out[at * dim + i % dim], all[n].sum);
        if (softmax && i % dim == 0) {
            softmax[at] = all[n];
        }
    }
}

#define ATTENTION(Kv, name)                                                                                   \
    KERNEL(attention_decode_##name)(Kv::Stored* pages, float* scales, u32 heads, u32 kv_heads, u32 head_dim,  \
                                    float scale, u32 window, const u32* items, const u32* tables,             \
                                    const float* q, float* partial) {                                         \
        Context context = {heads, kv_heads, head_dim, scale, window};                                         \
        decode<Kv>(pages, scales, context, items, tables, q, partial);                                        \
    }                                                                                                         \
    KERNEL(attention_prefill_##name)(Kv::Stored* pages, float* scales, u32 heads, u32 kv_heads, u32 head_dim, \
                                     float scale, u32 window, const u32* items, const u32* tables,            \
                                     const float* q, float* out, Softmax* softmax) {                          \
        Context context = {heads, kv_heads, head_dim, scale, window};                                         \
        prefill<Kv>(pages, scales, context, items, tables, q, out, softmax);                                  \
    }
FOR_EACH_KV(ATTENTION)

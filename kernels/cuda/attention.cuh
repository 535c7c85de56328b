// One partition of the context for a few (row, head) pairs of a KV head: what all attention kernels are made of.
//
// A context is walked in partitions of PART tokens, cut at fixed places of the sequence. Within a partition, for each pair:
// - scores: a thread owns two keys and walks the channels in order;
// - weights exp(score - largest): the sum has every 32nd token in a chain, then the lanes as in `warp_sum`;
// - values: a thread owns two channels. Page p of the partition belongs to strand p modulo 4; a strand is one chain over
//   its tokens in order, the strands are added in order.
// Partitions are merged in order by their largest scores and sums. (Rabe & Staats, "Self-attention Does Not Need O(n^2)
// Memory", 2021, section 3.) Which pairs are walked together, by which kernel, and where pages are changes none of these
// operations. What a pair may not look at is never added: it may hold anything, NaN included.
#ifndef ATTENTION_CUH
#define ATTENTION_CUH
#include "pages.cuh"

// Tokens of a partition, and its pages.
#define PART 256u
#define PART_PAGES (PART / PAGE)
#define ATTENTION_THREADS 128u
#define WARPS (ATTENTION_THREADS / LANES)
// Chains of values, a warp to each.
#define VALUE_STRANDS 4u
// Channels that a warp takes at once.
#define CHUNK (2 * LANES)
// Most channels of a head.
#define MAX_HEAD_DIM 256u

// The softmax of some partitions: the largest score, and the sum of the weights relative to it; 0 before the first.
struct Softmax {
    float largest, sum;
};

// Factors on what was there and on what comes, and the softmax of both. A part that sees nothing changes nothing.
struct Merging {
    float old, fresh;
    bool skip, copy;
};

DEVICE Merging merge(Softmax& before, Softmax part) {
    Merging merging = {1.0f, 1.0f, part.sum == 0.0f, before.sum == 0.0f};
    if (merging.skip) {
        return merging;
    }
    if (merging.copy) {
        before = part;
        return merging;
    }
    float largest = larger(before.largest, part.largest);
    merging.old = exp_of(before.largest - largest);
    merging.fresh = exp_of(part.largest - largest);
    before.sum = fused(part.sum, merging.fresh, before.sum * merging.old);
    before.largest = largest;
    return merging;
}

DEVICE float merged(const Merging& merging, float before, float value) {
    return merging.copy ? value : fused(value, merging.fresh, before * merging.old);
}

// Shape and places, the same for all blocks of a launch.
struct Context {
    u32 heads, kv_heads, head_dim;
    float scale;
    // Tokens that a row sees, itself included; 0 for all.
    u32 window;
};

// Some rows of a sequence for some heads of one KV head: pair n is head n % heads of row n / heads.
struct Pairs {
    // Page ids of this KV head, in token order.
    const u32* table;
    // Place in the activations of the first row, index of its token.
    u32 row, token;
    // First query head, how many of them, and pairs in all.
    u32 head, heads, count;

    DEVICE u32 row_of(u32 n) const { return row + n / heads; }
    DEVICE u32 head_of(u32 n) const { return head + n % heads; }
    // One past the last token that pair n sees.
    DEVICE u32 end(u32 n) const { return token + n / heads + 1; }
    // The first one.
    DEVICE u32 begin(u32 n, u32 window) const { return window && end(n) > window ? end(n) - window : 0; }
};

template <u32 PAIRS>
struct Scratch {
    // Queries `[channel][pair]` while scores are made, then strands of values `[strand][pair][channel of the chunk]`.
    union {
        float queries[MAX_HEAD_DIM][PAIRS];
        float strands[VALUE_STRANDS][PAIRS][CHUNK];
    };
    // Scores, then weights.
    float weights[PAIRS][PART];
    Softmax part[PAIRS];
};

template <class Kv, u32 PAIRS>
struct Partition {
    typedef typename Kv::Stored Stored;
    const Context& context;
    const Pairs& pairs;
    Scratch<PAIRS>& scratch;
    Stored* pages;
    float* scales;
    // The first token of the partition.
    u32 first;

    DEVICE PageAt<Stored> page(u32 token) const {
        u32 dim = context.head_dim;
        return PageAt<Stored>(pages, scales, pairs.table[token / PAGE], dim, scales_of<Kv>(dim));
    }

    DEVICE bool sees(u32 n, u32 token) const {
        return token < pairs.end(n) && token >= pairs.begin(n, context.window);
    }

    // Whether some pair sees a token of `tokens` tokens from `token` on; then their page is there.
    DEVICE bool seen_by_some(u32 token, u32 tokens) const {
        return token < pairs.end(pairs.count - 1) && token + tokens > pairs.begin(0, context.window);
    }

    // Brings queries, zeros behind the last pair.
    DEVICE void load_queries(const float* q) {
        for (u32 i = threadIdx.x; i < PAIRS * context.head_dim; i += ATTENTION_THREADS) {
            u32 n = i / context.head_dim, channel = i % context.head_dim;
            float value = 0.0f;
            if (n < pairs.count) {
                value = q[((u64)pairs.row_of(n) * context.heads + pairs.head_of(n)) * context.head_dim + channel];
            }
            scratch.queries[channel][n] = value;
        }
        block_wait();
    }

    // Scores of this thread's two keys for all pairs.
    DEVICE void score() {
        const u32 own = 2 * threadIdx.x, token = first + own;
        float sums[PAIRS][2];
        for (u32 n = 0; n < PAIRS; n++) {
            sums[n][0] = 0.0f, sums[n][1] = 0.0f;
        }
        if (seen_by_some(token, 2)) {
            const PageAt<Stored> at = page(token);
            const u32 slot = token % PAGE;
            for (u32 channel = 0; channel < context.head_dim; channel++) {
                float keys[2];
                Kv::load(&at.key(slot, channel), keys);
                if (Kv::SCALED) {
                    keys[0] = keys[0] * at.key_scale(slot, channel / SCALE_BLOCK);
                    keys[1] = keys[1] * at.key_scale(slot + 1, channel / SCALE_BLOCK);
                }
                for (u32 n = 0; n < PAIRS; n++) {
                    float query = scratch.queries[channel][n];
                    sums[n][0] = fused(query, keys[0], sums[n][0]);
                    sums[n][1] = fused(query, keys[1], sums[n][1]);
                }
            }
        }
        const float none = float_of(0xff800000u);
        for (u32 n = 0; n < PAIRS; n++) {
            for (u32 i = 0; i < 2; i++) {
                bool seen = n < pairs.count && sees(n, token + i);
                scratch.weights[n][own + i] = seen ? sums[n][i] * context.scale : none;
            }
        }
        block_wait();
    }

    // Turns scores into weights, zero where a pair may not look. A warp takes a pair.
    DEVICE void weigh() {
        const u32 lane = threadIdx.x % LANES;
        for (u32 n = threadIdx.x / LANES; n < pairs.count; n += WARPS) {
            float largest = scratch.weights[n][lane];
            for (u32 i = lane + LANES; i < PART; i += LANES) {
                largest = larger(largest, scratch.weights[n][i]);
            }
            largest = warp_largest(largest);
            float sum = 0.0f;
            for (u32 i = lane; i < PART; i += LANES) {
                float weight = sees(n, first + i) ? exp_of(scratch.weights[n][i] - largest) : 0.0f;
                scratch.weights[n][i] = weight;
                sum = sum + weight;
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                scratch.part[n].largest = largest;
                scratch.part[n].sum = sum;
            }
        }
        block_wait();
    }

    // Adds the weighted values of a page to the sums of this thread's two channels. Where `ALL`, every pair sees all of it.
    template <bool ALL>
    DEVICE void add_page(u32 token, u32 channel, float sums[PAIRS][2]) const {
        const PageAt<Stored> at = page(token);
        const u32 place = token - first;
        for (u32 slot = 0; slot < PAGE; slot++) {
            float values[2];
            Kv::load(&at.value(slot, channel), values);
            if (Kv::SCALED) {
                float scale = at.value_scale(slot, channel / SCALE_BLOCK);
                values[0] = values[0] * scale, values[1] = values[1] * scale;
            }
            for (u32 n = 0; n < PAIRS; n++) {
                if (ALL || (n < pairs.count && sees(n, token + slot))) {
                    float weight = scratch.weights[n][place + slot];
                    sums[n][0] = fused(weight, values[0], sums[n][0]);
                    sums[n][1] = fused(weight, values[1], sums[n][1]);
                }
            }
        }
    }

    // Strands of the weighted values of channels `chunk..chunk + CHUNK`.
    DEVICE void add_values(u32 chunk) {
        const u32 strand = threadIdx.x / LANES, own = 2 * (threadIdx.x % LANES), channel = chunk + own;
        float sums[PAIRS][2];
        for (u32 n = 0; n < PAIRS; n++) {
            sums[n][0] = 0.0f, sums[n][1] = 0.0f;
        }
        for (u32 p = strand; p < PART_PAGES && channel < context.head_dim; p += VALUE_STRANDS) {
            const u32 token = first + p * PAGE;
            if (!seen_by_some(token, PAGE)) {
                continue;
            }
            // The first pair sees least of the end, the last one least of the beginning.
            if (pairs.count == PAIRS && token + PAGE <= pairs.end(0) &&
                token >= pairs.begin(pairs.count - 1, context.window)) {
                add_page<true>(token, channel, sums);
            } else {
                add_page<false>(token, channel, sums);
            }
        }
        for (u32 n = 0; n < PAIRS; n++) {
            scratch.strands[strand][n][own] = sums[n][0];
            scratch.strands[strand][n][own + 1] = sums[n][1];
        }
        block_wait();
    }

    // The weighted value of a pair, once its strands are there.
    DEVICE float value(u32 n, u32 channel_of_chunk) const {
        float total = scratch.strands[0][n][channel_of_chunk];
        for (u32 strand = 1; strand < VALUE_STRANDS; strand++) {
            total = total + scratch.strands[strand][n][channel_of_chunk];
        }
        return total;
    }

    // Largest scores, sums and weights of all pairs.
    DEVICE void prepare(const float* q) {
        load_queries(q);
        score();
        weigh();
    }

    // Calls `put(pair, channel, weighted value)` for each pair and channel, each by one thread.
    template <class Put>
    DEVICE void each_value(const Put& put) {
        for (u32 chunk = 0; chunk < context.head_dim; chunk += CHUNK) {
            add_values(chunk);
            for (u32 i = threadIdx.x; i < pairs.count * CHUNK; i += ATTENTION_THREADS) {
                if (chunk + i % CHUNK < context.head_dim) {
                    put(i / CHUNK, chunk + i % CHUNK, value(i / CHUNK, i % CHUNK));
                }
            }
            block_wait();
        }
    }
};

#endif

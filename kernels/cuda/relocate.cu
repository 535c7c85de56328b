// `relocate_TYPE`: K and V of consecutive tokens go to an earlier place of their sequence, in place. Values stay as they are, keys
// turn back by as many positions: `factors` has sine and cosine of that angle for each of `head_dim / 2` pairs of channels, which are
// channel 2i and 2i + 1 where `adjacent` is not zero, else i and i + head_dim / 2. The products are those of
// `kernels/codec/elements`.
//
// `tables` has `table_pages` page ids for each head; tokens `from..from + tokens` of these pages go to `to`. A block works on K
// (z = 0) or V of one head and walks its tokens from the first on, a tile at a time: what a tile holds is read before any of it is
// written, and where it is written lies before all that is yet to be read.
//
// Roofline: memory, each byte read and written once; but a head has one block for its K and one for its V, so that a long
// history takes as long as one multiprocessor takes for it, some tens of microseconds a layer. It is a rare thing.
#include "pages.cuh"

#define RELOCATE_THREADS 256u

// A channel of a token in its page.
template <class Stored>
DEVICE Stored& channel_at(const PageAt<Stored>& page, bool key, u32 slot, u32 channel) {
    return key ? page.key(slot, channel) : page.value(slot, channel);
}

DEVICE float wide(u16 value) {
    return from_half(value);
}
DEVICE float wide(float value) {
    return value;
}

template <class Kv>
DEVICE void relocate(typename Kv::Stored* pages, u32 head_dim, const u32* tables, u32 table_pages, u32 from, u32 to,
                     u32 tokens, const float* factors, u32 adjacent) {
    typedef typename Kv::Stored Stored;
    const u32* table = tables + (u64)blockIdx.y * table_pages;
    const bool key = blockIdx.z == 0;
    const u32 half = head_dim / 2, tile = RELOCATE_THREADS / half;
    const u32 place = threadIdx.x / half, pair = threadIdx.x % half;
    const u32 low = adjacent ? 2 * pair : pair, high = adjacent ? low + 1 : pair + half;
    for (u32 first = 0; first < tokens; first += tile) {
        const u32 token = first + place;
        const bool mine = place < tile && token < tokens;
        Stored x, y;
        if (mine) {
            const PageAt<Stored> page(pages, (float*)0, table[(from + token) / PAGE], head_dim, 0);
            x = channel_at(page, key, (from + token) % PAGE, low), y = channel_at(page, key, (from + token) % PAGE, high);
        }
        block_wait();
        if (mine) {
            if (key) {
                const float sine = -factors[2 * pair], cosine = factors[2 * pair + 1], a = wide(x), b = wide(y);
                x = Kv::store(a * cosine - b * sine), y = Kv::store(a * sine + b * cosine);
            }
            const PageAt<Stored> page(pages, (float*)0, table[(to + token) / PAGE], head_dim, 0);
            channel_at(page, key, (to + token) % PAGE, low) = x, channel_at(page, key, (to + token) % PAGE, high) = y;
        }
    }
}

#define RELOCATE(Kv, name)                                                                                            \
    KERNEL(relocate_##name)(Kv::Stored* pages, u32 head_dim, const u32* tables, u32 table_pages, u32 from, u32 to,    \
                            u32 tokens, const float* factors, u32 adjacent) {                                         \
        relocate<Kv>(pages, head_dim, tables, table_pages, from, to, tokens, factors, adjacent);                      \
    }
RELOCATE(KvF16, f16)
RELOCATE(KvF32, f32)

// `pack_cell_CODEC`: a cell of f16 to codes between the smallest and the largest value of each group; `unpack_cell_CODEC`:
// the other way round. The bytes are those of `kernels/codec`, which says what a group is and how a packed cell is laid out.
//
// `cell` is as `gather_cell_f16` gives it. `factors` has for each token `head_dim / 2` pairs of sine and cosine: keys are
// turned back to position 0 before they are packed, and to their position again after they are unpacked. Where `adjacent` is
// not zero, channel 2i turns with 2i + 1, else i with i + head_dim / 2. Blocks with z = 0 work on K, others on V.
//
// Roofline: memory, 2 bytes a value on one side and 1 or half of one on the other, and 8 bytes of factors for two keys. A
// cell is some hundred KiB, so the start of the launch is what it costs; packing saves the bus to the host two to four times
// as many bytes.
#include "numbers.cuh"

#define CODEC_THREADS 128u
// Values that share a zero and a step.
#define GROUP 32u
// Most channels of a head.
#define HEAD_MOST 256u

struct Int8 {
    static const u32 LEVELS = 255;
    // Bytes of so many codes.
    DEVICE static u64 bytes(u64 values) { return values; }
    // Two neighbours.
    DEVICE static void put(u8* codes, u64 pair, u32 low, u32 high) {
        codes[2 * pair] = (u8)low, codes[2 * pair + 1] = (u8)high;
    }
    DEVICE static void get(const u8* codes, u64 pair, u32* low, u32* high) {
        *low = codes[2 * pair], *high = codes[2 * pair + 1];
    }
};

struct Int4 {
    static const u32 LEVELS = 15;
    DEVICE static u64 bytes(u64 values) { return values / 2; }
    DEVICE static void put(u8* codes, u64 pair, u32 low, u32 high) { codes[pair] = (u8)(low | high << 4); }
    DEVICE static void get(const u8* codes, u64 pair, u32* low, u32* high) {
        *low = codes[pair] & 15u, *high = codes[pair] >> 4;
    }
};

// K or V of one head in a packed cell: zeros, steps, codes.
struct PackedPart {
    u16 *zeros, *steps;
    u8* codes;

    template <class Codec>
    DEVICE static PackedPart of(u8* packed, u32 head, bool keys, u32 tokens, u32 head_dim) {
        const u64 values = (u64)tokens * head_dim;
        const u64 key_groups = (u64)((tokens + GROUP - 1) / GROUP) * head_dim;
        const u64 value_groups = (u64)tokens * ((head_dim + GROUP - 1) / GROUP);
        const u64 codes = Codec::bytes(values);
        u8* at = packed + head * (4 * (key_groups + value_groups) + 2 * codes) + (keys ? 0 : 4 * key_groups + codes);
        const u64 groups = keys ? key_groups : value_groups;
        PackedPart part;
        part.zeros = (u16*)at, part.steps = part.zeros + groups, part.codes = at + 4 * groups;
        return part;
    }
};

// Zero and step of a group, rounded to f16. A zero of either sign is the positive one: which of them is the smallest or
// the largest would depend on the order of looking. A step that is no number, as between infinite values, is none.
struct Scale {
    float zero, step;
};

DEVICE Scale scale_of(float smallest, float largest, u32 levels) {
    Scale scale;
    scale.zero = from_half(to_half(smallest + 0.0f));
    const float step = from_half(to_half(quotient((largest + 0.0f) - scale.zero, (float)levels)));
    scale.step = step == step ? step : 0.0f;
    return scale;
}

// The nearest code; 0 for what is no number.
DEVICE u32 code_of(float value, Scale scale, u32 levels) {
    if (scale.step == 0.0f) {
        return 0;
    }
    float code = round_to_even(quotient(value - scale.zero, scale.step)), most = (float)levels;
    return code > 0.0f ? (u32)(code < most ? code : most) : 0;
}

// The channels that turn together.
struct Pair {
    u32 first, second;

    DEVICE Pair(u32 pair, u32 head_dim, bool adjacent) {
        first = adjacent ? 2 * pair : pair, second = adjacent ? first + 1 : pair + head_dim / 2;
    }
};

// Of [tokens][head_dim] keys, the groups of 32 tokens from `first` on: a block owns them, its threads pairs of channels,
// then channels, then neighbours.
template <class Codec>
DEVICE void pack_keys(const u16* keys, const float* factors, u32 head_dim, u32 tokens, bool adjacent, PackedPart to) {
    SHARED(float, turned, [GROUP][HEAD_MOST]);
    SHARED(Scale, scales, [HEAD_MOST]);
    const u32 first = blockIdx.x * GROUP, count = tokens - first < GROUP ? tokens - first : GROUP;
    const u32 half = head_dim / 2;
    for (u32 i = threadIdx.x; i < count * half; i += CODEC_THREADS) {
        const u32 token = i / half, turn = i % half;
        const u16* key = keys + (u64)(first + token) * head_dim;
        const float* factor = factors + ((u64)(first + token) * half + turn) * 2;
        const Pair at(turn, head_dim, adjacent);
        const float x = from_half(key[at.first]), y = from_half(key[at.second]), sine = -factor[0], cosine = factor[1];
        turned[token][at.first] = x * cosine - y * sine;
        turned[token][at.second] = x * sine + y * cosine;
    }
    block_wait();
    for (u32 channel = threadIdx.x; channel < head_dim; channel += CODEC_THREADS) {
        float smallest = float_of(0x7f800000u), largest = float_of(0xff800000u);
        for (u32 token = 0; token < count; token++) {
            float value = turned[token][channel];
            smallest = value < smallest ? value : smallest, largest = value > largest ? value : largest;
        }
        const Scale scale = scale_of(smallest, largest, Codec::LEVELS);
        scales[channel] = scale;
        const u64 group = (u64)blockIdx.x * head_dim + channel;
        to.zeros[group] = to_half(scale.zero), to.steps[group] = to_half(scale.step);
    }
    block_wait();
    for (u32 i = threadIdx.x; i < count * half; i += CODEC_THREADS) {
        const u32 token = i / half, channel = i % half * 2;
        Codec::put(to.codes, (u64)(first + token) * half + i % half,
                   code_of(turned[token][channel], scales[channel], Codec::LEVELS),
                   code_of(turned[token][channel + 1], scales[channel + 1], Codec::LEVELS));
    }
}

// Of [tokens][head_dim] values, 32 tokens: a warp owns a group of 32 channels of one token, a lane a channel.
template <class Codec>
DEVICE void pack_values(const u16* values, u32 head_dim, u32 tokens, PackedPart to) {
    const u32 first = blockIdx.x * GROUP, count = tokens - first < GROUP ? tokens - first : GROUP;
    const u32 groups = (head_dim + GROUP - 1) / GROUP, lane = threadIdx.x % LANES;
    for (u32 i = threadIdx.x / LANES; i < count * groups; i += CODEC_THREADS / LANES) {
        const u64 token = first + i / groups;
        const u32 channel = i % groups * GROUP + lane;
        const bool inside = channel < head_dim;
        const float value = inside ? from_half(values[token * head_dim + channel]) : 0.0f;
        // What is no number is neither the smallest nor the largest.
        const bool counts = inside && value == value;
        const float none = float_of(0xff800000u);
        const float smallest = -warp_largest(counts ? -value : none), largest = warp_largest(counts ? value : none);
        const Scale scale = scale_of(smallest, largest, Codec::LEVELS);
        const u32 code = code_of(value, scale, Codec::LEVELS);
        const u32 next = (u32)from_lane_xor((float)code, 1);
        if (inside && lane % 2 == 0) {
            Codec::put(to.codes, (token * head_dim + channel) / 2, code, next);
        }
        if (lane == 0) {
            const u64 group = token * groups + i % groups;
            to.zeros[group] = to_half(scale.zero), to.steps[group] = to_half(scale.step);
        }
    }
}

template <class Codec>
DEVICE void pack_cell(const u16* cell, const float* factors, u32 head_dim, u32 tokens, u32 adjacent, u8* packed) {
    const u32 head = blockIdx.y;
    const bool keys = blockIdx.z == 0;
    const u16* part = cell + (2ull * head + (keys ? 0 : 1)) * tokens * head_dim;
    const PackedPart to = PackedPart::of<Codec>(packed, head, keys, tokens, head_dim);
    if (keys) {
        pack_keys<Codec>(part, factors, head_dim, tokens, adjacent != 0, to);
    } else {
        pack_values<Codec>(part, head_dim, tokens, to);
    }
}

DEVICE float value_of(u32 code, u16 zero, u16 step) {
    return (float)code * from_half(step) + from_half(zero);
}

// The code of one channel.
template <class Codec>
DEVICE u32 code_at(const u8* codes, u64 token, u32 channel, u32 head_dim) {
    u32 low, high;
    Codec::get(codes, (token * head_dim + channel) / 2, &low, &high);
    return channel % 2 ? high : low;
}

// A thread owns two channels: those that turn together of K, neighbours of V.
template <class Codec>
DEVICE void unpack_cell(const u8* packed, const float* factors, u32 head_dim, u32 tokens, u32 adjacent, u16* cell) {
    const u32 head = blockIdx.y, half = head_dim / 2;
    const bool keys = blockIdx.z == 0;
    const u64 index = (u64)blockIdx.x * CODEC_THREADS + threadIdx.x, token = index / half;
    if (token >= tokens) {
        return;
    }
    const u32 turn = (u32)(index % half);
    const PackedPart from = PackedPart::of<Codec>((u8*)packed, head, keys, tokens, head_dim);
    u16* to = cell + (2ull * head + (keys ? 0 : 1)) * tokens * head_dim + token * head_dim;
    if (keys) {
        const Pair at(turn, head_dim, adjacent != 0);
        const u64 groups = token / GROUP * head_dim;
        const float x = value_of(code_at<Codec>(from.codes, token, at.first, head_dim), from.zeros[groups + at.first],
                                 from.steps[groups + at.first]);
        const float y = value_of(code_at<Codec>(from.codes, token, at.second, head_dim), from.zeros[groups + at.second],
                                 from.steps[groups + at.second]);
        const float* factor = factors + index * 2;
        const float sine = factor[0], cosine = factor[1];
        to[at.first] = to_half(x * cosine - y * sine);
        to[at.second] = to_half(x * sine + y * cosine);
        return;
    }
    u32 low, high;
    Codec::get(from.codes, token * half + turn, &low, &high);
    const u64 group = token * ((head_dim + GROUP - 1) / GROUP) + 2 * turn / GROUP;
    to[2 * turn] = to_half(value_of(low, from.zeros[group], from.steps[group]));
    to[2 * turn + 1] = to_half(value_of(high, from.zeros[group], from.steps[group]));
}

#define FOR_EACH_CODEC(make) make(Int8, int8) make(Int4, int4)
#define CODEC(Codec, name)                                                                                          \
    KERNEL(pack_cell_##name)(const u16* cell, const float* factors, u32 head_dim, u32 tokens, u32 adjacent,         \
                             u8* packed) {                                                                          \
        pack_cell<Codec>(cell, factors, head_dim, tokens, adjacent, packed);                                        \
    }                                                                                                               \
    KERNEL(unpack_cell_##name)(const u8* packed, const float* factors, u32 head_dim, u32 tokens, u32 adjacent,      \
                               u16* cell) {                                                                         \
        unpack_cell<Codec>(packed, factors, head_dim, tokens, adjacent, cell);                                      \
    }
FOR_EACH_CODEC(CODEC)

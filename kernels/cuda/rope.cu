// `rope`: rotates each head of each row of x to the row's position, in place.
//
// `table` has for each position `head_dim / 2` cosines, then as many sines. Where `adjacent` is not zero, channel 2i
// turns with 2i + 1, else i with i + head_dim / 2. A thread turns one pair.
//
// Roofline: memory. 16 bytes for x and 8 for the table, which heads of a row share, and 4 operations.
#include "device.cuh"

KERNEL(rope)(float* x, u32 heads, u32 head_dim, const float* table, u32 adjacent, const u32* positions, u32 rows) {
    u32 half = head_dim / 2;
    u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 row = index / ((u64)heads * half);
    if (row >= rows) {
        return;
    }
    u32 pair = (u32)(index % half);
    const float* factors = table + (u64)positions[row] * head_dim;
    float cosine = factors[pair], sine = factors[half + pair];
    float* head = x + (index / half) * head_dim;
    u32 first = adjacent ? 2 * pair : pair, second = adjacent ? first + 1 : pair + half;
    float a = head[first], b = head[second];
    head[first] = fused(a, cosine, -(b * sine));
    head[second] = fused(a, sine, b * cosine);
}

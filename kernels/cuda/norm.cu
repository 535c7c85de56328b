// `rms_norm`: out = x / sqrt(mean(x^2) + eps) * weight, row by row; `head_norm`: the same, head by head, in place.
//
// A row belongs to a block of NORM_THREADS threads, a head to a warp. A thread sums the squares of every
// NORM_THREADS-th channel (of every 32nd) in order, the lanes of a warp are added as in `warp_sum`, warps in their order.
// So the order depends on the number of channels alone.
//
// Roofline: memory. 12 bytes a channel, the second reading of x from the cache; with few rows, latency: two
// passes over a row and one wait.
#include "numbers.cuh"

#define NORM_THREADS 256u

DEVICE float norm_factor(float squares, u32 channels, float eps) {
    return quotient(1.0f, square_root(quotient(squares, (float)channels) + eps));
}

KERNEL(rms_norm)(const float* x, const float* weight, float eps, float* out, u32 cols) {
    SHARED(float, sums, [NORM_THREADS / LANES]);
    const float* row = x + (u64)blockIdx.x * cols;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < cols; i += NORM_THREADS) {
        sum = fused(row[i], row[i], sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % LANES == 0) {
        sums[threadIdx.x / LANES] = sum;
    }
    block_wait();
    float total = 0.0f;
    for (u32 warp = 0; warp < NORM_THREADS / LANES; warp++) {
        total = total + sums[warp];
    }
    float factor = norm_factor(total, cols, eps);
    for (u32 i = threadIdx.x; i < cols; i += NORM_THREADS) {
        out[(u64)blockIdx.x * cols + i] = (row[i] * factor) * weight[i];
    }
}

// `count` heads of `head_dim` channels, one after another.
KERNEL(head_norm)(float* x, u64 count, const float* weight, float eps, u32 head_dim) {
    u64 index = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    u32 lane = threadIdx.x % LANES;
    // A whole warp leaves or stays.
    if (index >= count) {
        return;
    }
    float* head = x + index * head_dim;
    float sum = 0.0f;
    for (u32 i = lane; i < head_dim; i += LANES) {
        sum = fused(head[i], head[i], sum);
    }
    float factor = norm_factor(warp_sum(sum), head_dim, eps);
    for (u32 i = lane; i < head_dim; i += LANES) {
        head[i] = (head[i] * factor) * weight[i];
    }
}

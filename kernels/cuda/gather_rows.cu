// `gather_rows`: out[i] = x[rows[i]], for `count` rows of `cols` channels.
//
// Roofline: memory, 8 bytes a channel.
#include "device.cuh"

KERNEL(gather_rows)(const float* x, const u32* rows, float* out, u32 count, u32 cols) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (u64)count * cols) {
        out[i] = x[(u64)rows[i / cols] * cols + i % cols];
    }
}

// `scale`: x *= factor, element by element; `scale_channels`: with a factor for each of `cols` channels.
//
// Roofline: memory. 8 bytes for one product; the factors stay in the cache.
#include "device.cuh"

KERNEL(scale)(float* x, float factor, u64 count) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        x[i] = x[i] * factor;
    }
}

KERNEL(scale_channels)(float* x, const float* factors, u64 count, u32 cols) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        x[i] = x[i] * factors[i % cols];
    }
}

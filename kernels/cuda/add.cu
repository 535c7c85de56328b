// `add`: x += y, element by element.
//
// Roofline: memory. 12 bytes for one addition; a launch over 4,096 channels of one row is bound by its start.
#include "device.cuh"

KERNEL(add)(float* x, const float* y, u64 count) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        x[i] = x[i] + y[i];
    }
}

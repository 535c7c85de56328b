// `swiglu`: gate = silu(gate) * up, element by element, with silu(g) = g / (1 + e^-g).
//
// Roofline: memory. 12 bytes for about 20 operations; at 4.8 TB/s that is 8 T operations/s, an eighth of the peak.
#include "gate.cuh"

KERNEL(swiglu)(float* gate, const float* up, u64 count) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        gate[i] = gated(gate[i], 0.0f - gate[i], up[i]);
    }
}

// `geglu`: gate = gelu(gate) * up, element by element, with the tanh form of GELU.
//
// (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u)), so one `exp` is all it needs.
//
// Roofline: memory, as `swiglu`.
#include "gate.cuh"

KERNEL(geglu)(float* gate, const float* up, u64 count) {
    // -2 * sqrt(2 / pi), and the weight of the cube.
    const float OUTER = -1.5957692f, CUBE = 0.044715f;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        float g = gate[i];
        float inner = g * fused(g * g, CUBE, 1.0f);
        gate[i] = gated(g, inner * OUTER, up[i]);
    }
}

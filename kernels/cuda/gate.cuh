// Activations of the form act(g) = g / (1 + e^x(g)).
#ifndef GATE_CUH
#define GATE_CUH
#include "numbers.cuh"

// act(gate) * up, given the exponent x(gate). Large exponents are clamped, so nothing overflows.
DEVICE float gated(float gate, float exponent, float up) {
    return quotient(gate, 1.0f + exp_of(exponent)) * up;
}

#endif

// The one order in which every product of a row of x and a row of weights is summed, whichever kernel computes it.
//
// Inputs are cut into runs of eight. Run j belongs to strand j modulo 32. A strand is one chain of fused
// multiply-adds over its runs in order, beginning with zero; the strands are added in order, beginning with zero; the
// bias comes last. In the matrix-vector kernel a lane owns a strand; the matrix-matrix kernel walks the strands one
// after the other. So a row of the result has the same bits whichever of them made it and whatever rows were beside it.
#ifndef PRODUCT_CUH
#define PRODUCT_CUH
#include "formats.cuh"

#define STRANDS 32u
// Inputs from a run of a strand to its next.
#define STRIDE (STRANDS * RUN)

// Eight inputs from `k` on; zeros behind the last one. Rows are aligned to 16 bytes where `cols` is a multiple of four.
DEVICE void load_inputs(const float* row, u32 cols, u32 k, float* out) {
    if (cols % 4 == 0 && k + RUN <= cols) {
        float4 low = *(const float4*)(row + k), high = *(const float4*)(row + k + 4);
        out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
        out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
        return;
    }
    for (u32 i = 0; i < RUN; i++) {
        out[i] = k + i < cols ? row[k + i] : 0.0f;
    }
}

#endif

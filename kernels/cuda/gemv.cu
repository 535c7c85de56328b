// `gemv_TOKENS_FORMAT`: out[t] = weights * x[t] + bias for a few rows of x: the product of the decode step.
//
// A block of 8 warps owns 32 outputs, four to a warp; a lane owns one strand (see `product.cuh`) of each. Four outputs
// share each input that a lane loads, TOKENS rows of x share each weight. The strands of the 32 outputs meet in shared
// memory, where one thread adds those of one (row, output).
//
// Roofline: memory. Weights are read once for TOKENS rows of x; x stays in the first-level cache, which gives 4 bytes of
// it for four weights. A weight costs one multiply-add for each row of x and 1 to 5 operations to unpack: 16-bit weights
// at 4.8 TB/s need 5 T operations/s, far below the peak of 33 T; four-bit ones need 40 T, so these are bound by unpacking,
// at a half to two thirds of the bandwidth.
#include "product.cuh"

#define GEMV_WARPS 8u
#define GEMV_OUTPUTS 4u
#define GEMV_BLOCK (GEMV_WARPS * GEMV_OUTPUTS)

template <class Format, u32 BLOCK, u32 TOKENS>
DEVICE void gemv(const u8* weights, u64 row_bytes, const float* bias, const float* x, float* out, u32 outputs,
                 u32 cols, u32 rows) {
    // One more than there are strands, so that the threads that add them meet no bank twice.
    SHARED(float, strands, [TOKENS * GEMV_BLOCK][STRANDS + 1]);
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u32 first = blockIdx.x * GEMV_BLOCK, row = blockIdx.y * TOKENS;
    float sums[GEMV_OUTPUTS][TOKENS];
    const u8* from[GEMV_OUTPUTS];
    for (u32 o = 0; o < GEMV_OUTPUTS; o++) {
        // Outputs past the last one are computed from it and dropped.
        u32 output = first + warp * GEMV_OUTPUTS + o;
        from[o] = weights + (output < outputs ? output : outputs - 1) * row_bytes;
        for (u32 t = 0; t < TOKENS; t++) {
            sums[o][t] = 0.0f;
        }
    }
    for (u32 k = lane * RUN; k < cols; k += STRIDE) {
        float values[GEMV_OUTPUTS][RUN];
        for (u32 o = 0; o < GEMV_OUTPUTS; o++) {
            Format::load(from[o], cols / BLOCK, k, values[o]);
        }
        for (u32 t = 0; t < TOKENS; t++) {
            float inputs[RUN];
            load_inputs(x + (u64)(row + t < rows ? row + t : rows - 1) * cols, cols, k, inputs);
            for (u32 i = 0; i < RUN; i++) {
                for (u32 o = 0; o < GEMV_OUTPUTS; o++) {
                    sums[o][t] = fused(values[o][i], inputs[i], sums[o][t]);
                }
            }
        }
    }
    for (u32 o = 0; o < GEMV_OUTPUTS; o++) {
        for (u32 t = 0; t < TOKENS; t++) {
            strands[t * GEMV_BLOCK + warp * GEMV_OUTPUTS + o][lane] = sums[o][t];
        }
    }
    block_wait();
    for (u32 i = threadIdx.x; i < TOKENS * GEMV_BLOCK; i += GEMV_WARPS * LANES) {
        u32 output = first + i % GEMV_BLOCK, token = row + i / GEMV_BLOCK;
        float total = 0.0f;
        for (u32 strand = 0; strand < STRANDS; strand++) {
            total = total + strands[i][strand];
        }
        if (output < outputs && token < rows) {
            out[(u64)token * outputs + output] = bias ? total + bias[output] : total;
        }
    }
}

#define GEMV(Format, name, block)                                                                             \
    KERNEL(gemv_1_##name)(const u8* weights, u64 row_bytes, const float* bias, const float* x, float* out,    \
                          u32 outputs, u32 cols, u32 rows) {                                                  \
        gemv<Format, block, 1>(weights, row_bytes, bias, x, out, outputs, cols, rows);                        \
    }                                                                                                         \
    KERNEL(gemv_4_##name)(const u8* weights, u64 row_bytes, const float* bias, const float* x, float* out,    \
                          u32 outputs, u32 cols, u32 rows) {                                                  \
        gemv<Format, block, 4>(weights, row_bytes, bias, x, out, outputs, cols, rows);                        \
    }
FOR_EACH_FORMAT(GEMV)

// `gemm_FORMAT`: out[t] = weights * x[t] + bias for many rows of x: the product of prefill, exact in the sense that
// a row has the bits that `gemv` gives it.
//
// A block owns 64 outputs of 64 rows of x, a thread four by four of them. The strands (see `product.cuh`) are walked one
// after the other: four runs of a strand of 64 rows of weights, unpacked, and of 64 rows of x lie in shared memory at a
// time. Each run of weights is unpacked once a block by one thread.
//
// Roofline: arithmetic, on the f32 units and not on tensor cores, whose order of summation is not documented. For each
// step of k a thread reads 8 values from shared memory for 16 multiply-adds, which allows about half of the f32 peak
// (67 T operations/s). A product with one fixed algorithm of a library is faster, and a numerics class of its own.
#include "product.cuh"

#define GEMM_THREADS 256u
// Outputs, and rows of x, of a block.
#define SIDE 64u
// Runs of a strand in shared memory.
#define TILE_RUNS 4u
#define TILE_K (TILE_RUNS * RUN)
// Outputs, and rows of x, of a thread.
#define OWN 4u

// Runs in shared memory, transposed so that a thread reads four neighbours at once.
struct Tile {
    float weights[TILE_K][SIDE];
    float inputs[TILE_K][SIDE];
};

// Brings runs `first..first + TILE_RUNS` of a strand. A thread unpacks one run of weights and copies one of x.
template <class Format, u32 BLOCK>
DEVICE void bring(Tile& tile, const u8* weights, u64 row_bytes, const float* x, u32 outputs, u32 cols, u32 rows,
                  u32 strand, u32 first) {
    const u32 side = threadIdx.x % SIDE, run = threadIdx.x / SIDE;
    const u32 k = (first + run) * STRIDE + strand * RUN;
    const u32 output = blockIdx.x * SIDE + side, row = blockIdx.y * SIDE + side;
    float values[RUN];
    for (u32 i = 0; i < RUN; i++) {
        values[i] = 0.0f;
    }
    if (k < cols && output < outputs) {
        Format::load(weights + output * row_bytes, cols / BLOCK, k, values);
    }
    for (u32 i = 0; i < RUN; i++) {
        tile.weights[run * RUN + i][side] = values[i];
        values[i] = 0.0f;
    }
    if (k < cols && row < rows) {
        load_inputs(x + (u64)row * cols, cols, k, values);
    }
    for (u32 i = 0; i < RUN; i++) {
        tile.inputs[run * RUN + i][side] = values[i];
    }
}

template <class Format, u32 BLOCK>
DEVICE void gemm(const u8* weights, u64 row_bytes, const float* bias, const float* x, float* out, u32 outputs,
                 u32 cols, u32 rows) {
    SHARED(Tile, tile, );
    const u32 own_output = threadIdx.x % (SIDE / OWN) * OWN, own_row = threadIdx.x / (SIDE / OWN) * OWN;
    float totals[OWN][OWN], sums[OWN][OWN];
    for (u32 i = 0; i < OWN * OWN; i++) {
        totals[i / OWN][i % OWN] = 0.0f;
    }
    for (u32 strand = 0; strand < STRANDS && strand * RUN < cols; strand++) {
        for (u32 i = 0; i < OWN * OWN; i++) {
            sums[i / OWN][i % OWN] = 0.0f;
        }
        const u32 runs = (cols - strand * RUN + STRIDE - 1) / STRIDE;
        for (u32 first = 0; first < runs; first += TILE_RUNS) {
            bring<Format, BLOCK>(tile, weights, row_bytes, x, outputs, cols, rows, strand, first);
            block_wait();
            const u32 steps = (runs - first < TILE_RUNS ? runs - first : TILE_RUNS) * RUN;
            for (u32 k = 0; k < steps; k++) {
                const float4 w = *(const float4*)&tile.weights[k][own_output];
                const float4 v = *(const float4*)&tile.inputs[k][own_row];
                const float values[OWN] = {w.x, w.y, w.z, w.w}, inputs[OWN] = {v.x, v.y, v.z, v.w};
                for (u32 t = 0; t < OWN; t++) {
                    for (u32 o = 0; o < OWN; o++) {
                        sums[t][o] = fused(values[o], inputs[t], sums[t][o]);
                    }
                }
            }
            block_wait();
        }
        for (u32 i = 0; i < OWN * OWN; i++) {
            totals[i / OWN][i % OWN] = totals[i / OWN][i % OWN] + sums[i / OWN][i % OWN];
        }
    }
    for (u32 t = 0; t < OWN; t++) {
        for (u32 o = 0; o < OWN; o++) {
            u32 row = blockIdx.y * SIDE + own_row + t, output = blockIdx.x * SIDE + own_output + o;
            if (row < rows && output < outputs) {
                out[(u64)row * outputs + output] = bias ? totals[t][o] + bias[output] : totals[t][o];
            }
        }
    }
}

#define GEMM(Format, name, block)                                                                             \
    KERNEL(gemm_##name)(const u8* weights, u64 row_bytes, const float* bias, const float* x, float* out,      \
                        u32 outputs, u32 cols, u32 rows) {                                                    \
        gemm<Format, block>(weights, row_bytes, bias, x, out, outputs, cols, rows);                           \
    }
FOR_EACH_FORMAT(GEMM)

// `embed_FORMAT`: out[r] = row ids[r] of a table; `dequantise_FORMAT`: all rows of a matrix in order. Values are those
// that the file format defines, as f32.
//
// A thread takes a run of eight values. Rows of the table are `row_bytes` apart, see `formats.cuh`.
//
// Roofline: memory. A value is read in 0.56 to 4 bytes and written in 4; a handful of integer operations each.
#include "formats.cuh"

// Run `index` of a row to `out`; the last run of a float format may be short.
template <class Format, u32 BLOCK>
DEVICE void dequantise_run(const u8* row, u32 cols, u32 run, float* out) {
    float values[RUN];
    Format::load(row, cols / BLOCK, run * RUN, values);
    for (u32 i = 0; i < RUN; i++) {
        if (run * RUN + i < cols) {
            out[run * RUN + i] = values[i];
        }
    }
}

// Runs of a row of `cols` values.
DEVICE u32 runs_of(u32 cols) {
    return (cols + RUN - 1) / RUN;
}

#define DEQUANTISE(Format, name, block)                                                                       \
    KERNEL(embed_##name)(const u8* table, u64 row_bytes, const u32* ids, float* out, u32 rows, u32 cols) {    \
        u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x, row = index / runs_of(cols);                  \
        if (row < rows) {                                                                                     \
            const u8* from = table + ids[row] * row_bytes;                                                    \
            dequantise_run<Format, block>(from, cols, (u32)(index % runs_of(cols)), out + row * cols);        \
        }                                                                                                     \
    }                                                                                                         \
    KERNEL(dequantise_##name)(const u8* weights, u64 row_bytes, float* out, u32 rows, u32 cols) {             \
        u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x, row = index / runs_of(cols);                  \
        if (row < rows) {                                                                                     \
            const u8* from = weights + row * row_bytes;                                                       \
            dequantise_run<Format, block>(from, cols, (u32)(index % runs_of(cols)), out + row * cols);        \
        }                                                                                                     \
    }
FOR_EACH_FORMAT(DEQUANTISE)

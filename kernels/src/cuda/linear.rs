//! `linear`, `embed` and `dequantise`: what is computed with a weight matrix.

use super::backend::{CudaTensor, CudaVector};
use super::driver::Arg;
use super::matrix::{CudaMatrix, suffix};
use super::memory::Device;
use super::programs::{Programs, number};
use crate::error::KernelError;

/// Up to this many rows of x the matrix-vector kernels are used. It changes no bits.
const GEMV_ROWS: usize = 16;
/// Outputs and threads of a block, as in `gemv.cu`.
const GEMV_BLOCK: usize = 32;
const GEMV_THREADS: u32 = 256;
/// Rows of x that share what a block reads.
const GEMV_TOKENS: usize = 4;
/// Outputs and rows of x, and threads, of a block, as in `gemm.cu`.
const GEMM_SIDE: usize = 64;
const GEMM_THREADS: u32 = 256;
/// Values of a run, as in `formats.cuh`.
const RUN: usize = 8;

/// `out = x * weights + bias` for `rows` rows. Everything is checked.
pub(super) fn linear(
    device: &Device,
    programs: &Programs,
    weights: &CudaMatrix,
    bias: Option<&CudaVector>,
    x: &CudaTensor,
    out: &mut CudaTensor,
    rows: usize,
) -> Result<(), KernelError> {
    if rows == 0 {
        return Ok(());
    }
    let name = suffix(weights.format);
    let (kernel, grid, threads) = if rows > GEMV_ROWS {
        let grid = [weights.rows.div_ceil(GEMM_SIDE), rows.div_ceil(GEMM_SIDE), 1];
        (format!("gemm_{name}"), grid, GEMM_THREADS)
    } else {
        let tokens = if rows == 1 { 1 } else { GEMV_TOKENS };
        let grid = [weights.rows.div_ceil(GEMV_BLOCK), rows.div_ceil(tokens), 1];
        (format!("gemv_{tokens}_{name}"), grid, GEMV_THREADS)
    };
    programs.launch(
        device.compute,
        &kernel,
        grid,
        threads,
        &[
            Arg::Read(weights.data.all()),
            Arg::U64(weights.row_bytes as u64),
            bias.map_or(Arg::Null, |bias| Arg::Read(bias.data.all())),
            Arg::Read(x.head(rows)),
            Arg::Write(out.head(rows)),
            Arg::U32(number("outputs", weights.rows)?),
            Arg::U32(number("inputs", weights.cols)?),
            Arg::U32(number("rows", rows)?),
        ],
    )
}

/// `out[r] = table[ids[r]]` for the ids at `ids`. Everything is checked.
pub(super) fn embed(
    programs: &Programs,
    table: &CudaMatrix,
    ids: Arg,
    rows: usize,
    out: &mut CudaTensor,
) -> Result<(), KernelError> {
    programs.each(
        &format!("embed_{}", suffix(table.format)),
        rows.saturating_mul(table.cols.div_ceil(RUN)),
        &[
            Arg::Read(table.data.all()),
            Arg::U64(table.row_bytes as u64),
            ids,
            Arg::Write(out.head(rows)),
            Arg::U32(number("rows", rows)?),
            Arg::U32(number("columns", table.cols)?),
        ],
    )
}

/// All of a matrix as f32, `out` having its shape. Everything is checked.
pub(super) fn dequantise(
    programs: &Programs,
    matrix: &CudaMatrix,
    out: &mut CudaTensor,
) -> Result<(), KernelError> {
    programs.each(
        &format!("dequantise_{}", suffix(matrix.format)),
        matrix.rows.saturating_mul(matrix.cols.div_ceil(RUN)),
        &[
            Arg::Read(matrix.data.all()),
            Arg::U64(matrix.row_bytes as u64),
            Arg::Write(out.head(matrix.rows)),
            Arg::U32(number("rows", matrix.rows)?),
            Arg::U32(number("columns", matrix.cols)?),
        ],
    )
}

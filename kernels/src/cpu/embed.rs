//! `embed`: rows of a table, dequantised to the values the file format defines.

use half::{bf16, f16};

use super::matrix::{CpuMatrix, Data};
use super::packing::GROUP_ROWS;
use super::repack::unpack_row;

/// Writes row `row` of the table to `out`.
pub(super) fn embed(table: &CpuMatrix, row: usize, out: &mut [f32]) {
    let (group, lane) = (row / GROUP_ROWS, row % GROUP_ROWS);
    let own = |len: usize| group * len..(group + 1) * len;
    let floats = table.cols * GROUP_ROWS;
    match &table.data {
        Data::Quantised { layout, bytes, .. } => {
            unpack_row(layout, &bytes[own(layout.group_bytes(table.cols))], lane, out);
        }
        Data::F32(values) => {
            for (out, raw) in out.iter_mut().zip(values[own(floats)].chunks_exact(GROUP_ROWS)) {
                *out = raw[lane];
            }
        }
        Data::F16(values) => {
            for (out, raw) in out.iter_mut().zip(values[own(floats)].chunks_exact(GROUP_ROWS)) {
                *out = f16::from_bits(raw[lane]).to_f32();
            }
        }
        Data::BF16(values) => {
            for (out, raw) in out.iter_mut().zip(values[own(floats)].chunks_exact(GROUP_ROWS)) {
                *out = bf16::from_bits(raw[lane]).to_f32();
            }
        }
    }
}

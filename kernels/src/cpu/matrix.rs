//! Weight matrices on the CPU: loading, repacking, checking.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::buffer::Buffer;
use super::packing::{GROUP_ROWS, Layout, layout_of};
use super::repack;
use super::workers::{Disjoint, Workers};
use crate::backend::MatrixSpec;
use crate::error::KernelError;
use crate::formats::TensorType;

/// A matrix in groups of eight rows, interleaved so that a lane owns a row.
pub struct CpuMatrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Data,
}

/// How the groups are stored.
pub(super) enum Data {
    /// Packed blocks, see [`super::packing`].
    Quantised { format: TensorType, layout: Layout, bytes: Buffer<u8> },
    /// f32 `[group][input][row]`.
    F32(Buffer<f32>),
    /// f16, the same way.
    F16(Buffer<u16>),
    /// bf16, the same way.
    BF16(Buffer<u16>),
}

impl CpuMatrix {
    /// Loads a tensor; refuses what [`crate::backend::Backend::load_matrix`] says.
    pub(super) fn load(workers: &Workers, spec: &MatrixSpec, bytes: &[u8]) -> Result<Self, KernelError> {
        let &MatrixSpec { format, rows, cols, .. } = spec;
        let size = || KernelError::Size { what: format!("tensor `{}`", spec.name), rows, cols };
        if rows == 0 || cols == 0 {
            return Err(size());
        }
        if !cols.is_multiple_of(format.block_size()) {
            let (tensor, block) = (spec.name.clone(), format.block_size());
            return Err(KernelError::BlockSize { tensor, format, cols, block });
        }
        let expected = format.tensor_bytes(rows, cols).ok_or_else(size)?;
        if bytes.len() != expected {
            return Err(KernelError::ByteCount { tensor: spec.name.clone(), expected, got: bytes.len() });
        }
        let groups = rows.div_ceil(GROUP_ROWS);
        let load = Load { workers, name: &spec.name, bytes, row_bytes: expected / rows, groups };
        let data = match format {
            TensorType::F32 => {
                Data::F32(load.floats(cols, |b: [u8; 4]| f32::from_le_bytes(b), f32::is_finite)?)
            }
            TensorType::F16 => Data::F16(load.floats(cols, u16::from_le_bytes, |v| (v & 0x7c00) != 0x7c00)?),
            TensorType::BF16 => {
                Data::BF16(load.floats(cols, u16::from_le_bytes, |v| (v & 0x7f80) != 0x7f80)?)
            }
            _ => {
                let layout = layout_of(format).ok_or_else(size)?;
                Data::Quantised { format, layout, bytes: load.packed(format, &layout, cols)? }
            }
        };
        Ok(Self { rows, cols, data })
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        match &self.data {
            Data::Quantised { bytes, .. } => bytes.len(),
            Data::F32(values) => values.len() * 4,
            Data::F16(values) | Data::BF16(values) => values.len() * 2,
        }
    }

    /// Groups of rows.
    pub(super) fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    /// Bytes of a group.
    pub(super) fn group_bytes(&self) -> usize {
        self.bytes() / self.groups()
    }
}

/// One tensor on its way in.
struct Load<'a> {
    workers: &'a Workers,
    name: &'a str,
    bytes: &'a [u8],
    row_bytes: usize,
    groups: usize,
}

impl<'a> Load<'a> {
    /// The bytes of the rows of a group.
    fn rows(&self, group: usize) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.bytes.chunks_exact(self.row_bytes).skip(group * GROUP_ROWS).take(GROUP_ROWS)
    }

    /// Runs `pack(group) -> first bad lane` for all groups, a few at a time.
    fn each_group(&self, pack: &(dyn Fn(usize) -> Option<usize> + Sync)) -> Result<(), KernelError> {
        let chunk = (1usize << 20).div_ceil(self.row_bytes * GROUP_ROWS);
        let first_bad = AtomicUsize::new(usize::MAX);
        self.workers.run(self.groups.div_ceil(chunk), &|item| {
            for group in item * chunk..((item + 1) * chunk).min(self.groups) {
                if let Some(lane) = pack(group) {
                    first_bad.fetch_min(group * GROUP_ROWS + lane, Ordering::Relaxed);
                }
            }
        });
        match first_bad.into_inner() {
            usize::MAX => Ok(()),
            row => Err(KernelError::NotFinite { tensor: self.name.to_string(), row }),
        }
    }

    fn packed(&self, format: TensorType, layout: &Layout, cols: usize) -> Result<Buffer<u8>, KernelError> {
        let group_bytes = layout.group_bytes(cols);
        let mut out = Buffer::zeroed(self.name, self.groups.saturating_mul(group_bytes))?;
        let shared = Disjoint::new(&mut out);
        self.each_group(&|group| {
            let rows: Vec<&[u8]> = self.rows(group).collect();
            // SAFETY: a group is packed by one item, groups do not overlap.
            let out = unsafe { shared.slice(group * group_bytes, group_bytes) };
            repack::pack_group(format, layout, &rows, out)
        })?;
        Ok(out)
    }

    fn floats<T: super::buffer::Plain, const N: usize>(
        &self,
        cols: usize,
        decode: fn([u8; N]) -> T,
        is_finite: fn(T) -> bool,
    ) -> Result<Buffer<T>, KernelError> {
        let len = cols.saturating_mul(GROUP_ROWS);
        let mut out = Buffer::zeroed(self.name, self.groups.saturating_mul(len))?;
        let shared = Disjoint::new(&mut out);
        self.each_group(&|group| {
            // SAFETY: a group is packed by one item, groups do not overlap.
            let out = unsafe { shared.slice(group * len, len) };
            let mut bad = None;
            for (lane, row) in self.rows(group).enumerate() {
                for (k, raw) in row.as_chunks::<N>().0.iter().enumerate() {
                    let value = decode(*raw);
                    out[k * GROUP_ROWS + lane] = value;
                    if !is_finite(value) {
                        bad = bad.or(Some(lane));
                    }
                }
            }
            bad
        })?;
        Ok(out)
    }
}

/// A vector of f32 (norm weight, bias).
pub struct CpuVector {
    pub(super) values: Vec<f32>,
}

impl CpuVector {
    pub(super) fn load(name: &str, values: &[f32]) -> Result<Self, KernelError> {
        match values.iter().position(|v| !v.is_finite()) {
            Some(row) => Err(KernelError::NotFinite { tensor: name.to_string(), row }),
            None => Ok(Self { values: values.to_vec() }),
        }
    }
}

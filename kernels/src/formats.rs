//! Storage types of weights as GGUF files name them: ids, block sizes, byte counts.
//!
//! Knows sizes only. What the bytes of a block mean is in [`crate::reference::dequantise`] (for
//! reading) and in `cpu::packing` (for computing).

use std::fmt;

/// How a weight tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types, reason = "the names of the GGUF format")]
pub enum TensorType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of single precision.
    BF16,
    /// 4 bits, symmetric: f16 scale per 32.
    Q4_0,
    /// 4 bits, affine: f16 scale and minimum per 32.
    Q4_1,
    /// 5 bits, symmetric: f16 scale per 32.
    Q5_0,
    /// 5 bits, affine: f16 scale and minimum per 32.
    Q5_1,
    /// 8 bits, symmetric: f16 scale per 32.
    Q8_0,
    /// 4 bits, affine: 6-bit scales and minima per 32 in blocks of 256.
    Q4_K,
    /// 5 bits, affine: 6-bit scales and minima per 32 in blocks of 256.
    Q5_K,
    /// 6 bits, symmetric: 8-bit scales per 16 in blocks of 256.
    Q6_K,
}

impl TensorType {
    /// Every type this crate has kernels for.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// The type of a ggml type id, if it is supported.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.ggml_id() == id)
    }

    /// The id GGUF files use.
    pub const fn ggml_id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4_K => 12,
            Self::Q5_K => 13,
            Self::Q6_K => 14,
            Self::BF16 => 30,
        }
    }

    /// Name as in the GGUF format.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// Values in one block.
    pub const fn block_size(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 2 + 16,
            Self::Q4_1 => 2 + 2 + 16,
            Self::Q5_0 => 2 + 4 + 16,
            Self::Q5_1 => 2 + 2 + 4 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q4_K => 2 + 2 + 12 + 128,
            Self::Q5_K => 2 + 2 + 12 + 32 + 128,
            Self::Q6_K => 128 + 64 + 16 + 2,
        }
    }

    /// Whether values are stored in blocks with scales.
    pub const fn is_quantised(self) -> bool {
        self.block_size() > 1
    }

    /// Bytes of a `rows x cols` tensor. `None` when `cols` is not a whole number of blocks or the
    /// count does not fit.
    pub const fn tensor_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_size()) {
            return None;
        }
        match (cols / self.block_size()).checked_mul(self.block_bytes()) {
            Some(row) => row.checked_mul(rows),
            None => None,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_distinct_and_found_again() {
        for format in TensorType::ALL {
            assert_eq!(TensorType::from_ggml_id(format.ggml_id()), Some(format));
        }
        assert_eq!(TensorType::from_ggml_id(9), None);
    }

    #[test]
    fn byte_counts_are_checked() {
        assert_eq!(TensorType::Q4_K.tensor_bytes(3, 512), Some(3 * 2 * 144));
        assert_eq!(TensorType::Q6_K.tensor_bytes(2, 256), Some(2 * 210));
        assert_eq!(TensorType::Q5_0.tensor_bytes(1, 48), None);
        assert_eq!(TensorType::F32.tensor_bytes(usize::MAX, 2), None);
        assert_eq!(TensorType::Q8_0.tensor_bytes(0, 32), Some(0));
    }
}

//! Deterministic samples for the tests: numbers, weights, backends.
#![allow(dead_code, reason = "each test file uses its part")]

use half::{bf16, f16};
use kernels::backend::Backend;
use kernels::cpu::{CpuBackend, CpuOptions, Isa};
use kernels::formats::TensorType;

/// A small counter-based generator (SplitMix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `-1..1`.
    pub(crate) fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

pub(crate) fn floats(random: &mut Random, count: usize, scale: f32) -> Vec<f32> {
    (0..count).map(|_| random.signed() * scale).collect()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

pub(crate) fn backend(threads: usize, isa: Isa) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, isa: Some(isa), ..CpuOptions::default() }).unwrap()
}

pub(crate) fn tensor_of<B: Backend>(backend: &B, values: &[f32], cols: usize) -> B::Tensor {
    let mut tensor = backend.tensor(values.len() / cols, cols).unwrap();
    backend.write(&mut tensor, values).unwrap();
    tensor
}

/// Random bytes of a tensor whose scales are small and finite; codes take every value.
pub(crate) fn weights(random: &mut Random, format: TensorType, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..format.tensor_bytes(rows, cols).unwrap()).map(|_| random.next() as u8).collect();
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        let mut put = |at: usize, scale: f32| {
            let value = f16::from_f32(random.signed() * scale);
            block[at..at + 2].copy_from_slice(&value.to_le_bytes());
        };
        match format {
            TensorType::F32 => block.copy_from_slice(&(random.signed() * 0.1).to_le_bytes()),
            TensorType::F16 => put(0, 0.1),
            TensorType::BF16 => block.copy_from_slice(&bf16::from_f32(random.signed() * 0.1).to_le_bytes()),
            TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 => put(0, 0.01),
            TensorType::Q4_1 | TensorType::Q5_1 => {
                put(0, 0.01);
                put(2, 0.1);
            }
            TensorType::Q4_K | TensorType::Q5_K => {
                put(0, 0.0005);
                put(2, 0.005);
            }
            TensorType::Q6_K => put(208, 0.0001),
        }
    }
    bytes
}

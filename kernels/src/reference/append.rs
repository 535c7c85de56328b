//! `append`, `gather_cell` and `scatter_cell` without pages: one sequence as plain rows in token order.

use half::f16;

/// K and V of one KV head of one sequence, `[token][head_dim]`, rounded to f16.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvRows {
    /// Keys.
    pub keys: Vec<f16>,
    /// Values.
    pub values: Vec<f16>,
}

impl KvRows {
    /// Adds tokens.
    pub fn append(&mut self, keys: &[f32], values: &[f32]) {
        self.keys.extend(keys.iter().map(|v| f16::from_f32(*v)));
        self.values.extend(values.iter().map(|v| f16::from_f32(*v)));
    }

    /// Keys as f32.
    pub fn keys_f32(&self) -> Vec<f32> {
        self.keys.iter().map(|v| v.to_f32()).collect()
    }

    /// Values as f32.
    pub fn values_f32(&self) -> Vec<f32> {
        self.values.iter().map(|v| v.to_f32()).collect()
    }

    /// This head's part of a cell of tokens `first..first + tokens`: K, then V, little-endian.
    pub fn gather(&self, head_dim: usize, first: usize, tokens: usize) -> Vec<u8> {
        let range = first * head_dim..(first + tokens) * head_dim;
        let halves = self.keys[range.clone()].iter().chain(&self.values[range]);
        halves.flat_map(|v| v.to_le_bytes()).collect()
    }

    /// The inverse of `gather`: adds the tokens of a cell's part.
    pub fn scatter(&mut self, part: &[u8]) {
        let halves: Vec<f16> = part.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
        let (keys, values) = halves.split_at(halves.len() / 2);
        self.keys.extend_from_slice(keys);
        self.values.extend_from_slice(values);
    }
}

/// A block of int8 values: the largest magnitude over 127 is its scale, and each value is the nearest whole number of
/// scales, between even ones the even one.
pub fn round_int8(block: &[f32]) -> (f32, Vec<i8>) {
    let largest = block.iter().map(|value| f64::from(value.abs())).fold(0.0, f64::max) as f32;
    if largest == 0.0 {
        return (0.0, vec![0; block.len()]);
    }
    let units = 127.0 / largest;
    (largest / 127.0, block.iter().map(|value| (value * units).round_ties_even() as i8).collect())
}

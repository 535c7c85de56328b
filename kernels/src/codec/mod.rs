//! Codecs of cells: K and V in fewer bits, for cells that leave the device. [`lossless`] gives the very bytes back; what [`Codec`]
//! loses is lost for good.
//!
//! The two codecs with a loss are KIVI (Liu et al. 2024, section 3): every group of [`GROUP`] values is kept as codes between its smallest value and its
//! largest. A group of keys is one channel over consecutive tokens, because keys have channels that are large in every token; a
//! group of values is consecutive channels of one token. Keys are turned back to position 0 first (as in KVQuant, Hooper et al. 2024,
//! section 3.2): rotary embedding would spread a channel that is large in every token over the group's whole range.
//!
//! A packed cell is, for each KV head: zeros and steps of K (`[groups of tokens][head_dim]` each, f16), codes of K
//! (`[tokens][head_dim]`), zeros and steps of V (`[tokens][groups of channels]` each, f16), codes of V. A code of four bits shares its
//! byte with the next channel's, which has the high half.

pub mod elements;
mod groups;
pub mod lossless;
pub(crate) mod relocation;
mod rotation;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::backend::RopePairing;
use crate::error::KernelError;

pub(crate) use rotation::Rotation;

/// Values that share a zero and a step; the last group of a channel or token may be smaller.
pub const GROUP: usize = 32;

/// How a cell is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// Eight bits a value.
    Int8,
    /// Four bits a value.
    Int4,
}

impl Codec {
    /// The largest code.
    pub const fn levels(self) -> u8 {
        match self {
            Self::Int8 => 255,
            Self::Int4 => 15,
        }
    }

    /// `int8` or `int4`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Bytes of `values` codes.
    const fn code_bytes(self, values: usize) -> usize {
        match self {
            Self::Int8 => values,
            Self::Int4 => values / 2,
        }
    }
}

/// What a cell of f16 values holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CellShape {
    /// KV heads.
    pub kv_heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// Channels of a head; even.
    pub head_dim: usize,
    /// Position of the first token.
    pub start: usize,
    /// Base of the keys' rotary embedding.
    pub rope_base: f32,
    /// Which channels it pairs.
    pub rope_pairing: RopePairing,
}

impl CellShape {
    fn values(&self) -> usize {
        self.tokens * self.head_dim
    }

    /// Bytes of the cell as it is on the device.
    pub fn bytes(&self) -> usize {
        2 * self.kv_heads * self.values() * size_of::<f16>()
    }

    /// Bytes of K, and of V, of one head in a packed cell: zeros and steps, then codes.
    fn packed_parts(&self, codec: Codec) -> [[usize; 2]; 2] {
        let codes = codec.code_bytes(self.values());
        let keys = self.tokens.div_ceil(GROUP) * self.head_dim;
        let values = self.tokens * self.head_dim.div_ceil(GROUP);
        [[2 * keys * size_of::<f16>(), codes], [2 * values * size_of::<f16>(), codes]]
    }

    /// Bytes of the packed cell.
    pub fn packed_bytes(&self, codec: Codec) -> usize {
        self.kv_heads * self.packed_parts(codec).iter().flatten().sum::<usize>()
    }

    pub(crate) fn check(&self, what: &'static str, got: usize, expected: usize) -> Result<(), KernelError> {
        let even = self.head_dim.next_multiple_of(2).max(2);
        let pairs = [("channels of a head", even, self.head_dim), (what, expected, got)];
        match pairs.into_iter().find(|(_, expected, got)| expected != got) {
            Some((what, expected, got)) => Err(KernelError::Shape { kernel: "codec", what, expected, got }),
            None => Ok(()),
        }
    }
}

/// Packs a cell (as [`crate::backend::Backend::gather_cell`] gives it, of f16 pages).
///
/// # Errors
/// A cell of another length than the shape's, or a head with an odd number of channels.
pub fn pack(codec: Codec, shape: &CellShape, cell: &[u8]) -> Result<Vec<u8>, KernelError> {
    shape.check("bytes of the cell", cell.len(), shape.bytes())?;
    let rotation = Rotation::new(shape);
    let mut packed = Vec::with_capacity(shape.packed_bytes(codec));
    let half = shape.values() * size_of::<f16>();
    for head in cell.chunks_exact((2 * half).max(1)) {
        let (keys, values) = head.split_at(half);
        let mut keys = floats(keys);
        rotation.back(&mut keys);
        groups::pack_channels(codec, shape.head_dim, &keys, &mut packed);
        groups::pack_tokens(codec, shape.head_dim, &floats(values), &mut packed);
    }
    Ok(packed)
}

/// The cell that a packed one stands for.
///
/// # Errors
/// As [`pack`].
pub fn unpack(codec: Codec, shape: &CellShape, packed: &[u8]) -> Result<Vec<u8>, KernelError> {
    shape.check("bytes of the packed cell", packed.len(), shape.packed_bytes(codec))?;
    let rotation = Rotation::new(shape);
    let mut cell = Vec::with_capacity(shape.bytes());
    let [[key_groups, codes], [value_groups, _]] = shape.packed_parts(codec);
    let mut numbers = vec![0.0; shape.values()];
    for head in packed.chunks_exact((key_groups + value_groups + 2 * codes).max(1)) {
        let (keys, values) = head.split_at(key_groups + codes);
        let (groups, codes) = keys.split_at(key_groups);
        groups::unpack_channels(codec, shape.head_dim, &floats(groups), codes, &mut numbers);
        rotation.forth(&mut numbers);
        put(&numbers, &mut cell);
        let (groups, codes) = values.split_at(value_groups);
        groups::unpack_tokens(codec, shape.head_dim, &floats(groups), codes, &mut numbers);
        put(&numbers, &mut cell);
    }
    Ok(cell)
}

/// Little-endian f16 as f32.
fn floats(bytes: &[u8]) -> Vec<f32> {
    let halves: Vec<f16> = bytes.as_chunks().0.iter().map(|raw| f16::from_le_bytes(*raw)).collect();
    let mut floats = vec![0.0; halves.len()];
    halves.convert_to_f32_slice(&mut floats);
    floats
}

/// Appends `numbers` as little-endian f16.
fn put(numbers: &[f32], out: &mut Vec<u8>) {
    let mut halves = vec![f16::ZERO; numbers.len()];
    halves.convert_from_f32_slice(numbers);
    out.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
}

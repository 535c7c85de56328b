//! Cells packed without loss: what comes back are the very bytes, whatever they are.
//!
//! A float of KV has bits that nothing predicts (most of its mantissa) and bits that are uneven (sign, exponent). So an element
//! is cut into its bytes, those of one place make a *plane*, and each plane is compressed by itself with zstd; one that does not
//! shrink stays as it is. Before that, channels are made alike (`channels`).
//!
//! A packed cell of floats is: a 1 (the version), then planes: for each channel of K and of V of each head whether it is near (a bit, the
//! first channel in the lowest); the parameters of the channels, by their bytes; the elements of K that are near, by their bytes, the
//! others of K, then those of V likewise. Elements are in the order of heads, channels, tokens; of the planes of elements the
//! most significant one is first. A plane is: 0 as it is or 1 zstd (1 byte), the bytes of what follows (4 bytes, little-endian),
//! and that. A packed cell of int8 pages has two kinds of elements without channels: all codes (one plane), and all scales (four).

mod channels;
mod planes;

use crate::backend::{KvType, SCALE_BLOCK};
use crate::error::KernelError;
use channels::{Channel, Float};
use planes::{Reader, Writer};

/// The version of what is written.
const VERSION: u8 = 1;

/// How a cell that is packed without loss is laid out: as [`crate::backend::Backend::gather_cell`] gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellLayout {
    /// KV heads.
    pub kv_heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// How K and V are stored.
    pub kv_type: KvType,
}

/// Why bytes are no packed cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Written by a later version, or not by this codec.
    #[error("its version is {0}, and this program reads version {VERSION}")]
    Version(u8),
    /// It ends too early.
    #[error("it ends too early")]
    Short,
    /// There is more behind its end.
    #[error("it goes on behind its end")]
    Long,
    /// A plane does not unpack, or to another length than the cell's shape says.
    #[error("a plane of it does not unpack to its length")]
    Plane,
    /// There is no memory to unpack it.
    #[error("there is no memory to unpack it")]
    NoMemory,
}

impl CellLayout {
    /// Bytes of the cell as it is on the device.
    pub fn bytes(&self) -> usize {
        2 * self.kv_heads * self.tokens * self.kv_type.head_bytes(self.head_dim)
    }

    /// The format of its elements; none where they are codes with scales.
    fn float(&self) -> Option<Float> {
        match self.kv_type {
            KvType::F16 => Some(Float::F16),
            KvType::F32 => Some(Float::F32),
            KvType::Int8 => None,
        }
    }

    /// Bytes of the codes of K, or of V, of a head, and of their scales.
    fn coded(&self) -> [usize; 2] {
        let scales = self.head_dim.div_ceil(SCALE_BLOCK) * size_of::<f32>();
        [self.tokens * self.head_dim, self.tokens * scales]
    }
}

/// Packs a cell.
///
/// # Errors
/// A cell of another length than the layout's.
pub fn pack(layout: &CellLayout, cell: &[u8]) -> Result<Vec<u8>, KernelError> {
    let (expected, got) = (layout.bytes(), cell.len());
    if expected != got {
        return Err(KernelError::Shape { kernel: "lossless", what: "bytes of the cell", expected, got });
    }
    let mut writer = Writer::new(vec![VERSION]);
    match layout.float() {
        Some(float) => pack_floats(layout, float, cell, &mut writer),
        None => pack_codes(layout, cell, &mut writer),
    }
    Ok(writer.out)
}

/// The cell that a packed one stands for. Whatever the bytes are, no more memory is taken than a few times that of the cell.
///
/// # Errors
/// Bytes that are no packed cell of this layout.
pub fn unpack(layout: &CellLayout, packed: &[u8]) -> Result<Vec<u8>, Damage> {
    let (version, planes) = packed.split_first().ok_or(Damage::Short)?;
    if *version != VERSION {
        return Err(Damage::Version(*version));
    }
    let mut reader = Reader::new(planes)?;
    let mut cell = vec![0; layout.bytes()];
    match layout.float() {
        Some(float) => unpack_floats(layout, float, &mut reader, &mut cell)?,
        None => unpack_codes(layout, &mut reader, &mut cell)?,
    }
    reader.end()?;
    Ok(cell)
}

/// Which of the channels are near, as bits.
fn bits(near: &[bool]) -> Vec<u8> {
    let byte = |of: &[bool]| of.iter().rev().fold(0, |byte, near| byte << 1 | u8::from(*near));
    near.chunks(8).map(byte).collect()
}

fn pack_floats(layout: &CellLayout, float: Float, cell: &[u8], writer: &mut Writer) {
    let CellLayout { kv_heads, tokens, head_dim, .. } = *layout;
    let (channels, block) = (2 * kv_heads * head_dim, tokens * head_dim * float.width);
    let (mut near, mut parameters) = (Vec::with_capacity(channels), Vec::with_capacity(channels));
    let mut halves = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
    let mut column = vec![0; tokens];
    for index in 0..2 * kv_heads {
        let block = &cell[index * block..][..block];
        for channel in 0..head_dim {
            gather(float, head_dim, channel, block, &mut column);
            let kept = Channel::of(float, &column);
            let (is_near, parameter) = kept.parts(float);
            near.push(is_near);
            parameters.push(parameter);
            let elements = &mut halves[index % 2][usize::from(!is_near)];
            elements.extend(column.iter().map(|element| kept.apart(float, *element)));
        }
    }
    writer.plane(&bits(&near));
    writer.elements(float.width / 2, &parameters);
    halves.iter().flatten().for_each(|elements| writer.elements(float.width, elements));
}

fn gather(float: Float, head_dim: usize, channel: usize, block: &[u8], column: &mut [u32]) {
    let rows = block.chunks_exact(head_dim * float.width);
    for (element, row) in column.iter_mut().zip(rows) {
        let bytes = &row[channel * float.width..][..float.width];
        *element = bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
    }
}

fn unpack_floats(
    layout: &CellLayout,
    float: Float,
    reader: &mut Reader<'_>,
    cell: &mut [u8],
) -> Result<(), Damage> {
    let CellLayout { kv_heads, tokens, head_dim, .. } = *layout;
    let (channels, block) = (2 * kv_heads * head_dim, tokens * head_dim * float.width);
    let (mut bits, mut parameters) = (vec![0; channels.div_ceil(8)], vec![0; channels]);
    reader.plane(&mut bits)?;
    reader.elements(float.width / 2, &mut parameters)?;
    let channel_of =
        |index: usize| Channel::from_parts(float, bits[index / 8] >> (index % 8) & 1 == 1, parameters[index]);
    for half in 0..2 {
        for near in [true, false] {
            let heads = (0..kv_heads).map(|head| 2 * head + half);
            let places: Vec<(usize, usize, Channel)> = heads
                .flat_map(|head| (0..head_dim).map(move |channel| (head, channel)))
                .map(|(head, channel)| (head, channel, channel_of(head * head_dim + channel)))
                .filter(|(.., kept)| matches!(kept, Channel::Near { .. }) == near)
                .collect();
            let mut elements = vec![0; places.len() * tokens];
            reader.elements(float.width, &mut elements)?;
            for ((head, channel, kept), column) in places.iter().zip(elements.chunks_exact(tokens.max(1))) {
                let block = &mut cell[head * block..][..block];
                for (left, row) in column.iter().zip(block.chunks_exact_mut(head_dim * float.width)) {
                    let element = kept.together(float, *left).to_le_bytes();
                    row[channel * float.width..][..float.width].copy_from_slice(&element[..float.width]);
                }
            }
        }
    }
    Ok(())
}

/// Codes and scales of a cell: K, V, scales of K, scales of V of each head.
fn pack_codes(layout: &CellLayout, cell: &[u8], writer: &mut Writer) {
    let [codes, scales] = layout.coded().map(|bytes| 2 * bytes);
    let heads = || cell.chunks_exact((codes + scales).max(1));
    writer.plane(&heads().flat_map(|head| &head[..codes]).copied().collect::<Vec<u8>>());
    let values: Vec<u8> = heads().flat_map(|head| &head[codes..]).copied().collect();
    let values: Vec<u32> = values.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    writer.elements(size_of::<f32>(), &values);
}

fn unpack_codes(layout: &CellLayout, reader: &mut Reader<'_>, cell: &mut [u8]) -> Result<(), Damage> {
    let [codes, scales] = layout.coded().map(|bytes| 2 * bytes);
    let mut plane = vec![0; layout.kv_heads * codes];
    reader.plane(&mut plane)?;
    let mut values = vec![0; layout.kv_heads * scales / size_of::<f32>()];
    reader.elements(size_of::<f32>(), &mut values)?;
    let values: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let parts = plane.chunks_exact(codes.max(1)).zip(values.chunks_exact(scales.max(1)));
    for (head, (codes, scales)) in cell.chunks_exact_mut((codes + scales).max(1)).zip(parts) {
        let (own_codes, own_scales) = head.split_at_mut(codes.len());
        own_codes.copy_from_slice(codes);
        own_scales.copy_from_slice(scales);
    }
    Ok(())
}

//! Cells packed without loss: what comes back are the very bytes, whatever they are.
//!
//! A float of KV has bits that nothing predicts (most of its mantissa) and bits that are uneven (sign, exponent). So an element
//! is cut into its bytes, those of one place make a *plane*, and each plane is compressed by itself with zstd; one that does not
//! shrink stays as it is. Before that, channels are made alike (`channels`).
//!
//! A packed cell is a 1 (the version), then planes. A plane is 0 (as it is) or 1 (zstd), the length of what follows (4 bytes,
//! little-endian), and that. Where numbers have several bytes, the plane of the most significant ones is first.
//!
//! Of floats the planes are:
//! - parameters of the channels of K and of V of each head, half as long as an element: the largest exponent, and in the highest bit
//!   whether more than half of the elements are negative;
//! - elements of K of all heads (`[heads][tokens][channels]`), then those of V: the exponent is that of the channel less the
//!   element's, the sign is that of the element exclusive-or the channel's, the mantissa is the element's.
//!
//! Of int8 pages they are: codes of K and V of all heads, then their scales.

mod channels;
mod planes;

use crate::backend::{KvType, SCALE_BLOCK};
use crate::error::KernelError;
use channels::Float;
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
    match layout.kv_type {
        KvType::F16 => pack_floats::<2>(layout, cell, &mut writer),
        KvType::F32 => pack_floats::<4>(layout, cell, &mut writer),
        KvType::Int8 => pack_codes(layout, cell, &mut writer),
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
    match layout.kv_type {
        KvType::F16 => unpack_floats::<2>(layout, &mut reader, &mut cell)?,
        KvType::F32 => unpack_floats::<4>(layout, &mut reader, &mut cell)?,
        KvType::Int8 => unpack_codes(layout, &mut reader, &mut cell)?,
    }
    reader.end()?;
    Ok(cell)
}

fn pack_floats<const WIDTH: usize>(layout: &CellLayout, cell: &[u8], writer: &mut Writer) {
    let CellLayout { kv_heads, tokens, head_dim, .. } = *layout;
    let block = tokens * head_dim * WIDTH;
    let mut parameters = Vec::with_capacity(2 * kv_heads * head_dim);
    let mut halves = [Vec::new(), Vec::new()];
    for index in 0..2 * kv_heads {
        let mut elements = Float::<WIDTH>::read(&cell[index * block..][..block]);
        let of_block = Float::<WIDTH>::parameters(head_dim, &elements);
        Float::<WIDTH>::turn(&of_block, &mut elements);
        parameters.extend(of_block);
        halves[index % 2].extend(elements);
    }
    writer.elements(WIDTH / 2, &parameters);
    halves.iter().for_each(|elements| writer.elements(WIDTH, elements));
}

fn unpack_floats<const WIDTH: usize>(
    layout: &CellLayout,
    reader: &mut Reader<'_>,
    cell: &mut [u8],
) -> Result<(), Damage> {
    let CellLayout { kv_heads, tokens, head_dim, .. } = *layout;
    let block = tokens * head_dim * WIDTH;
    let mut parameters = vec![0; 2 * kv_heads * head_dim];
    reader.elements(WIDTH / 2, &mut parameters)?;
    let mut elements = vec![0; kv_heads * tokens * head_dim];
    for half in 0..2 {
        reader.elements(WIDTH, &mut elements)?;
        for (head, elements) in elements.chunks_exact_mut((tokens * head_dim).max(1)).enumerate() {
            let index = 2 * head + half;
            Float::<WIDTH>::turn(&parameters[index * head_dim..][..head_dim], elements);
            Float::<WIDTH>::write(elements, &mut cell[index * block..][..block]);
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

//! Planes: bytes by their place in the element, each compressed by itself, or as it is where that saves nothing.

use zstd::bulk::{Compressor, Decompressor};

use super::Damage;

/// How hard zstd looks. There is next to nothing to find but uneven bytes: higher levels take longer and save nothing.
const LEVEL: i32 = 1;
/// What a plane begins with: how it is kept, and the bytes of that.
const HEAD_BYTES: usize = 5;
const AS_IT_IS: u8 = 0;
const ZSTD: u8 = 1;

/// Writes planes one after the other.
pub(super) struct Writer {
    /// None where it has no memory: then planes stay as they are.
    compressor: Option<Compressor<'static>>,
    scratch: Vec<u8>,
    pub out: Vec<u8>,
}

impl Writer {
    pub(super) fn new(out: Vec<u8>) -> Self {
        Self { compressor: Compressor::new(LEVEL).ok(), scratch: Vec::new(), out }
    }

    /// Writes one plane.
    pub(super) fn plane(&mut self, bytes: &[u8]) {
        // What does not fit into one byte less than there are is not worth it: zstd gives up where it sees that.
        self.scratch.resize(bytes.len().saturating_sub(1), 0);
        let packed = self.compressor.as_mut().and_then(|compressor| {
            let length = compressor.compress_to_buffer(bytes, &mut self.scratch[..]).ok()?;
            self.scratch.get(..length)
        });
        let (kind, kept) = packed.map_or((AS_IT_IS, bytes), |packed| (ZSTD, packed));
        self.out.push(kind);
        self.out.extend((kept.len() as u32).to_le_bytes());
        self.out.extend(kept);
    }

    /// Writes elements of `width` bytes by planes, the most significant bytes first.
    pub(super) fn elements(&mut self, width: usize, elements: &[u32]) {
        let mut plane = Vec::with_capacity(elements.len());
        for place in (0..width).rev() {
            plane.clear();
            plane.extend(elements.iter().map(|element| (element >> (8 * place)) as u8));
            self.plane(&plane);
        }
    }
}

/// Reads what [`Writer`] wrote. Nothing is larger than what is asked for.
pub(super) struct Reader<'a> {
    decompressor: Decompressor<'static>,
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Result<Self, Damage> {
        let decompressor = Decompressor::new().map_err(|_| Damage::NoMemory)?;
        Ok(Self { decompressor, left: bytes })
    }

    /// Reads one plane of a known length.
    pub(super) fn plane(&mut self, plane: &mut [u8]) -> Result<(), Damage> {
        let (head, rest) = self.left.split_at_checked(HEAD_BYTES).ok_or(Damage::Short)?;
        let [kind, length @ ..] = head else { return Err(Damage::Short) };
        let length = length.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        let (kept, rest) = rest.split_at_checked(length).ok_or(Damage::Short)?;
        self.left = rest;
        let read = match *kind {
            AS_IT_IS if kept.len() == plane.len() => {
                plane.copy_from_slice(kept);
                kept.len()
            }
            ZSTD => self.decompressor.decompress_to_buffer(kept, plane).map_err(|_| Damage::Plane)?,
            _ => return Err(Damage::Plane),
        };
        if read == plane.len() { Ok(()) } else { Err(Damage::Plane) }
    }

    /// Reads elements of `width` bytes.
    pub(super) fn elements(&mut self, width: usize, elements: &mut [u32]) -> Result<(), Damage> {
        let mut plane = vec![0; elements.len()];
        elements.fill(0);
        for place in (0..width).rev() {
            self.plane(&mut plane)?;
            for (element, byte) in elements.iter_mut().zip(&plane) {
                *element |= u32::from(*byte) << (8 * place);
            }
        }
        Ok(())
    }

    /// Nothing may be left.
    pub(super) fn end(self) -> Result<(), Damage> {
        if self.left.is_empty() { Ok(()) } else { Err(Damage::Long) }
    }
}

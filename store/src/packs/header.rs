//! The self-describing header of a cell in a pack, and that of a pack. The byte layout is in `FORMAT.md`.

use crate::packs::{CellId, CellWrite, OwnerId};

/// Cells start at multiples of this; a pack's own header takes the first.
pub(crate) const ALIGN: u64 = 4096;
/// Bytes of a cell's header; its payload follows at once.
pub(crate) const CELL_HEADER: usize = 256;

const CELL_MAGIC: &[u8; 8] = b"SRCELL\x00\x01";
const PACK_MAGIC: &[u8; 8] = b"SRPACK\x00\x01";
const SUMMED: usize = CELL_HEADER - 4;

/// What a cell's header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CellHeader {
    pub(crate) id: CellId,
    pub(crate) contract: [u8; 32],
    pub(crate) chunk: [u8; 32],
    pub(crate) layer: u32,
    pub(crate) tokens: u32,
    pub(crate) codec: u8,
    pub(crate) len: u64,
    pub(crate) hash: [u8; 32],
    pub(crate) owner: OwnerId,
}

/// Where a cell's header stands; part of its checksum, so a misplaced one does not verify.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) store_id: u128,
    pub(crate) pack: u64,
    pub(crate) offset: u64,
}

/// Bytes a cell of `payload` bytes takes in a pack.
pub(crate) fn record_len(payload: u64) -> u64 {
    (CELL_HEADER as u64 + payload).next_multiple_of(ALIGN)
}

fn sum(place: Place, bytes: &[u8]) -> [u8; 4] {
    let sum = crc32c::crc32c(&place.store_id.to_le_bytes());
    let sum = crc32c::crc32c_append(sum, &place.pack.to_le_bytes());
    let sum = crc32c::crc32c_append(sum, &place.offset.to_le_bytes());
    crc32c::crc32c_append(sum, bytes).to_le_bytes()
}

impl CellHeader {
    pub(crate) fn of(cell: &CellWrite<'_>) -> Self {
        Self {
            id: cell.id,
            contract: cell.contract,
            chunk: cell.chunk,
            layer: cell.layer,
            tokens: cell.tokens,
            codec: cell.codec,
            len: cell.payload.len() as u64,
            hash: *blake3::hash(cell.payload).as_bytes(),
            owner: cell.owner,
        }
    }

    pub(crate) fn encode(&self, place: Place) -> [u8; CELL_HEADER] {
        let mut out = [0; CELL_HEADER];
        out[..8].copy_from_slice(CELL_MAGIC);
        out[8..16].copy_from_slice(&self.len.to_le_bytes());
        out[16..20].copy_from_slice(&self.layer.to_le_bytes());
        out[20..24].copy_from_slice(&self.tokens.to_le_bytes());
        out[24] = self.codec;
        out[32..64].copy_from_slice(&self.id);
        out[64..96].copy_from_slice(&self.contract);
        out[96..128].copy_from_slice(&self.chunk);
        out[128..160].copy_from_slice(&self.hash);
        out[160..176].copy_from_slice(&self.owner);
        let sum = sum(place, &out[..SUMMED]);
        out[SUMMED..].copy_from_slice(&sum);
        out
    }

    /// The header, if it is whole and stands where it was written.
    pub(crate) fn decode(bytes: &[u8; CELL_HEADER], place: Place) -> Option<Self> {
        if !bytes.starts_with(CELL_MAGIC) || bytes[SUMMED..] != sum(place, &bytes[..SUMMED]) {
            return None;
        }
        let digest = |at: usize| -> Option<[u8; 32]> { bytes[at..at + 32].try_into().ok() };
        Some(Self {
            len: u64::from_le_bytes(bytes[8..16].try_into().ok()?),
            layer: u32::from_le_bytes(bytes[16..20].try_into().ok()?),
            tokens: u32::from_le_bytes(bytes[20..24].try_into().ok()?),
            codec: bytes[24],
            id: digest(32)?,
            contract: digest(64)?,
            chunk: digest(96)?,
            hash: digest(128)?,
            owner: bytes[160..176].try_into().ok()?,
        })
    }
}

/// The first block of a pack.
pub(crate) fn pack_header(store_id: u128, pack: u64, created_ms: u64) -> Vec<u8> {
    let mut out = vec![0; ALIGN as usize];
    out[..8].copy_from_slice(PACK_MAGIC);
    out[8..16].copy_from_slice(&pack.to_le_bytes());
    out[16..24].copy_from_slice(&created_ms.to_le_bytes());
    out[24..40].copy_from_slice(&store_id.to_le_bytes());
    let sum = sum(Place { store_id, pack, offset: 0 }, &out[..SUMMED]);
    out[SUMMED..CELL_HEADER].copy_from_slice(&sum);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_and_every_other_place_is_refused() {
        let cell = CellWrite {
            id: [1; 32],
            contract: [2; 32],
            chunk: [3; 32],
            layer: 4,
            tokens: 5,
            codec: 6,
            owner: [7; 16],
            owner_quota: None,
            payload: b"payload",
        };
        let header = CellHeader::of(&cell);
        let place = Place { store_id: 9, pack: 1, offset: 8192 };
        let bytes = header.encode(place);
        assert_eq!(CellHeader::decode(&bytes, place), Some(header));
        for other in
            [Place { store_id: 8, ..place }, Place { pack: 2, ..place }, Place { offset: 4096, ..place }]
        {
            assert_eq!(CellHeader::decode(&bytes, other), None);
        }
        for bit in 0..CELL_HEADER * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(CellHeader::decode(&bad, place), None, "bit {bit}");
        }
    }

    #[test]
    fn records_are_aligned() {
        assert_eq!(record_len(0), 4096);
        assert_eq!(record_len(4096 - 256), 4096);
        assert_eq!(record_len(4096 - 255), 8192);
    }
}

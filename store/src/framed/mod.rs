//! Files of CRC-framed records: the form shared by the journal and the metadata log.
//!
//! Owns file headers, frames, scanning and the recovery of what lies behind damage. Knows nothing of what a record
//! means. The byte layout is in `FORMAT.md`.
//!
//! Every checksum is salted with the store's identity, the file's number and the frame's offset: a frame copied to
//! another place, or a payload that imitates one, does not verify.

mod files;
mod scan;
mod tail;
mod wire;

pub(crate) use files::{LogDir, LogPos};
pub(crate) use scan::{FrameReader, Scan, scan};
pub(crate) use tail::{LogTail, TailPoints};
pub(crate) use wire::{Reader, Writer};

use crate::limits::MAX_FRAME_BODY;

/// Bytes of a file's header; the first frame starts here.
pub(crate) const FILE_HEADER: u64 = 64;
/// Bytes before a frame's body: marker, length, start of its group, header CRC, body CRC.
pub(crate) const FRAME_HEADER: usize = 24;
/// Starts every frame; searched for behind damage.
const MARKER: [u8; 4] = [0xA5, b'F', b'r', 0x5A];
const FILE_MAGIC: &[u8; 8] = b"SRLOGFIL";

/// What the checksums of one file are salted with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Salt([u8; 24]);

impl Salt {
    /// The salt of file `number` of the log `kind` in the store `store_id`.
    pub(crate) fn new(store_id: u128, kind: u8, number: u64) -> Self {
        let mut bytes = [0; 24];
        bytes[..16].copy_from_slice(&store_id.to_be_bytes());
        bytes[16..].copy_from_slice(&number.to_be_bytes());
        bytes[16] = kind;
        Self(bytes)
    }

    fn sum(&self, offset: u64, parts: [&[u8]; 2]) -> u32 {
        let sum = crc32c::crc32c(&self.0);
        let sum = crc32c::crc32c_append(sum, &offset.to_be_bytes());
        let sum = crc32c::crc32c_append(sum, parts[0]);
        crc32c::crc32c_append(sum, parts[1])
    }
}

/// The header of a new file.
pub(crate) fn file_header(
    salt: &Salt,
    version: u32,
    number: u64,
    created_ms: u64,
) -> [u8; FILE_HEADER as usize] {
    let mut header = [0; FILE_HEADER as usize];
    header[..8].copy_from_slice(FILE_MAGIC);
    header[8..12].copy_from_slice(&version.to_le_bytes());
    header[16..24].copy_from_slice(&number.to_le_bytes());
    header[24..32].copy_from_slice(&created_ms.to_le_bytes());
    header[32..56].copy_from_slice(&salt.0);
    let sum = salt.sum(0, [&header[..60], &[]]);
    header[60..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Whether a file's first bytes are the header of this very file.
pub(crate) fn header_is_good(salt: &Salt, header: &[u8]) -> bool {
    header.len() >= FILE_HEADER as usize
        && header.starts_with(FILE_MAGIC)
        && header[60..64] == salt.sum(0, [&header[..60], &[]]).to_le_bytes()
}

/// Appends the frame of `body`, which will stand at `offset` of its file, to `out`. `group` is where the frames that
/// are synced together with it start. The body is at most [`MAX_FRAME_BODY`] bytes; callers check their inputs
/// against smaller limits.
pub(crate) fn push_frame(out: &mut Vec<u8>, salt: &Salt, offset: u64, group: u64, body: &[u8]) {
    debug_assert!(body.len() <= MAX_FRAME_BODY);
    let mut head = [0; FRAME_HEADER - 8];
    head[..4].copy_from_slice(&MARKER);
    head[4..8].copy_from_slice(&(body.len() as u32).to_le_bytes());
    head[8..].copy_from_slice(&group.to_le_bytes());
    out.extend_from_slice(&head);
    out.extend_from_slice(&salt.sum(offset, [&head, &[]]).to_le_bytes());
    out.extend_from_slice(&salt.sum(offset, [&head, body]).to_le_bytes());
    out.extend_from_slice(body);
}

/// A good frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame<'a> {
    /// Where the group it was synced with starts.
    pub(crate) group: u64,
    pub(crate) body: &'a [u8],
}

/// The body length that a frame header at `offset` announces, if the header is good.
fn frame_len(salt: &Salt, offset: u64, header: &[u8]) -> Option<usize> {
    let head = header.get(..16)?;
    if !head.starts_with(&MARKER) || header.get(16..20)? != salt.sum(offset, [head, &[]]).to_le_bytes() {
        return None;
    }
    let len = u32::from_le_bytes(head[4..8].try_into().ok()?) as usize;
    (len <= MAX_FRAME_BODY).then_some(len)
}

/// The frame that `bytes` (header and body) hold, if all of it is good.
fn read_frame<'a>(salt: &Salt, offset: u64, bytes: &'a [u8]) -> Option<Frame<'a>> {
    let len = frame_len(salt, offset, bytes)?;
    let body = bytes.get(FRAME_HEADER..FRAME_HEADER + len)?;
    if bytes[20..24] != salt.sum(offset, [&bytes[..16], body]).to_le_bytes() {
        return None;
    }
    Some(Frame { group: u64::from_le_bytes(bytes[8..16].try_into().ok()?), body })
}

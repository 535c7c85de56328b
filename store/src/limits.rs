//! Every limit of the crate that is not an option, in one place.

/// Bytes of a journal record's payload.
pub const MAX_PAYLOAD: usize = 16 << 20;
/// Bytes of a session's name.
pub const MAX_SESSION_NAME: usize = 128;
/// Bytes of a record's or a segment's kind.
pub const MAX_KIND: usize = 64;
/// Bytes of a frame's body: a full record with room for its names.
pub(crate) const MAX_FRAME_BODY: usize = MAX_PAYLOAD + (64 << 10);
/// Bytes waiting in the journal's queue before an append blocks.
pub const MAX_QUEUED_BYTES: usize = 64 << 20;
/// Requests waiting in the journal's queue before an append blocks.
pub const MAX_QUEUED_REQUESTS: usize = 16_384;
/// Bytes returned by one journal read, unless its first record alone is larger.
pub const MAX_READ_BYTES: usize = 32 << 20;
/// Bytes of a metadata value.
pub const MAX_META_VALUE: usize = 4096;
/// Bytes of a metadata key.
pub const MAX_META_KEY: usize = 1024;
/// Operations in one metadata batch.
pub const MAX_META_BATCH: usize = 1024;
/// Entries returned by one metadata scan.
pub const MAX_SCAN: usize = 4096;
/// Segments expired in one sweep.
pub const MAX_SWEEP: usize = 256;
/// Bytes of a cell's payload.
pub const MAX_CELL_PAYLOAD: usize = 64 << 20;
/// Cell claims held by all leases together.
pub const MAX_LEASED: usize = 1 << 20;
/// Longest time a lease can be asked for, in milliseconds: after it, pressure wins.
pub const MAX_LEASE_MS: u64 = 10 * 60 * 1000;
/// Things kept in the quarantine folder; the oldest goes first.
pub const MAX_QUARANTINED: usize = 8;

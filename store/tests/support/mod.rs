//! What several tests use: options, made-up data whose content follows from its name, and a small generator.
#![allow(dead_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use store::{CellId, CellWrite, Disk, MetaKind, OwnerId, Retention, Segment, Store, StoreOptions};

pub(crate) const CONTRACT: [u8; 32] = [7; 32];

/// Options without waiting and with small files.
pub(crate) fn options(meta: MetaKind) -> StoreOptions {
    StoreOptions {
        meta,
        group_window: Duration::ZERO,
        journal_file_bytes: 16 << 10,
        metalog_bytes: 16 << 10,
        pack_bytes: 64 << 10,
        cell_quota_bytes: 1 << 20,
        ..StoreOptions::default()
    }
}

/// Options for a store on a simulated or faulty disk.
pub(crate) fn on_disk(disk: Arc<dyn Disk>) -> StoreOptions {
    StoreOptions { disk, ..options(MetaKind::Memory) }
}

/// Bytes that follow from a name and a number.
pub(crate) fn bytes_of(name: &str, number: u64) -> Vec<u8> {
    let mut dice = Dice(number ^ name.bytes().fold(1469, |h: u64, b| h.wrapping_mul(31) ^ u64::from(b)));
    let len = 1 + (dice.roll() % 300) as usize;
    (0..len).map(|_| dice.roll() as u8).collect()
}

pub(crate) fn cell_id(number: u64) -> CellId {
    let mut id = [0xce; 32];
    id[..8].copy_from_slice(&number.to_le_bytes());
    id
}

/// A payload of several blocks.
pub(crate) fn cell_bytes(number: u64) -> Vec<u8> {
    let mut dice = Dice(number.wrapping_mul(77) + 5);
    let len = (dice.roll() % 9000) as usize;
    (0..len).map(|_| dice.roll() as u8).collect()
}

pub(crate) fn cell(number: u64, payload: &[u8]) -> CellWrite<'_> {
    CellWrite {
        id: cell_id(number),
        contract: CONTRACT,
        chunk: [9; 32],
        layer: number as u32,
        tokens: 64,
        codec: 1,
        owner: OwnerId::default(),
        owner_quota: None,
        payload,
    }
}

/// Saves cell `number`; whether it was stored or already there.
pub(crate) fn put_cell(store: &Store, number: u64) -> bool {
    let report = store.cells().put(&[cell(number, &cell_bytes(number))]).unwrap();
    report.refused.is_empty()
}

pub(crate) fn segment(id: &str, session: &str, start: u64, retention: Retention) -> Segment {
    Segment {
        id: id.into(),
        session: session.into(),
        kind: "reasoning".into(),
        start,
        end: start + 10,
        retention,
        deadline_ms: None,
        supersedes: None,
        created_ms: 1,
        pinned_by: None,
    }
}

/// Appends record `number` of a session and waits until it is durable.
pub(crate) fn append(store: &Store, session: &str, number: u64) -> Result<u64, store::JournalError> {
    let appended = store.journal().append(session, "test", bytes_of(session, number))?;
    appended.ticket.wait()?;
    Ok(appended.seq)
}

/// Asserts that a session holds exactly the records `1..=last`, with the bytes they were given.
pub(crate) fn assert_records(store: &Store, session: &str, last: u64) {
    let mut next = 1;
    loop {
        let records = store.journal().read(session, next - 1, 100).unwrap();
        if records.is_empty() {
            break;
        }
        for record in records {
            assert_eq!(record.seq, next, "session {session}");
            assert_eq!(record.payload, bytes_of(session, next), "session {session} record {next}");
            next += 1;
        }
    }
    assert_eq!(next - 1, last, "records of {session}");
    assert_eq!(store.journal().last_seq(session), last);
}

/// Copies a directory and what it holds.
pub(crate) fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// SplitMix64.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.roll() % n
    }
}

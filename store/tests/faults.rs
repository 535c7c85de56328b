//! Disks that fail: the n-th operation of every kind, poison, and damage to every file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use store::{
    DiskFault, DiskOp, FailAction, Failpoints, FaultEffect, FaultyDisk, JournalError, MetaError, MetaKind,
    MetaStore, Miss, RealDisk, Retention, SimDisk, Store, StoreError, StoreOptions,
};
use support::{
    CONTRACT, append, assert_records, bytes_of, cell, cell_bytes, cell_id, copy_dir, on_disk, options,
    segment,
};

const DIR: &str = "/data";
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// What a run was told.
#[derive(Default, Debug)]
struct Told {
    records: HashMap<&'static str, u64>,
    meta: Option<u64>,
    segments: Vec<u64>,
    cells: Vec<u64>,
    /// The first error that was not a plain refusal.
    failed: bool,
}

/// A fixed piece of work that stops at the first error.
fn work(store: &Store, told: &mut Told) -> Result<(), String> {
    for n in 1..=6 {
        for session in ["a", "b"] {
            append(store, session, n).map_err(|e| e.to_string())?;
            told.records.insert(session, n);
        }
        store.meta().put(b"key", &n.to_be_bytes()).map_err(|e| e.to_string())?;
        told.meta = Some(n);
        store.meta().put(b"filler", &[0; 4000]).map_err(|e| e.to_string())?;
        let id = format!("seg_{n}");
        store.segments().put(segment(&id, "a", n, Retention::Keep)).map_err(|e| e.to_string())?;
        told.segments.push(n);
        let report = store.cells().put(&[cell(n, &cell_bytes(n))]).map_err(|e| e.to_string())?;
        told.cells.extend(report.stored.iter().map(|_| n));
        store.journal().append("goes", "x", vec![0; 6000]).map_err(|e| e.to_string())?;
    }
    store.journal().remove_session("goes").map_err(|e| e.to_string())?;
    store.checkpoint().map_err(|e| e.to_string())
}

fn hold(store: &Store, told: &Told, context: &str) {
    assert!(!store.recovery().has_loss(), "{context}: {:?}", store.recovery());
    for (session, last) in &told.records {
        let found = store.journal().last_seq(session);
        assert!(found >= *last, "{context}: {session} {found} of {last}");
        assert_records(store, session, found);
    }
    if let Some(n) = told.meta {
        assert!(store.meta().get(b"key").unwrap().unwrap() >= n.to_be_bytes().to_vec(), "{context}");
    }
    for n in &told.segments {
        assert!(store.segments().get(&format!("seg_{n}")).unwrap().is_some(), "{context}");
    }
    for n in &told.cells {
        assert_eq!(store.cells().get(&cell_id(*n), &CONTRACT).as_ref(), Ok(&cell_bytes(*n)), "{context}");
    }
}

/// Runs the work with one fault planned, then opens again without it.
fn run(disk: &SimDisk, fault: Option<DiskFault>) -> (FaultyDisk, Told) {
    let faulty = FaultyDisk::new(Arc::new(disk.clone()));
    if let Some(fault) = fault {
        faulty.plan(fault);
    }
    let mut told = Told::default();
    match Store::open(Path::new(DIR), on_disk(Arc::new(faulty.clone()))) {
        Ok(store) => {
            let worked = work(&store, &mut told);
            told.failed = worked.is_err();
            if let Some(reason) = store.poisoned() {
                assert!(worked.is_err(), "poisoned, {reason}, and yet everything was acknowledged");
                let after = store.journal().append("a", "x", vec![]).map(|a| a.seq);
                assert_eq!(after, Err(JournalError::Poisoned(reason.clone())));
                assert_eq!(store.close(), Err(StoreError::Poisoned(reason)));
            }
        }
        Err(_) => told.failed = true,
    }
    (faulty, told)
}

#[test]
fn i6_whichever_operation_fails_nothing_acknowledged_is_lost() {
    let (counting, told) = run(&SimDisk::new(), None);
    assert!(!told.failed);
    let mut failures = 0;
    for on in [DiskOp::Write, DiskOp::Sync, DiskOp::Name] {
        let total = counting.count(on);
        assert!(total > 10, "{on:?}: {total}");
        for nth in 1..=total {
            for effect in
                [FaultEffect::Errno(EIO), FaultEffect::Errno(ENOSPC), FaultEffect::Short { keep: 7 }]
            {
                if matches!(effect, FaultEffect::Short { .. }) && on != DiskOp::Write {
                    continue;
                }
                for repeat in [false, true] {
                    let disk = SimDisk::new();
                    let fault = DiskFault { on, nth, effect, repeat };
                    let (_, told) = run(&disk, Some(fault));
                    failures += u32::from(told.failed);
                    let context = format!("{fault:?}");
                    // The process ended in an orderly way, or the power went with it.
                    hold(
                        &Store::open(Path::new(DIR), on_disk(Arc::new(disk.crash(nth)))).unwrap(),
                        &told,
                        &context,
                    );
                    hold(&Store::open(Path::new(DIR), on_disk(Arc::new(disk))).unwrap(), &told, &context);
                }
            }
        }
    }
    assert!(failures > 100, "{failures} runs noticed their fault");
}

#[test]
fn a_read_that_fails_or_flips_is_never_wrong_data() {
    let disk = SimDisk::new();
    let (_, told) = run(&disk, None);
    let counting = FaultyDisk::new(Arc::new(disk.crash(0)));
    hold(&Store::open(Path::new(DIR), on_disk(Arc::new(counting.clone()))).unwrap(), &told, "counting");
    for nth in 1..=counting.count(DiskOp::Read) {
        for effect in
            [FaultEffect::Errno(EIO), FaultEffect::FlipBit { bit: 4321 }, FaultEffect::Short { keep: 3 }]
        {
            let faulty = FaultyDisk::new(Arc::new(disk.crash(0)));
            faulty.plan(DiskFault { on: DiskOp::Read, nth, effect, repeat: false });
            let Ok(store) = Store::open(Path::new(DIR), on_disk(Arc::new(faulty))) else { continue };
            for session in ["a", "b"] {
                for record in store.journal().read(session, 0, 100).unwrap_or_default() {
                    assert_eq!(record.payload, bytes_of(session, record.seq), "{nth} {effect:?}");
                }
            }
            for n in &told.cells {
                if let Ok(bytes) = store.cells().get(&cell_id(*n), &CONTRACT) {
                    assert_eq!(bytes, cell_bytes(*n), "{nth} {effect:?}");
                }
            }
        }
    }
}

#[test]
fn poison_stops_every_acknowledgement_and_says_why() {
    for (name, part) in [
        ("journal.before_write", "writing the journal failed"),
        ("journal.before_fsync", "writing the journal failed"),
        ("journal.after_fsync", "writing the journal failed"),
        ("journal.before_index", "journal.before_index"),
        ("metalog.before_fsync", "writing the metadata log failed"),
        ("checkpoint.before_flush", "checkpoint.before_flush"),
        ("checkpoint.before_watermark", "checkpoint.before_watermark"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let failpoints = Failpoints::default();
        let with = StoreOptions { failpoints: Some(failpoints.clone()), ..options(MetaKind::Sled) };
        let store = Store::open(dir.path(), with).unwrap();
        append(&store, "s", 1).unwrap();
        store.meta().put(b"k", b"1").unwrap();
        failpoints.arm(name, FailAction::Error, 0).unwrap();
        // One of these reaches the point; the others then find the poison.
        let checkpoint = store.checkpoint();
        let meta = store.meta().put(b"k", b"2");
        let record = append(&store, "s", 2);
        assert!(checkpoint.is_err() || meta.is_err() || record.is_err(), "{name}");
        let reason = store.poisoned().unwrap_or_else(|| panic!("{name}: not poisoned"));
        assert!(reason.contains(part), "{name}: {reason}");
        assert_eq!(record, Err(JournalError::Poisoned(reason.clone())), "{name}");
        assert_eq!(store.meta().put(b"k", b"3"), Err(MetaError::Poisoned(reason.clone())), "{name}");
        assert!(store.segments().put(segment("x", "s", 0, Retention::Keep)).is_err(), "{name}");
        assert_eq!(store.checkpoint(), Err(StoreError::Checkpoint(reason.clone())), "{name}");
        // What was acknowledged can still be read.
        assert_records(&store, "s", 1);
        assert_eq!(store.close(), Err(StoreError::Poisoned(reason)), "{name}");
        let store = Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
        assert_eq!(store.poisoned(), None);
        assert!(store.journal().last_seq("s") >= 1);
        assert!(store.meta().get(b"k").unwrap().is_some());
    }
}

#[test]
fn i8_a_slow_disk_blocks_appends_and_loses_none() {
    let faulty = FaultyDisk::new(Arc::new(SimDisk::new()));
    let store = Store::open(Path::new(DIR), on_disk(Arc::new(faulty.clone()))).unwrap();
    let delay = FaultEffect::Delay(Duration::from_millis(3));
    faulty.plan(DiskFault { on: DiskOp::Sync, nth: 1, effect: delay, repeat: true });
    let tickets: Vec<_> =
        (1..=200).map(|n| store.journal().append("s", "k", bytes_of("s", n)).unwrap().ticket).collect();
    for ticket in tickets {
        ticket.wait().unwrap();
    }
    assert_records(&store, "s", 200);
    // Groups: far fewer syncs than records.
    assert!(faulty.count(DiskOp::Sync) < 120, "{}", faulty.count(DiskOp::Sync));
}

/// Damages a file of sled's, opens, and expects every acknowledged thing to be there.
fn damage_index(damage: impl Fn(&Path, u64), rounds: u64) -> u32 {
    let original = tempfile::tempdir().unwrap();
    let store = Store::open(original.path(), options(MetaKind::Sled)).unwrap();
    for n in 1..=120 {
        append(&store, "s", n).unwrap();
        store.meta().put(&n.to_be_bytes(), &bytes_of("meta", n)).unwrap();
        if n == 60 {
            store.checkpoint().unwrap();
        }
    }
    for n in 0..20 {
        store.cells().put(&[cell(n, &cell_bytes(n))]).unwrap();
        store.segments().put(segment(&format!("seg_{n}"), "s", n, Retention::Keep)).unwrap();
    }
    store.close().unwrap();
    let mut rebuilt = 0;
    for round in 0..rounds {
        let dir = tempfile::tempdir().unwrap();
        copy_dir(original.path(), dir.path());
        damage(&dir.path().join("meta"), round);
        let is_there = dir.path().join("meta").exists();
        let store = Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
        rebuilt += u32::from(store.recovery().rebuilt.is_some());
        if store.recovery().rebuilt.is_some() && is_there {
            assert!(!store.recovery().quarantined.is_empty());
        }
        assert_records(&store, "s", 120);
        for n in 1..=120u64 {
            assert_eq!(
                store.meta().get(&n.to_be_bytes()).unwrap(),
                Some(bytes_of("meta", n)),
                "round {round}"
            );
        }
        for n in 0..20 {
            assert_eq!(store.cells().get(&cell_id(n), &CONTRACT), Ok(cell_bytes(n)), "round {round}");
        }
        assert_eq!(store.segments().list("s").unwrap().len(), 20, "round {round}");
        append(&store, "s", 121).unwrap();
        store.close().unwrap();
    }
    rebuilt
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

fn snapshots(meta: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(meta).unwrap().map(|e| e.unwrap().path());
    entries.filter(|p| p.file_name().unwrap().to_string_lossy().starts_with("snap.")).collect()
}

#[test]
fn damage_to_the_index_is_noticed_and_nothing_is_lost() {
    let flips = |meta: &Path, round: u64| {
        edit(&meta.join("db"), |bytes| {
            // Spread over what is used of the file.
            let used = bytes.iter().rposition(|b| *b != 0).unwrap_or(0) as u64;
            let mut dice = support::Dice(round);
            for _ in 0..1 + round % 4 {
                let bit = dice.below(used * 8);
                bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
            }
        });
    };
    assert!(damage_index(flips, 24) > 0);
    let zeroed_page = |meta: &Path, round: u64| {
        edit(&meta.join("db"), |bytes| {
            let used = bytes.iter().rposition(|b| *b != 0).unwrap_or(0) / 4096 + 1;
            let page = support::Dice(round).below(used as u64) as usize * 4096;
            bytes[page..page + 4096].fill(0);
        });
    };
    assert!(damage_index(zeroed_page, 8) > 0);
    let cut = |meta: &Path, round: u64| edit(&meta.join("db"), |b| b.truncate(b.len() * round as usize / 5));
    assert!(damage_index(cut, 5) > 0);
    let no_database = |meta: &Path, _| std::fs::remove_file(meta.join("db")).unwrap();
    assert_eq!(damage_index(no_database, 1), 1);
    let bad_config = |meta: &Path, _| edit(&meta.join("conf"), |b| b[0] ^= 0x20);
    assert_eq!(damage_index(bad_config, 1), 1);
    let gone = |meta: &Path, _| std::fs::remove_dir_all(meta).unwrap();
    assert_eq!(damage_index(gone, 1), 1);
    let old_snapshot = |meta: &Path, _| {
        std::fs::write(meta.join("snap.0000000000000001.generating"), b"half").unwrap();
    };
    assert_eq!(damage_index(old_snapshot, 1), 0, "a half snapshot is cleaned away");
    let bad_snapshot = |meta: &Path, _| {
        for path in snapshots(meta) {
            edit(&path, |b| b.iter_mut().for_each(|b| *b ^= 0x55));
        }
    };
    damage_index(bad_snapshot, 1);
}

#[test]
fn an_index_that_went_back_in_time_is_rebuilt() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    let store = open();
    for n in 1..=10 {
        append(&store, "s", n).unwrap();
    }
    store.close().unwrap();
    let old = tempfile::tempdir().unwrap();
    copy_dir(&dir.path().join("meta"), old.path());
    let store = open();
    for n in 11..=20 {
        append(&store, "s", n).unwrap();
        store.meta().put(b"k", &n.to_be_bytes()).unwrap();
    }
    store.close().unwrap();
    std::fs::remove_dir_all(dir.path().join("meta")).unwrap();
    copy_dir(old.path(), &dir.path().join("meta"));
    let store = open();
    assert!(store.recovery().rebuilt.as_ref().unwrap().contains("went back"), "{:?}", store.recovery());
    assert_records(&store, "s", 20);
    assert_eq!(store.meta().get(b"k").unwrap().unwrap(), 20u64.to_be_bytes());
}

#[test]
fn a_failing_probe_is_a_doubt_and_a_hanging_one_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let probing = |command: &[&str]| StoreOptions {
        probe: Some(command.iter().map(Into::into).collect()),
        // Long for those that end, short for the one that does not.
        probe_timeout: if command[0] == "sleep" {
            Duration::from_millis(100)
        } else {
            Duration::from_secs(60)
        },
        ..options(MetaKind::Sled)
    };
    let store = Store::open(dir.path(), probing(&["false"])).unwrap();
    assert_eq!(store.recovery().rebuilt, None, "a new index is not probed");
    append(&store, "s", 1).unwrap();
    store.close().unwrap();
    for (command, want) in [
        (&["true"][..], None),
        (&["false"], Some("ended with")),
        (&["sleep", "60"], Some("took longer")),
        (&["/no/such/program"], Some("could not be started")),
    ] {
        let store = Store::open(dir.path(), probing(command)).unwrap();
        match (&store.recovery().rebuilt, want) {
            (None, None) => {}
            (Some(reason), Some(want)) => assert!(reason.contains(want), "{reason}"),
            other => panic!("{command:?}: {other:?}"),
        }
        assert_records(&store, "s", 1);
        store.close().unwrap();
    }
    store::probe_metadata(dir.path()).unwrap();
    edit(&dir.path().join("meta/conf"), |b| b[0] ^= 0x20);
    assert!(store::probe_metadata(dir.path()).is_err());
}

#[test]
fn damage_that_is_met_while_open_marks_the_index() {
    let dir = tempfile::tempdir().unwrap().keep();
    let meta = store::SledMeta::open(&dir, Arc::new(RealDisk), store::SledOptions::default()).unwrap();
    meta.put(b"k", b"v").unwrap();
    drop(meta);
    // A value without an envelope, as no version of this store writes it.
    let raw = sled::open(&dir).unwrap();
    raw.insert(b"k", b"v").unwrap();
    drop(raw);
    let opened =
        store::SledMeta::open(&dir, Arc::new(RealDisk), store::SledOptions::default()).err().unwrap();
    assert!(matches!(opened, MetaError::Corrupt { .. }), "{opened}");
    assert!(dir.join("suspect").exists());
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn foreign_newer_and_damaged_directories_are_refused_by_name() {
    let foreign = tempfile::tempdir().unwrap();
    std::fs::write(foreign.path().join("precious.txt"), b"mine").unwrap();
    let refused = Store::open(foreign.path(), options(MetaKind::Memory)).err().unwrap();
    assert!(refused.to_string().contains("precious.txt"), "{refused}");
    let left: Vec<_> = std::fs::read_dir(foreign.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["precious.txt"], "nothing was written there");
    let dir = tempfile::tempdir().unwrap();
    Store::open(dir.path(), options(MetaKind::Memory)).unwrap().close().unwrap();
    let format = dir.path().join("FORMAT");
    let good = std::fs::read_to_string(&format).unwrap();
    let open_with = |text: String| {
        std::fs::write(&format, text).unwrap();
        Store::open(dir.path(), options(MetaKind::Memory)).err()
    };
    let newer = open_with(good.replace("version 1", "version 2")).unwrap();
    assert!(matches!(newer, store::OpenError::NewerFormat { found: 2, supported: 1 }), "{newer}");
    for i in 0..good.len() {
        let mut bytes = good.clone().into_bytes();
        bytes[i] ^= 1;
        let text = String::from_utf8(bytes).unwrap();
        assert!(open_with(text).is_some(), "byte {i}");
    }
    assert!(open_with(good[..good.len() / 2].to_owned()).is_some());
    assert!(open_with(good).is_none());
}

#[test]
fn files_are_private() {
    use std::os::unix::fs::PermissionsExt;
    fn check(path: &Path) {
        for entry in std::fs::read_dir(path).unwrap() {
            let entry = entry.unwrap();
            let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
            if entry.file_type().unwrap().is_dir() {
                assert_eq!(mode, 0o700, "{}", entry.path().display());
                check(&entry.path());
            } else {
                assert_eq!(mode, 0o600, "{}", entry.path().display());
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("data");
    let store = Store::open(&inside, options(MetaKind::Sled)).unwrap();
    append(&store, "s", 1).unwrap();
    store.cells().put(&[cell(1, b"x")]).unwrap();
    assert_eq!(store.cells().get(&cell_id(2), &CONTRACT), Err(Miss::Absent));
    check(dir.path());
}

//! The journal: power cuts, torn ends, flipped bits, removal of sessions, bounds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use store::limits::{MAX_PAYLOAD, MAX_SESSION_NAME};
use store::{Disk, JournalError, MetaKind, SimDisk, Store, StoreOptions};
use support::{Dice, append, assert_records, bytes_of, copy_dir, on_disk, options};

const DIR: &str = "/data";

fn open(disk: &SimDisk) -> Store {
    Store::open(Path::new(DIR), on_disk(Arc::new(disk.clone()))).unwrap()
}

fn journal_files(disk: &dyn Disk, dir: &Path) -> Vec<PathBuf> {
    let dir = dir.join("journal");
    disk.list(&dir).unwrap().into_iter().map(|e| dir.join(e.name)).collect()
}

#[test]
fn i6_a_power_cut_loses_nothing_that_was_acknowledged() {
    for seed in 0..60 {
        let mut dice = Dice(seed);
        let disk = SimDisk::new();
        let store = open(&disk);
        let mut last = [0u64; 3];
        let mut meta = Vec::new();
        for step in 0..dice.below(120) {
            let which = dice.below(3) as usize;
            let name = format!("sess_{which}");
            last[which] += 1;
            assert_eq!(append(&store, &name, last[which]).unwrap(), last[which]);
            if dice.below(5) == 0 {
                store.meta().put(&[which as u8], &step.to_le_bytes()).unwrap();
                meta.retain(|(k, _)| *k != which as u8);
                meta.push((which as u8, step));
            }
        }
        // Some records are under way when the power goes.
        let under_way = dice.below(4);
        for extra in 1..=under_way {
            store.journal().append("sess_0", "test", bytes_of("sess_0", last[0] + extra)).unwrap();
        }
        let after = disk.crash(seed);
        let again = open(&after);
        let report = again.recovery();
        assert!(report.damaged.is_empty() && report.missing_records == 0, "seed {seed}: {report:?}");
        let first = again.journal().last_seq("sess_0");
        assert!(first >= last[0] && first <= last[0] + under_way, "seed {seed}");
        assert_records(&again, "sess_0", first);
        assert_records(&again, "sess_1", last[1]);
        assert_records(&again, "sess_2", last[2]);
        for (key, step) in meta {
            assert_eq!(again.meta().get(&[key]).unwrap().unwrap(), step.to_le_bytes(), "seed {seed}");
        }
        // And it goes on from there.
        assert_eq!(append(&again, "sess_1", last[1] + 1).unwrap(), last[1] + 1);
        drop(again);
        assert_records(&open(&after), "sess_1", last[1] + 1);
    }
}

#[test]
fn i6_a_torn_end_is_cut_and_reported() {
    let disk = SimDisk::new();
    let store = open(&disk);
    for n in 1..=5 {
        append(&store, "s", n).unwrap();
    }
    store.close().unwrap();
    let path = journal_files(&disk, Path::new(DIR)).pop().unwrap();
    let file = disk.open(&path).unwrap();
    let end = file.len().unwrap();
    // Half a frame behind the last whole one, as an interrupted write leaves it.
    file.write_at(end, &[0xA5, b'F', b'r', 0x5A, 9, 0, 0, 0, 1, 2, 3]).unwrap();
    let store = open(&disk);
    assert_eq!(store.recovery().torn_tail_bytes, 11);
    assert!(!store.recovery().has_loss() && store.recovery().quarantined.is_empty());
    assert_records(&store, "s", 5);
    append(&store, "s", 6).unwrap();
    store.close().unwrap();
    let store = open(&disk);
    assert_eq!(store.recovery().torn_tail_bytes, 0);
    assert_records(&store, "s", 6);
}

#[test]
fn every_flipped_bit_of_the_journal_is_noticed_and_costs_one_record() {
    let disk = SimDisk::new();
    let store = open(&disk);
    for n in 1..=4 {
        append(&store, "s", n).unwrap();
    }
    append(&store, "other", 1).unwrap();
    store.close().unwrap();
    let path = journal_files(&disk, Path::new(DIR)).pop().unwrap();
    let len = disk.open(&path).unwrap().len().unwrap();
    for bit in (0..len * 8).step_by(37) {
        let broken = disk.crash(0);
        broken.flip_bit(&path, bit).unwrap();
        let store = open(&broken);
        let report = store.recovery().clone();
        let mut good = 0;
        for session in ["s", "other"] {
            for record in store.journal().read(session, 0, 10).unwrap() {
                assert_eq!(record.payload, bytes_of(session, record.seq), "bit {bit}: wrong data");
                good += 1;
            }
        }
        let in_header = bit < 64 * 8;
        assert_eq!(good, if in_header { 5 } else { 4 }, "bit {bit}");
        // A flip in the very last frame cannot be told from a torn write.
        let noticed = report.has_loss() || report.torn_tail_bytes > 0;
        assert!(noticed, "bit {bit}: {report:?}");
        if report.has_loss() {
            assert_eq!(report.quarantined.len(), 1, "the damaged file is kept");
        }
    }
}

#[test]
fn i6_with_an_index_a_lost_end_is_damage_and_its_numbers_stay_used() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    let store = open();
    for n in 1..=5 {
        append(&store, "s", n).unwrap();
    }
    store.close().unwrap();
    let real = store::RealDisk;
    let path = journal_files(&real, dir.path()).pop().unwrap();
    let file = real.open(&path).unwrap();
    file.truncate(file.len().unwrap() - 3).unwrap();
    let store = open();
    let report = store.recovery();
    assert!(report.has_loss() && report.missing_records == 1 && report.torn_tail_bytes == 0, "{report:?}");
    assert_eq!(store.journal().read("s", 0, 10).unwrap().len(), 4);
    assert_eq!(
        append(&store, "s", 6).unwrap(),
        6,
        "number 5 was acknowledged once and is not given out again"
    );
    store.close().unwrap();
    let store = open();
    assert!(store.recovery().damaged.is_empty());
    let numbers: Vec<u64> = store.journal().read("s", 0, 10).unwrap().iter().map(|r| r.seq).collect();
    assert_eq!(numbers, [1, 2, 3, 4, 6]);
}

#[test]
fn a_damaged_record_is_an_error_by_name_and_can_be_read_past() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    for n in 1..=3 {
        append(&store, "s", n).unwrap();
    }
    let real = store::RealDisk;
    let path = journal_files(&real, dir.path()).pop().unwrap();
    let file = real.open(&path).unwrap();
    let first = 24 + 1 + 16 + 4 + 1 + 4 + 4 + 4 + bytes_of("s", 1).len() as u64;
    let mut byte = [0];
    file.read_at(64 + first + 60, &mut byte).unwrap();
    file.write_at(64 + first + 60, &[!byte[0]]).unwrap();
    match store.journal().read("s", 0, 10) {
        Err(JournalError::Damaged { session, seq, .. }) => assert_eq!((session.as_str(), seq), ("s", 2)),
        other => panic!("{other:?}"),
    }
    assert_eq!(store.journal().read("s", 2, 10).unwrap()[0].payload, bytes_of("s", 3));
}

#[test]
fn removed_sessions_stay_removed_and_their_files_go() {
    for kind in [MetaKind::Memory, MetaKind::Sled] {
        let dir = tempfile::tempdir().unwrap();
        let open = || Store::open(dir.path(), options(kind)).unwrap();
        let store = open();
        let fill = |store: &Store, session: &str, from: u64| {
            for n in from..from + 200 {
                append(store, session, n).unwrap();
            }
        };
        fill(&store, "old", 1);
        fill(&store, "kept", 1);
        fill(&store, "late", 1);
        let before = journal_files(&store::RealDisk, dir.path()).len();
        assert!(before > 6, "{before} files");
        store.journal().remove_session("old").unwrap();
        store.journal().remove_session("unknown").unwrap();
        assert_eq!(store.journal().read("old", 0, 10).unwrap(), []);
        store.checkpoint().unwrap();
        let after = journal_files(&store::RealDisk, dir.path()).len();
        assert!(after + 2 <= before, "{after} of {before} files");
        assert_records(&store, "kept", 200);
        // The name can be used again, from 1.
        assert_eq!(append(&store, "old", 1).unwrap(), 1);
        store.journal().remove_session("late").unwrap();
        store.close().unwrap();
        for _ in 0..2 {
            let store = open();
            assert!(
                store.recovery().rebuilt.is_none() && !store.recovery().has_loss(),
                "{:?}",
                store.recovery()
            );
            let names: Vec<String> = store.journal().sessions().into_iter().map(|s| s.session).collect();
            assert_eq!(names, ["kept", "old"]);
            assert_records(&store, "old", 1);
            assert_records(&store, "kept", 200);
            store.close().unwrap();
        }
    }
}

#[test]
fn a_tombstone_outlives_the_records_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let open = |kind| Store::open(dir.path(), options(kind)).unwrap();
    let store = open(MetaKind::Sled);
    // One file holds both; `stays` keeps it alive.
    append(&store, "stays", 1).unwrap();
    append(&store, "goes", 1).unwrap();
    for n in 1..=200 {
        append(&store, "filler", n).unwrap();
    }
    store.journal().remove_session("goes").unwrap();
    for n in 201..=400 {
        append(&store, "filler", n).unwrap();
    }
    store.journal().remove_session("filler").unwrap();
    for n in 1..=100 {
        append(&store, "tail", n).unwrap();
    }
    store.checkpoint().unwrap();
    store.close().unwrap();
    // Rebuilt from the journal alone, the removed sessions must not come back.
    let store = open(MetaKind::Memory);
    let names: Vec<String> = store.journal().sessions().into_iter().map(|s| s.session).collect();
    assert_eq!(names, ["stays", "tail"]);
}

#[test]
fn mostly_dead_files_are_written_anew_and_nothing_live_is_lost() {
    for kind in [MetaKind::Memory, MetaKind::Sled] {
        let dir = tempfile::tempdir().unwrap();
        let open = |kind| Store::open(dir.path(), options(kind)).unwrap();
        let files = || journal_files(&store::RealDisk, dir.path()).len();
        let store = open(kind);
        // Every file holds a little of what stays, and tombstones.
        for n in 1..=40 {
            append(&store, "stays", n).unwrap();
            for _ in 0..4 {
                store.journal().append("goes", "x", vec![0; 1500]).unwrap();
            }
            if n % 10 == 0 {
                store.journal().remove_session("goes").unwrap();
            }
        }
        store.checkpoint().unwrap();
        let before = files();
        assert!(before > 10, "{before} files");
        while store.compact().unwrap() {}
        assert_records(&store, "stays", 40);
        store.checkpoint().unwrap();
        assert!(files() <= 3, "{} of {before} files", files());
        assert_records(&store, "stays", 40);
        assert_eq!(append(&store, "stays", 41).unwrap(), 41);
        store.close().unwrap();
        for kind in [kind, MetaKind::Memory] {
            let store = open(kind);
            assert!(store.recovery().rebuilt.is_none() && !store.recovery().has_loss());
            assert_records(&store, "stays", 41);
            assert_eq!(store.journal().sessions().len(), 1, "what was removed stays removed");
            store.close().unwrap();
        }
    }
}

#[test]
fn i6_a_checkpoint_holds_in_a_copy_of_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    for round in 0..5u64 {
        for n in round * 10 + 1..=round * 10 + 10 {
            append(&store, "s", n).unwrap();
        }
        store.checkpoint().unwrap();
        // The copy is what a process that ends here would leave.
        let copied = tempfile::tempdir().unwrap();
        copy_dir(dir.path(), copied.path());
        let copy = Store::open(copied.path(), options(MetaKind::Sled)).unwrap();
        let report = copy.recovery();
        assert_eq!((&report.rebuilt, report.journal_records_replayed), (&None, 0), "round {round}");
        assert_records(&copy, "s", round * 10 + 10);
    }
}

#[test]
fn i6_a_removal_that_is_cut_short_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let failpoints = store::Failpoints::default();
    let with = StoreOptions { failpoints: Some(failpoints.clone()), ..options(MetaKind::Sled) };
    let store = Store::open(dir.path(), with).unwrap();
    for n in 1..=20 {
        append(&store, "s", n).unwrap();
        append(&store, "kept", n).unwrap();
    }
    failpoints.arm("journal.before_index", store::FailAction::Error, 0).unwrap();
    assert!(matches!(store.journal().remove_session("s"), Err(JournalError::Poisoned(_))));
    drop(store);
    let store = Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    // The tombstone was durable, so the removal holds although it was never acknowledged.
    assert_eq!(store.journal().last_seq("s"), 0);
    assert_records(&store, "kept", 20);
}

#[test]
fn i8_bad_input_is_refused_by_name() {
    let disk = SimDisk::new();
    let store = open(&disk);
    let journal = store.journal();
    for name in ["", "a\0b", &"x".repeat(MAX_SESSION_NAME + 1)] {
        assert!(matches!(journal.append(name, "k", vec![]), Err(JournalError::BadName { .. })));
        assert!(matches!(journal.read(name, 0, 1), Err(JournalError::BadName { .. })));
        assert!(matches!(journal.remove_session(name), Err(JournalError::BadName { .. })));
    }
    assert!(matches!(journal.append("s", "", vec![]), Err(JournalError::BadName { .. })));
    let large = journal.append("s", "k", vec![0; MAX_PAYLOAD + 1]).map(|a| a.seq);
    assert_eq!(large, Err(JournalError::PayloadTooLarge { len: MAX_PAYLOAD + 1, limit: MAX_PAYLOAD }));
    let most = journal.append("s", "k", vec![7; MAX_PAYLOAD]).unwrap();
    most.ticket.wait().unwrap();
    assert_eq!(most.seq, 1, "a refused record takes no number");
    append(&store, "s", 2).unwrap();
    assert_eq!(journal.read("s", 0, 10).unwrap().len(), 2);
    assert_eq!(journal.read("nobody", 0, 10).unwrap(), []);
    assert_eq!(journal.read("s", u64::MAX, 10).unwrap(), []);
    drop(store);
    assert_eq!(open(&disk).journal().last_seq("s"), 2);
}

#[test]
fn a_scan_visits_every_session_in_order_and_stops_when_told() {
    let disk = SimDisk::new();
    let store = open(&disk);
    for n in 1..=300 {
        append(&store, "b", n).unwrap();
        append(&store, "a", n).unwrap();
    }
    let mut seen = Vec::new();
    store
        .journal()
        .scan(&mut |record| {
            seen.push((record.session, record.seq));
            if seen.len() == 450 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    let want: Vec<(String, u64)> =
        (1..=300).map(|n| ("a".to_owned(), n)).chain((1..=150).map(|n| ("b".to_owned(), n))).collect();
    assert_eq!(seen, want);
}

#[test]
fn i6_records_are_readable_when_their_ticket_says_so_and_not_before() {
    let disk = SimDisk::new();
    let failpoints = store::Failpoints::default();
    let with = StoreOptions {
        failpoints: Some(failpoints.clone()),
        group_window: Duration::from_millis(1),
        ..on_disk(Arc::new(disk.clone()))
    };
    let store = Store::open(Path::new(DIR), with).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let store = &store;
            scope.spawn(move || {
                let session = format!("t{thread}");
                for n in 1..=50 {
                    let appended = store.journal().append(&session, "k", bytes_of(&session, n)).unwrap();
                    appended.ticket.wait().unwrap();
                    assert_eq!(store.journal().last_seq(&session), n);
                    let record = store.journal().read(&session, n - 1, 1).unwrap().pop().unwrap();
                    assert_eq!(record.payload, bytes_of(&session, n));
                }
            });
        }
    });
    failpoints.arm("journal.before_fsync", store::FailAction::Error, 0).unwrap();
    let lost = store.journal().append("t0", "k", vec![1]).unwrap();
    assert!(matches!(lost.ticket.wait(), Err(JournalError::Poisoned(_))));
    assert_eq!(store.journal().last_seq("t0"), 50);
    assert_eq!(store.journal().read("t0", 50, 1).unwrap(), [], "what is not durable is not readable");
}

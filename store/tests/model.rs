//! Random work against plain maps: what the store says must be what the maps say, across reopens and power cuts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use store::{CasOutcome, MetaKind, Miss, Retention, SimDisk, Store};
use support::{CONTRACT, append, assert_records, cell, cell_bytes, cell_id, on_disk, options, segment};

#[derive(Debug, Clone)]
enum Step {
    Append(u8, u8),
    RemoveSession(u8),
    Put(u8, u16),
    Delete(u8),
    Cas(u8, u16, u16),
    PutCells(Vec<u8>),
    GetCell(u8),
    RemoveCell(u8),
    PutSegment(u8, u8, u16),
    RemoveSegment(u8),
    RemoveSegments(u8),
    RebuildCells,
    Checkpoint,
    Compact,
    Reopen,
    Crash(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4u8, 1..20u8).prop_map(|(s, n)| Step::Append(s, n)),
        1 => (0..4u8).prop_map(Step::RemoveSession),
        4 => (0..8u8, any::<u16>()).prop_map(|(k, v)| Step::Put(k, v)),
        2 => (0..8u8).prop_map(Step::Delete),
        2 => (0..8u8, 0..3u16, any::<u16>()).prop_map(|(k, e, v)| Step::Cas(k, e, v)),
        4 => prop::collection::vec(0..30u8, 1..6).prop_map(Step::PutCells),
        4 => (0..30u8).prop_map(Step::GetCell),
        2 => (0..30u8).prop_map(Step::RemoveCell),
        3 => (0..12u8, 0..4u8, any::<u16>()).prop_map(|(i, s, at)| Step::PutSegment(i, s, at)),
        1 => (0..12u8).prop_map(Step::RemoveSegment),
        1 => (0..4u8).prop_map(Step::RemoveSegments),
        1 => Just(Step::RebuildCells),
        1 => Just(Step::Checkpoint),
        2 => Just(Step::Compact),
        2 => Just(Step::Reopen),
        2 => any::<u64>().prop_map(Step::Crash),
    ]
}

#[derive(Default)]
struct Model {
    sessions: BTreeMap<u8, u64>,
    meta: BTreeMap<u8, Vec<u8>>,
    cells: HashMap<u8, ()>,
    segments: BTreeMap<u8, (u8, u16)>,
}

fn name(session: u8) -> String {
    format!("sess_{session}")
}

/// Applies a step that needs no reopening to both.
fn apply(store: &Store, model: &mut Model, step: &Step) {
    match step {
        Step::Append(s, count) => {
            let last = model.sessions.entry(*s).or_default();
            for _ in 0..*count {
                *last += 1;
                assert_eq!(append(store, &name(*s), *last).unwrap(), *last);
            }
        }
        Step::RemoveSession(s) => {
            store.journal().remove_session(&name(*s)).unwrap();
            model.sessions.remove(s);
        }
        Step::Put(k, v) => {
            store.meta().put(&[*k], &v.to_le_bytes()).unwrap();
            model.meta.insert(*k, v.to_le_bytes().to_vec());
        }
        Step::Delete(k) => {
            store.meta().delete(&[*k]).unwrap();
            model.meta.remove(k);
        }
        Step::Cas(k, guess, v) => {
            // Sometimes the right guess, sometimes absent, sometimes wrong.
            let expected = match guess {
                0 => model.meta.get(k).cloned(),
                1 => None,
                _ => Some(b"wrong".to_vec()),
            };
            let outcome =
                store.meta().compare_and_set(&[*k], expected.as_deref(), Some(&v.to_le_bytes())).unwrap();
            if model.meta.get(k) == expected.as_ref() {
                assert_eq!(outcome, CasOutcome::Done);
                model.meta.insert(*k, v.to_le_bytes().to_vec());
            } else {
                assert_eq!(outcome, CasOutcome::Conflict { current: model.meta.get(k).cloned() });
            }
        }
        Step::PutCells(ids) => {
            let bytes: Vec<Vec<u8>> = ids.iter().map(|n| cell_bytes(u64::from(*n))).collect();
            let cells: Vec<_> = ids.iter().zip(&bytes).map(|(n, b)| cell(u64::from(*n), b)).collect();
            let report = store.cells().put(&cells).unwrap();
            assert_eq!(report.stored.len() + report.present.len(), ids.len(), "{report:?}");
            model.cells.extend(ids.iter().map(|n| (*n, ())));
        }
        Step::GetCell(n) => {
            let want = model.cells.get(n).map(|()| cell_bytes(u64::from(*n))).ok_or(Miss::Absent);
            assert!(store.cells().get(&cell_id(u64::from(*n)), &CONTRACT) == want, "cell {n}");
        }
        Step::RemoveCell(n) => {
            let removed = store.cells().remove(&[cell_id(u64::from(*n))]).unwrap().removed.len();
            assert_eq!(removed, usize::from(model.cells.remove(n).is_some()));
        }
        Step::PutSegment(id, s, at) => {
            // An id stays with its session.
            let s = model.segments.get(id).map_or(*s, |(s, _)| *s);
            let put = segment(&format!("seg_{id}"), &name(s), u64::from(*at), Retention::Keep);
            store.segments().put(put).unwrap();
            model.segments.insert(*id, (s, *at));
        }
        Step::RemoveSegment(id) => {
            let there = model.segments.remove(id).is_some();
            assert_eq!(store.segments().remove(&format!("seg_{id}")).unwrap(), there);
        }
        Step::RemoveSegments(s) => {
            let before = model.segments.len();
            model.segments.retain(|_, (of, _)| of != s);
            assert_eq!(store.segments().remove_session(&name(*s)).unwrap(), before - model.segments.len());
        }
        Step::RebuildCells => {
            assert_eq!(store.cells().rebuild_index().unwrap().cells, model.cells.len() as u64);
        }
        Step::Checkpoint => store.checkpoint().unwrap(),
        Step::Compact => {
            // The first checkpoint lets files be chosen; the last one, if there is one, deletes what was compacted.
            store.checkpoint().unwrap();
            while store.compact().unwrap() {}
        }
        Step::Reopen | Step::Crash(_) => unreachable!("handled by the caller"),
    }
}

fn compare(store: &Store, model: &Model) {
    assert!(!store.recovery().has_loss(), "{:?}", store.recovery());
    let want: Vec<(String, u64)> = model.sessions.iter().map(|(s, n)| (name(*s), *n)).collect();
    let found: Vec<(String, u64)> =
        store.journal().sessions().into_iter().map(|s| (s.session, s.last_seq)).collect();
    assert_eq!(found, want);
    for (session, last) in want {
        assert_records(store, &session, last);
    }
    let found = store.meta().scan_prefix(b"", None, 1000).unwrap();
    assert_eq!(found, model.meta.iter().map(|(k, v)| (vec![*k], v.clone())).collect::<Vec<_>>());
    for n in 0..30 {
        apply(store, &mut Model { cells: model.cells.clone(), ..Model::default() }, &Step::GetCell(n));
    }
    for s in 0..4 {
        let mut want: Vec<(u64, String)> = model
            .segments
            .iter()
            .filter(|(_, (of, _))| *of == s)
            .map(|(id, (_, at))| (u64::from(*at), format!("seg_{id}")))
            .collect();
        want.sort();
        let found = store.segments().list(&name(s)).unwrap();
        assert_eq!(found.into_iter().map(|s| (s.start, s.id)).collect::<Vec<_>>(), want);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn i6_a_store_in_memory_is_what_the_maps_are(steps in prop::collection::vec(step(), 1..60)) {
        let mut disk = SimDisk::new();
        let open = |disk: &SimDisk| Store::open(Path::new("/data"), on_disk(Arc::new(disk.clone()))).unwrap();
        let mut store = open(&disk);
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Reopen => {
                    drop(store);
                    store = open(&disk);
                    compare(&store, &model);
                }
                Step::Crash(seed) => {
                    // The old store is dropped on the old disk.
                    let after = disk.crash(seed);
                    drop(std::mem::replace(&mut disk, after));
                    store = open(&disk);
                    compare(&store, &model);
                }
                step => apply(&store, &mut model, &step),
            }
        }
        compare(&store, &model);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, max_shrink_iters: 50, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn i6_a_store_on_sled_is_what_the_maps_are(steps in prop::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let open = |meta| Store::open(dir.path(), options(meta)).unwrap();
        let mut store = open(MetaKind::Sled);
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Reopen => {
                    drop(store);
                    store = open(MetaKind::Sled);
                    compare(&store, &model);
                }
                Step::Crash(seed) => {
                    drop(store);
                    // Half of the time the index is lost as well.
                    if seed % 2 == 0 {
                        std::fs::remove_dir_all(dir.path().join("meta")).unwrap();
                    }
                    store = open(MetaKind::Sled);
                    assert_eq!(store.recovery().rebuilt.is_some(), seed % 2 == 0);
                    compare(&store, &model);
                }
                step => apply(&store, &mut model, &step),
            }
        }
        compare(&store, &model);
    }
}

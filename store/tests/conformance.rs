//! One suite for every `MetaStore`: sled, memory, and the durable front over each.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;

use store::limits::{MAX_META_BATCH, MAX_META_KEY, MAX_META_VALUE, MAX_SCAN};
use store::{
    CasOutcome, MemoryMeta, MetaError, MetaKind, MetaStore, Op, RealDisk, SledMeta, SledOptions, Store,
};
use support::{Dice, options};

/// Runs `test` on a fresh instance of each implementation.
fn on_each(test: fn(&dyn MetaStore)) {
    test(&MemoryMeta::new());
    let dir = tempfile::tempdir().unwrap();
    test(&SledMeta::open(&dir.path().join("s"), Arc::new(RealDisk), SledOptions::default()).unwrap());
    for kind in [MetaKind::Memory, MetaKind::Sled] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), options(kind)).unwrap();
        test(&**store.meta());
        store.close().unwrap();
    }
}

#[test]
fn puts_gets_deletes() {
    on_each(|meta| {
        assert_eq!(meta.get(b"a").unwrap(), None);
        meta.put(b"a", b"1").unwrap();
        meta.put(b"b", b"").unwrap();
        meta.put(b"a", b"2").unwrap();
        assert_eq!(meta.get(b"a").unwrap().as_deref(), Some(&b"2"[..]));
        assert_eq!(meta.get(b"b").unwrap().as_deref(), Some(&b""[..]));
        meta.delete(b"a").unwrap();
        meta.delete(b"a").unwrap();
        assert_eq!(meta.get(b"a").unwrap(), None);
        meta.flush().unwrap();
        assert_eq!(meta.get(b"b").unwrap().as_deref(), Some(&b""[..]));
    });
}

#[test]
fn compare_and_set_takes_only_what_it_expects() {
    on_each(|meta| {
        let conflict = |current: Option<&[u8]>| CasOutcome::Conflict { current: current.map(<[u8]>::to_vec) };
        assert_eq!(meta.compare_and_set(b"k", Some(b"x"), Some(b"y")).unwrap(), conflict(None));
        assert_eq!(meta.compare_and_set(b"k", None, Some(b"1")).unwrap(), CasOutcome::Done);
        assert_eq!(meta.compare_and_set(b"k", None, Some(b"2")).unwrap(), conflict(Some(b"1")));
        assert_eq!(meta.compare_and_set(b"k", Some(b"1"), Some(b"2")).unwrap(), CasOutcome::Done);
        assert_eq!(meta.compare_and_set(b"k", Some(b"1"), None).unwrap(), conflict(Some(b"2")));
        assert_eq!(meta.compare_and_set(b"k", Some(b"2"), None).unwrap(), CasOutcome::Done);
        assert_eq!(meta.get(b"k").unwrap(), None);
    });
}

#[test]
fn i5_of_many_compare_and_sets_one_wins_each_round() {
    on_each(|meta| {
        meta.put(b"n", &0u64.to_le_bytes()).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut won = 0;
                    while won < 25 {
                        let current = meta.get(b"n").unwrap().unwrap();
                        let next = u64::from_le_bytes(current.clone().try_into().unwrap()) + 1;
                        let outcome =
                            meta.compare_and_set(b"n", Some(&current), Some(&next.to_le_bytes())).unwrap();
                        won += u64::from(outcome == CasOutcome::Done);
                    }
                });
            }
        });
        assert_eq!(meta.get(b"n").unwrap().unwrap(), 100u64.to_le_bytes());
    });
}

#[test]
fn batches_apply_in_order_and_whole() {
    on_each(|meta| {
        meta.batch(vec![
            Op::put(*b"a", *b"1"),
            Op::put(*b"a", *b"2"),
            Op::put(*b"b", *b"3"),
            Op::delete(*b"b"),
        ])
        .unwrap();
        assert_eq!(meta.get(b"a").unwrap().as_deref(), Some(&b"2"[..]));
        assert_eq!(meta.get(b"b").unwrap(), None);
        let refused = meta.batch(vec![Op::put(*b"c", *b"1"), Op::put(*b"d", vec![0; MAX_META_VALUE + 1])]);
        assert_eq!(refused, Err(MetaError::TooLarge { len: MAX_META_VALUE + 1, limit: MAX_META_VALUE }));
        assert_eq!(meta.get(b"c").unwrap(), None, "nothing of a refused batch is applied");
        meta.batch(Vec::new()).unwrap();
    });
}

#[test]
fn i8_limits_are_typed() {
    on_each(|meta| {
        meta.put(b"v", &vec![1; MAX_META_VALUE]).unwrap();
        let too_large = Err(MetaError::TooLarge { len: MAX_META_VALUE + 1, limit: MAX_META_VALUE });
        assert_eq!(meta.put(b"v", &vec![1; MAX_META_VALUE + 1]), too_large);
        assert!(matches!(meta.put(b"", b"x"), Err(MetaError::BadKey { .. })));
        assert!(matches!(meta.get(&vec![1; MAX_META_KEY + 1]), Err(MetaError::BadKey { .. })));
        let many = |n: usize| (0..n).map(|i| Op::put(i.to_be_bytes(), *b"x")).collect::<Vec<_>>();
        assert!(matches!(meta.batch(many(MAX_META_BATCH + 1)), Err(MetaError::BatchTooLarge { .. })));
        meta.batch(many(MAX_META_BATCH)).unwrap();
        for i in 1..=MAX_SCAN / MAX_META_BATCH {
            let ops = (0..MAX_META_BATCH).map(|n| Op::put((i << 32 | n).to_be_bytes(), *b"x")).collect();
            meta.batch(ops).unwrap();
        }
        assert_eq!(meta.scan_prefix(&[0], None, usize::MAX).unwrap().len(), MAX_SCAN);
    });
}

#[test]
fn scans_are_ordered_bounded_and_resumable() {
    on_each(|meta| {
        for key in [&b"p"[..], b"p\x00", b"p\x00\x01", b"pa", b"pb", b"p\xff", b"p\xff\xff", b"q", b"o"] {
            meta.put(key, key).unwrap();
        }
        let keys = |prefix: &[u8], after: Option<&[u8]>, limit| -> Vec<Vec<u8>> {
            let found = meta.scan_prefix(prefix, after, limit).unwrap();
            assert!(found.iter().all(|(k, v)| k == v));
            found.into_iter().map(|(k, _)| k).collect()
        };
        let all = [&b"p"[..], b"p\x00", b"p\x00\x01", b"pa", b"pb", b"p\xff", b"p\xff\xff"];
        assert_eq!(keys(b"p", None, 100), all);
        assert_eq!(keys(b"p", Some(b"pa"), 100), all[4..]);
        assert_eq!(keys(b"p", Some(b"p\x00\x01"), 2), all[3..5]);
        assert_eq!(keys(b"p", Some(b"a"), 1), all[..1]);
        assert!(keys(b"p", Some(b"z"), 1).is_empty());
        assert_eq!(keys(b"", None, 100).len(), 9);
        assert_eq!(keys(b"p", None, 0).len(), 0);
    });
}

#[test]
fn random_work_agrees_with_a_map() {
    on_each(|meta| {
        let mut dice = Dice(11);
        let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        for _ in 0..150 {
            let key = vec![b'k', dice.below(12) as u8, dice.below(2) as u8];
            match dice.below(4) {
                0 => {
                    meta.delete(&key).unwrap();
                    model.remove(&key);
                }
                1 => {
                    let expected = model.get(&key).cloned().filter(|_| dice.below(2) == 0);
                    let done = meta.compare_and_set(&key, expected.as_deref(), Some(b"cas")).unwrap();
                    assert_eq!(done == CasOutcome::Done, model.get(&key) == expected.as_ref());
                    if done == CasOutcome::Done {
                        model.insert(key, b"cas".to_vec());
                    }
                }
                _ => {
                    let value = dice.roll().to_le_bytes().to_vec();
                    meta.put(&key, &value).unwrap();
                    model.insert(key, value);
                }
            }
        }
        let found = meta.scan_prefix(b"k", None, 1000).unwrap();
        assert_eq!(found, model.into_iter().collect::<Vec<_>>());
    });
}

//! Segments: order, retention, expiry, and a wall clock that cannot be trusted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;
use std::sync::Arc;

use store::limits::{MAX_KIND, MAX_SWEEP};
use store::{
    Clock, ClockState, ManualClock, MetaKind, Retention, Segment, SegmentError, SimDisk, Store, StoreOptions,
};
use support::{on_disk, options, segment};

const MINUTE: u64 = 60_000;
const START: u64 = 1_700_000_000_000;
const TTL: Retention = Retention::Expire { ttl_ms: MINUTE };

fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> Store {
    let with = StoreOptions { clock: Arc::<ManualClock>::clone(clock), ..on_disk(Arc::new(disk.clone())) };
    Store::open(Path::new("/data"), with).unwrap()
}

fn fresh() -> (SimDisk, Arc<ManualClock>, Store) {
    let (disk, clock) = (SimDisk::new(), Arc::new(ManualClock::new(START)));
    let store = open(&disk, &clock);
    (disk, clock, store)
}

fn sweep(store: &Store, clock: &ManualClock) -> (Vec<String>, ClockState) {
    let report = store.segments().sweep(clock.now_ms()).unwrap();
    (report.expired.into_iter().map(|s| s.id).collect(), report.clock)
}

#[test]
fn segments_are_listed_in_order_and_survive_a_reopen() {
    for kind in [MetaKind::Memory, MetaKind::Sled] {
        let dir = tempfile::tempdir().unwrap();
        let open = || Store::open(dir.path(), options(kind)).unwrap();
        let store = open();
        let segments = store.segments();
        for (id, session, start) in [("c", "s", 300), ("a", "s", 5), ("b", "s", 70_000), ("x", "s2", 1)] {
            segments.put(segment(id, session, start, Retention::Keep)).unwrap();
        }
        let moved = Segment { start: 1, ..segments.get("b").unwrap().unwrap() };
        segments.put(moved.clone()).unwrap();
        segments.set_retention("a", Retention::DropAfterTurn).unwrap();
        store.close().unwrap();
        let store = open();
        let segments = store.segments();
        let listed: Vec<String> = segments.list("s").unwrap().into_iter().map(|s| s.id).collect();
        assert_eq!(listed, ["b", "a", "c"]);
        assert_eq!(segments.get("b").unwrap(), Some(moved));
        assert_eq!(segments.get("a").unwrap().unwrap().retention, Retention::DropAfterTurn);
        assert!(segments.remove("a").unwrap() && !segments.remove("a").unwrap());
        assert_eq!(segments.remove_session("s").unwrap(), 2);
        assert_eq!(segments.list("s").unwrap(), []);
        assert_eq!(segments.list("s2").unwrap().len(), 1);
    }
}

#[test]
fn expiry_follows_puts_touches_retention_and_pins() {
    let (_disk, clock, store) = fresh();
    let segments = store.segments();
    let put = segments.put(segment("a", "s", 0, TTL)).unwrap();
    assert_eq!(put.deadline_ms, Some(START + MINUTE));
    segments.put(segment("b", "s", 1, TTL)).unwrap();
    segments.put(segment("keep", "s", 2, Retention::Keep)).unwrap();
    let call = Some("call_1".to_owned());
    segments.put(Segment { pinned_by: call, ..segment("pin", "s", 3, TTL) }).unwrap();
    clock.advance(MINUTE - 1);
    assert_eq!(sweep(&store, &clock), (vec![], ClockState::Steady));
    assert_eq!(segments.touch("b").unwrap().deadline_ms, Some(START + 2 * MINUTE - 1));
    clock.advance(1);
    let report = segments.sweep(clock.now_ms()).unwrap();
    assert_eq!(report.expired, [put]);
    assert_eq!((report.pinned, report.stale, report.more), (1, 0, false));
    assert_eq!(segments.get("a").unwrap(), None);
    assert_eq!(segments.touch("a"), Err(SegmentError::Unknown("a".into())));
    clock.advance(MINUTE);
    assert_eq!(sweep(&store, &clock).0, ["b"]);
    segments.set_pin("pin", None).unwrap();
    assert_eq!(sweep(&store, &clock).0, ["pin"]);
    segments.set_retention("keep", Retention::Expire { ttl_ms: 5 }).unwrap();
    clock.advance(4);
    segments.set_retention("keep", Retention::Keep).unwrap();
    clock.advance(MINUTE);
    assert_eq!(sweep(&store, &clock).0, [] as [&str; 0]);
    assert_eq!(segments.touch("keep").unwrap().deadline_ms, None);
}

#[test]
fn i8_a_sweep_is_bounded_and_earliest_first() {
    let (_disk, clock, store) = fresh();
    let many = (0..600u64)
        .map(|n| Segment {
            deadline_ms: Some(START + 1000 - n),
            ..segment(&format!("seg_{n:03}"), "s", n, Retention::Expire { ttl_ms: 1 })
        })
        .collect::<Vec<_>>();
    for some in many.chunks(300) {
        store.segments().put_all(some.to_vec()).unwrap();
    }
    clock.advance(2000);
    let mut seen = Vec::new();
    for want in [MAX_SWEEP, MAX_SWEEP, 600 - 2 * MAX_SWEEP] {
        let report = store.segments().sweep(clock.now_ms()).unwrap();
        assert_eq!((report.expired.len(), report.more), (want, want == MAX_SWEEP));
        seen.extend(report.expired.into_iter().map(|s| s.start));
    }
    assert_eq!(seen, (0..600).rev().collect::<Vec<_>>());
}

#[test]
fn a_clock_that_steps_back_expires_nothing_until_it_has_caught_up() {
    let (disk, clock, store) = fresh();
    store.segments().put(segment("a", "s", 0, TTL)).unwrap();
    clock.advance(10);
    sweep(&store, &clock);
    clock.set_wall(START - 5 * MINUTE);
    store.segments().put(segment("b", "s", 0, Retention::Expire { ttl_ms: 1 })).unwrap();
    clock.advance(100);
    let (expired, state) = sweep(&store, &clock);
    assert_eq!(expired, [] as [&str; 0]);
    assert_eq!(state, ClockState::Behind { by_ms: 5 * MINUTE + 10 - 100 });
    // The same after a restart: the last believed time is stored.
    drop(store);
    let store = open(&disk, &clock);
    assert!(matches!(sweep(&store, &clock), (ref e, ClockState::Behind { .. }) if e.is_empty()));
    clock.advance(5 * MINUTE);
    assert_eq!(sweep(&store, &clock), (vec!["b".to_owned()], ClockState::Steady));
    clock.advance(MINUTE);
    assert_eq!(sweep(&store, &clock).0, ["a"]);
    // Or someone says that the earlier time is right.
    clock.set_wall(START);
    store.segments().put(segment("c", "s", 0, Retention::Expire { ttl_ms: 1 })).unwrap();
    clock.advance(1);
    assert!(matches!(sweep(&store, &clock).1, ClockState::Behind { .. }));
    store.segments().confirm_clock().unwrap();
    assert_eq!(sweep(&store, &clock), (vec!["c".to_owned()], ClockState::Steady));
    drop(store);
    assert_eq!(sweep(&open(&disk, &clock), &clock).1, ClockState::Steady);
}

#[test]
fn a_clock_that_steps_ahead_pauses_expiry_until_confirmed() {
    let (disk, clock, store) = fresh();
    store.segments().put(segment("a", "s", 0, TTL)).unwrap();
    sweep(&store, &clock);
    // Ten minutes and a little more than passed.
    clock.set_wall(START + 10 * MINUTE);
    assert_eq!(sweep(&store, &clock).1, ClockState::Steady, "a step of ten minutes is believed");
    store.segments().put(segment("b", "s", 0, TTL)).unwrap();
    let wall = clock.now_ms();
    clock.set_wall(wall + 10 * MINUTE + 1);
    let ahead = ClockState::Ahead { by_ms: 10 * MINUTE + 1 };
    assert_eq!(sweep(&store, &clock), (vec![], ahead));
    clock.advance(MINUTE);
    assert_eq!(sweep(&store, &clock), (vec![], ahead), "it does not wear off");
    // Nor does a restart make it believed.
    drop(store);
    let store = open(&disk, &clock);
    assert!(matches!(sweep(&store, &clock), (ref e, ClockState::Ahead { .. }) if e.is_empty()));
    store.segments().confirm_clock().unwrap();
    assert_eq!(sweep(&store, &clock), (vec!["b".to_owned()], ClockState::Steady));
    // A step that is taken back needs no one.
    store.segments().put(segment("c", "s", 0, TTL)).unwrap();
    let wall = clock.now_ms();
    clock.set_wall(wall + 60 * MINUTE);
    assert!(matches!(sweep(&store, &clock).1, ClockState::Ahead { .. }));
    clock.set_wall(wall);
    clock.advance(MINUTE);
    assert_eq!(sweep(&store, &clock), (vec!["c".to_owned()], ClockState::Steady));
}

#[test]
fn time_without_a_process_and_time_without_a_sweep_are_no_steps() {
    let (disk, clock, store) = fresh();
    store.segments().put(segment("a", "s", 0, TTL)).unwrap();
    store.segments().put(segment("b", "s", 0, Retention::Expire { ttl_ms: 1000 * MINUTE })).unwrap();
    sweep(&store, &clock);
    drop(store);
    clock.set_wall(START + 500 * MINUTE);
    let store = open(&disk, &clock);
    assert_eq!(sweep(&store, &clock), (vec!["a".to_owned()], ClockState::Steady));
    clock.advance(501 * MINUTE);
    assert_eq!(sweep(&store, &clock), (vec!["b".to_owned()], ClockState::Steady));
}

#[test]
fn bad_segments_are_refused_by_field() {
    let (_disk, _clock, store) = fresh();
    let segments = store.segments();
    let good = || segment("a", "s", 5, Retention::Keep);
    let field = |segment: Segment| match segments.put(segment) {
        Err(SegmentError::BadField { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(Segment { id: String::new(), ..good() }), "id");
    assert_eq!(field(Segment { session: "a\0b".into(), ..good() }), "session");
    assert_eq!(field(Segment { kind: "k".repeat(MAX_KIND + 1), ..good() }), "kind");
    assert_eq!(field(Segment { end: 4, ..good() }), "start");
    assert_eq!(field(Segment { pinned_by: Some(String::new()), ..good() }), "pinned_by");
    segments.put(good()).unwrap();
    let other = Err(SegmentError::OtherSession { id: "a".into(), session: "s".into() });
    assert_eq!(segments.put(segment("a", "t", 0, Retention::Keep)), other);
    let mixed = vec![segment("b", "s", 0, Retention::Keep), segment("c", "t", 0, Retention::Keep)];
    assert!(matches!(segments.put_all(mixed), Err(SegmentError::BadField { field: "session", .. })));
    assert_eq!(segments.get("b").unwrap(), None, "all or none");
    assert!(Segment::new_id().starts_with("seg_"));
}

//! Cells in packs: identity, quota, leases, damage, a slow or faulty tier, rebuilding from headers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use store::limits::MAX_CELL_PAYLOAD;
use store::{
    CancelFlag, CellStore, Disk, FailAction, Failpoints, ManualClock, MetaKind, Miss, RealDisk, Refusal,
    SimDisk, Store, StoreOptions, Throttle, TierFault,
};
use support::{CONTRACT, cell, cell_bytes, cell_id, on_disk, options, put_cell};

const DIR: &str = "/data";

fn sim() -> (SimDisk, Store) {
    let disk = SimDisk::new();
    let store = Store::open(Path::new(DIR), on_disk(Arc::new(disk.clone()))).unwrap();
    (disk, store)
}

fn packs(disk: &dyn Disk, dir: &Path) -> Vec<PathBuf> {
    let dir = dir.join("packs");
    disk.list(&dir).unwrap().into_iter().map(|e| dir.join(e.name)).collect()
}

#[test]
fn cells_come_back_by_identity_and_are_written_once() {
    for kind in [MetaKind::Memory, MetaKind::Sled] {
        let dir = tempfile::tempdir().unwrap();
        let open = || Store::open(dir.path(), options(kind)).unwrap();
        let store = open();
        for n in 0..40 {
            assert!(put_cell(&store, n));
        }
        let before = store.cells().usage();
        let again = store.cells().put(&[cell(3, &cell_bytes(3)), cell(3, &cell_bytes(3))]).unwrap();
        assert_eq!((again.present.len(), again.stored.len(), again.bytes), (2, 0, 0));
        assert_eq!(store.cells().usage().disk_bytes, before.disk_bytes);
        assert!(before.packs > 2 && before.cells == 40);
        let places = store.cells().locate(&[cell_id(5), cell_id(99)]);
        let place = places[0].unwrap();
        assert_eq!(
            (place.layer, place.tokens, place.codec, place.len),
            (5, 64, 1, cell_bytes(5).len() as u64)
        );
        assert_eq!((place.contract, places[1]), (CONTRACT, None));
        store.close().unwrap();
        let store = open();
        assert_eq!((store.recovery().cells, store.recovery().cells_dropped), (40, 0));
        let recovered = if kind == MetaKind::Memory { 40 } else { 0 };
        assert_eq!(store.recovery().cells_recovered, recovered);
        assert_eq!(store.cells().usage().disk_bytes, before.disk_bytes);
        for n in 0..40 {
            assert!(store.cells().contains(&cell_id(n)));
            assert_eq!(store.cells().get(&cell_id(n), &CONTRACT).unwrap(), cell_bytes(n));
        }
        assert_eq!(store.cells().get(&cell_id(99), &CONTRACT), Err(Miss::Absent));
        assert_eq!((store.cells().usage().hits, store.cells().usage().misses), (40, 1));
    }
}

#[test]
fn i3_another_contract_is_refused_and_the_cell_stays() {
    let (_disk, store) = sim();
    put_cell(&store, 1);
    let refused = store.cells().get(&cell_id(1), &[8; 32]);
    assert_eq!(refused, Err(Miss::ContractMismatch { stored: CONTRACT, expected: [8; 32] }));
    assert_eq!(store.cells().get(&cell_id(1), &CONTRACT).unwrap(), cell_bytes(1));
}

/// A store whose quota holds `blocks` blocks besides one pack header and the room kept for another.
fn with_quota(blocks: u64, clock: Arc<ManualClock>) -> Store {
    let quota = StoreOptions {
        cell_quota_bytes: (blocks + 2) * 4096,
        pack_bytes: 1 << 20,
        clock,
        ..on_disk(Arc::new(SimDisk::new()))
    };
    Store::open(Path::new(DIR), quota).unwrap()
}

#[test]
fn i8_the_quota_holds_and_the_least_recently_used_go_first() {
    let store = with_quota(4, Arc::new(ManualClock::new(0)));
    let put = |n: u64| store.cells().put(&[cell(n, b"one block")]).unwrap();
    for n in 0..4 {
        assert_eq!(put(n).evicted, [] as [[u8; 32]; 0]);
    }
    store.cells().get(&cell_id(0), &CONTRACT).unwrap();
    assert_eq!(put(4).evicted, [cell_id(1)]);
    // Being asked for again counts as use, being looked up does not.
    put(2);
    store.cells().locate(&[cell_id(3)]);
    assert_eq!(put(5).evicted, [cell_id(3)]);
    let large = store.cells().put(&[cell(6, &[1; 7000])]).unwrap();
    assert_eq!(large.evicted, [cell_id(0), cell_id(4)]);
    let usage = store.cells().usage();
    assert!(usage.disk_bytes <= usage.quota_bytes, "{usage:?}");
    assert_eq!((usage.cells, usage.evicted), (3, 5 - 1));
    let too_large = store.cells().put(&[cell(7, &[1; 5 * 4096])]).unwrap();
    assert_eq!(too_large.refused, [(cell_id(7), Refusal::Quota { quota: 6 * 4096 })]);
    let over = store.cells().put(&[cell(8, &vec![0; MAX_CELL_PAYLOAD + 1])]).unwrap();
    assert!(matches!(over.refused[..], [(_, Refusal::TooLarge { .. })]));
}

#[test]
fn i9_leased_cells_stay_until_the_lease_goes_or_expires() {
    let clock = Arc::new(ManualClock::new(0));
    let store = with_quota(3, Arc::clone(&clock));
    let put = |n: u64| store.cells().put(&[cell(n, b"one block")]).unwrap();
    for n in 0..3 {
        put(n);
    }
    let lease = store.leases().acquire(&[cell_id(0), cell_id(1)], Duration::from_secs(60)).unwrap();
    assert_eq!(put(3).evicted, [cell_id(2)]);
    let all = store.leases().acquire(&[cell_id(3)], Duration::from_secs(5)).unwrap();
    let refused = put(4);
    assert_eq!(refused.refused, [(cell_id(4), Refusal::Quota { quota: 5 * 4096 })]);
    assert_eq!(refused.evicted, [] as [[u8; 32]; 0]);
    let removed = store.cells().remove(&[cell_id(0), cell_id(9)]).unwrap();
    assert_eq!((removed.removed.len(), removed.leased), (0, vec![cell_id(0)]));
    // Pressure wins once a lease has expired.
    clock.advance(5000);
    assert_eq!(put(4).evicted, [cell_id(3)]);
    drop(lease);
    assert_eq!(put(5).evicted, [cell_id(0)]);
    drop(all);
    assert_eq!(store.leases().count(), 0);
    assert_eq!(store.cells().remove(&[cell_id(1), cell_id(1)]).unwrap().removed, [cell_id(1)]);
    assert_eq!(store.cells().get(&cell_id(1), &CONTRACT), Err(Miss::Absent));
}

#[test]
fn removed_cells_give_their_space_back_and_stay_away() {
    let dir = tempfile::tempdir().unwrap();
    let open = |kind| Store::open(dir.path(), options(kind)).unwrap();
    let store = open(MetaKind::Sled);
    for n in 0..30 {
        put_cell(&store, n);
    }
    let ids: Vec<_> = (0..29).map(cell_id).collect();
    assert_eq!(store.cells().remove(&ids).unwrap().removed.len(), 29);
    let usage = store.cells().usage();
    assert_eq!(usage.cells, 1);
    // The pack of the cell that is left, and what it takes.
    let left = (256 + cell_bytes(29).len() as u64).next_multiple_of(4096);
    assert!(usage.packs <= 2 && usage.disk_bytes <= left + 2 * 4096, "{usage:?}");
    assert_eq!(packs(&RealDisk, dir.path()).len() as u64, usage.packs);
    store.close().unwrap();
    let store = open(MetaKind::Memory);
    assert_eq!(store.recovery().cells, 1, "removed cells do not come back from the headers");
    assert_eq!(store.cells().get(&cell_id(29), &CONTRACT).unwrap(), cell_bytes(29));
}

#[test]
fn every_flipped_bit_of_a_pack_is_a_miss_or_does_no_harm() {
    let (disk, store) = sim();
    let payload = b"some bytes that must come back whole".to_vec();
    store.cells().put(&[cell(1, &payload), cell(2, &payload)]).unwrap();
    store.close().unwrap();
    let path = packs(&disk, Path::new(DIR)).pop().unwrap();
    let used = (256 + payload.len() as u64) * 8;
    let (mut lost, mut kept) = (0, 0);
    for bit in (0..used).step_by(7) {
        let broken = disk.crash(0);
        broken.flip_bit(&path, 4096 * 8 + bit).unwrap();
        let store = Store::open(Path::new(DIR), on_disk(Arc::new(broken))).unwrap();
        match store.cells().get(&cell_id(1), &CONTRACT) {
            Ok(bytes) => {
                assert_eq!(bytes, payload, "bit {bit}: wrong data");
                kept += 1;
            }
            Err(Miss::Absent | Miss::Corrupt { .. }) => lost += 1,
            Err(other) => panic!("bit {bit}: {other}"),
        }
        assert_eq!(store.cells().get(&cell_id(2), &CONTRACT).unwrap(), payload);
    }
    assert_eq!(kept, 0, "{lost} lost");
}

#[test]
fn a_damaged_cell_is_dropped_and_a_pack_with_three_is_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    let store = open();
    let payload = |n: u64| vec![n as u8; 5000];
    for n in 0..5 {
        store.cells().put(&[cell(n, &payload(n))]).unwrap();
    }
    let path = packs(&RealDisk, dir.path()).pop().unwrap();
    let file = RealDisk.open(&path).unwrap();
    for n in 0..2 {
        let place = store.cells().locate(&[cell_id(n)])[0].unwrap();
        file.write_at(place.offset + 300, &[0xff]).unwrap();
        assert!(matches!(store.cells().get(&cell_id(n), &CONTRACT), Err(Miss::Corrupt { .. })));
        assert_eq!(store.cells().get(&cell_id(n), &CONTRACT), Err(Miss::Absent), "dropped");
        assert!(!store.cells().contains(&cell_id(n)));
    }
    // A dropped cell can be saved again.
    assert_eq!(store.cells().put(&[cell(0, &payload(0))]).unwrap().stored, [cell_id(0)]);
    assert_eq!(store.cells().get(&cell_id(0), &CONTRACT).unwrap(), payload(0));
    let place = store.cells().locate(&[cell_id(2)])[0].unwrap();
    file.write_at(place.offset + 300, &[0xff]).unwrap();
    assert!(matches!(store.cells().get(&cell_id(2), &CONTRACT), Err(Miss::Corrupt { .. })));
    assert_eq!(store.cells().get(&cell_id(4), &CONTRACT), Err(Miss::Absent), "its pack is gone");
    let usage = store.cells().usage();
    assert_eq!((usage.damaged, usage.quarantined_packs, usage.cells, usage.packs), (3, 1, 0, 0));
    assert_eq!(RealDisk.list(&dir.path().join("quarantine")).unwrap().len(), 1);
    assert!(put_cell(&store, 4));
    store.close().unwrap();
    let store = open();
    assert_eq!(store.recovery().cells, 1);
    assert_eq!(store.cells().get(&cell_id(4), &CONTRACT).unwrap(), cell_bytes(4));
}

#[test]
fn cut_and_missing_packs_are_misses() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    let store = open();
    for n in 0..2 {
        store.cells().put(&[cell(n, &[1; 10_000])]).unwrap();
    }
    let path = packs(&RealDisk, dir.path()).pop().unwrap();
    let file = RealDisk.open(&path).unwrap();
    let place = store.cells().locate(&[cell_id(1)])[0].unwrap();
    file.truncate(place.offset + 1000).unwrap();
    assert_eq!(store.cells().get(&cell_id(1), &CONTRACT), Err(Miss::Truncated { have: 1000, want: 10_256 }));
    store.close().unwrap();
    std::fs::remove_file(&path).unwrap();
    let store = open();
    assert_eq!((store.recovery().cells_dropped, store.recovery().cells), (1, 0));
    put_cell(&store, 7);
    let path = packs(&RealDisk, dir.path()).pop().unwrap();
    store.close().unwrap();
    let store = open();
    std::fs::remove_file(&path).unwrap();
    let gone = store.cells().get(&cell_id(7), &CONTRACT);
    // The open handle may still read the deleted file; a fresh one cannot.
    assert!(gone == Ok(cell_bytes(7)) || matches!(gone, Err(Miss::PackMissing { .. })), "{gone:?}");
}

#[test]
fn an_open_checks_the_index_against_packs() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    let store = open();
    for n in 0..3 {
        store.cells().put(&[cell(n, &[n as u8; 10_000])]).unwrap();
    }
    let cut = store.cells().locate(&[cell_id(1)])[0].unwrap();
    store.close().unwrap();
    let path = packs(&RealDisk, dir.path()).pop().unwrap();
    // While nobody watched, the last cell was cut off, and the one before it in the middle.
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(cut.offset + 5000).unwrap();
    let store = open();
    assert_eq!((store.recovery().cells_dropped, store.recovery().cells), (2, 1));
    assert_eq!([0, 1, 2].map(|n| store.cells().contains(&cell_id(n))), [true, false, false]);
    assert_eq!(store.cells().get(&cell_id(0), &CONTRACT).unwrap(), [0; 10_000]);
    // They can be saved anew, and the index on disk has forgotten where they were.
    assert_eq!(store.cells().put(&[cell(2, &[2; 10_000])]).unwrap().stored, [cell_id(2)]);
    store.close().unwrap();
    let store = open();
    assert_eq!((store.recovery().cells_dropped, store.recovery().cells), (0, 2));
    assert_eq!(store.cells().get(&cell_id(2), &CONTRACT).unwrap(), [2; 10_000]);
}

#[test]
fn the_index_is_rebuilt_from_headers() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    for n in 0..50 {
        put_cell(&store, n);
    }
    store.cells().remove(&[cell_id(10), cell_id(11)]).unwrap();
    let before: Vec<_> = store.cells().locate(&(0..50).map(cell_id).collect::<Vec<_>>());
    let report = store.cells().rebuild_index().unwrap();
    assert_eq!((report.cells, report.damaged_blocks, report.damaged_cells), (48, 0, 0));
    assert_eq!(store.cells().locate(&(0..50).map(cell_id).collect::<Vec<_>>()), before);
    assert_eq!(store.cells().usage().cells, 48);
    put_cell(&store, 60);
    store.close().unwrap();
    // And at open, when the index is gone altogether.
    std::fs::remove_dir_all(dir.path().join("meta")).unwrap();
    let store = Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    assert!(store.recovery().rebuilt.is_some());
    assert_eq!(store.recovery().cells_recovered, 49);
    for n in (0..10).chain(12..50).chain([60]) {
        assert_eq!(store.cells().get(&cell_id(n), &CONTRACT).unwrap(), cell_bytes(n));
    }
}

#[test]
fn i6_cells_behind_a_torn_one_survive_a_rebuild() {
    let dir = tempfile::tempdir().unwrap();
    let roomy = || StoreOptions { pack_bytes: 1 << 20, ..options(MetaKind::Sled) };
    let store = Store::open(dir.path(), roomy()).unwrap();
    let torn = vec![7; 9000];
    store.cells().put(&[cell(1, &torn)]).unwrap();
    store.close().unwrap();
    let pack = packs(&RealDisk, dir.path()).remove(0);
    // What a process leaves that was killed inside the write: a header that promises more than is there.
    std::fs::OpenOptions::new().write(true).open(&pack).unwrap().set_len(4096 + 5000).unwrap();
    for round in 0..2 {
        std::fs::remove_dir_all(dir.path().join("meta")).unwrap();
        let store = Store::open(dir.path(), roomy()).unwrap();
        if round == 0 {
            assert_eq!(store.cells().get(&cell_id(1), &CONTRACT), Err(Miss::Absent));
            // Stands where the torn cell's payload was to be.
            assert!(put_cell(&store, 2));
        }
        assert_eq!(store.cells().get(&cell_id(2), &CONTRACT).unwrap(), cell_bytes(2));
        store.close().unwrap();
    }
}

#[test]
fn i6_a_power_cut_during_a_put_leaves_whole_cells_or_none() {
    for seed in 0..40 {
        let (disk, store) = sim();
        let acknowledged = seed % 7;
        for n in 0..acknowledged {
            assert!(put_cell(&store, n));
        }
        // The next put is written but not synced when the power goes.
        let failpoints = Failpoints::default();
        failpoints.arm("packs.before_fsync", FailAction::Error, 0).unwrap();
        drop(store);
        let with = StoreOptions { failpoints: Some(failpoints), ..on_disk(Arc::new(disk.clone())) };
        let store = Store::open(Path::new(DIR), with).unwrap();
        let report = store.cells().put(&[cell(90, &cell_bytes(90)), cell(91, &cell_bytes(91))]).unwrap();
        assert_eq!(report.refused.len(), 2);
        let store = Store::open(Path::new(DIR), on_disk(Arc::new(disk.crash(seed)))).unwrap();
        for n in 0..acknowledged {
            assert_eq!(store.cells().get(&cell_id(n), &CONTRACT).unwrap(), cell_bytes(n), "seed {seed}");
        }
        for n in [90, 91] {
            match store.cells().get(&cell_id(n), &CONTRACT) {
                Ok(bytes) => assert_eq!(bytes, cell_bytes(n)),
                Err(miss) => assert_eq!(miss, Miss::Absent, "seed {seed}"),
            }
        }
        assert!(put_cell(&store, 92));
        assert_eq!(store.cells().get(&cell_id(92), &CONTRACT).unwrap(), cell_bytes(92));
    }
}

#[test]
fn a_full_disk_is_a_refusal_with_a_reason_and_nothing_else_breaks() {
    let (disk, store) = sim();
    put_cell(&store, 1);
    disk.set_space_left(Some(10_000));
    let large = store.cells().put(&[cell(2, &[1; 20_000]), cell(3, b"small")]).unwrap();
    assert_eq!((large.stored.as_slice(), large.refused.len()), (&[cell_id(3)][..], 1));
    assert!(matches!(large.refused[0], (id, Refusal::DiskFull(_)) if id == cell_id(2)));
    assert_eq!(store.poisoned(), None);
    assert_eq!(store.cells().get(&cell_id(1), &CONTRACT).unwrap(), cell_bytes(1));
    assert_eq!(store.cells().get(&cell_id(3), &CONTRACT).unwrap(), b"small");
    disk.set_space_left(None);
    assert_eq!(store.cells().put(&[cell(2, &[1; 20_000])]).unwrap().stored, [cell_id(2)]);
    assert_eq!(store.cells().get(&cell_id(2), &CONTRACT).unwrap(), [1; 20_000]);
}

#[test]
fn i4_a_faulty_tier_is_a_miss_and_a_stuck_read_can_be_left() {
    let (_disk, store) = sim();
    put_cell(&store, 1);
    let cells = store.cells();
    let get = |n: u64| cells.get(&cell_id(n), &CONTRACT);
    cells.set_fault(TierFault::DropReads);
    assert!(matches!(get(1), Err(Miss::Injected(_))));
    cells.set_fault(TierFault::DelayReads(Duration::MAX));
    let cancel = CancelFlag::new();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| cells.get_cancellable(&cell_id(1), &CONTRACT, &cancel));
        cancel.cancel();
        assert_eq!(waiting.join().unwrap(), Err(Miss::Cancelled));
    });
    cells.set_fault(TierFault::None);
    cells.set_throttle(Throttle { bytes_per_s: Some(1), latency: Duration::ZERO });
    assert_eq!(cells.get_cancellable(&cell_id(1), &CONTRACT, &cancel), Err(Miss::Cancelled));
    cells.set_throttle(Throttle { bytes_per_s: Some(1 << 30), latency: Duration::from_micros(10) });
    assert_eq!(get(1).unwrap(), cell_bytes(1), "none of these dropped the cell");
    // What reads as damage is treated as damage: the cell is dropped.
    put_cell(&store, 2);
    put_cell(&store, 3);
    cells.set_fault(TierFault::Stale);
    assert!(matches!(get(3), Err(Miss::ContractMismatch { .. })));
    cells.set_fault(TierFault::FlipBit);
    assert!(matches!(get(1), Err(Miss::Corrupt { .. })));
    cells.set_fault(TierFault::Tear);
    assert!(matches!(get(2), Err(Miss::Truncated { .. })));
    cells.set_fault(TierFault::None);
    assert_eq!([get(1), get(2), get(3)], [const { Err(Miss::Absent) }; 3]);
}

#[test]
fn many_threads_read_write_and_evict_without_wrong_data() {
    let small = StoreOptions { cell_quota_bytes: 40 * 4096, ..on_disk(Arc::new(SimDisk::new())) };
    let store = Store::open(Path::new(DIR), small).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..150u64 {
                    let n = (thread * 31 + round * 7) % 60;
                    let tier: &dyn CellStore = store.cells();
                    if round % 3 == 0 {
                        assert!(tier.put(&[cell(n, &cell_bytes(n))]).unwrap().refused.is_empty());
                    }
                    match tier.get(&cell_id(n), &CONTRACT) {
                        Ok(bytes) => assert_eq!(bytes, cell_bytes(n)),
                        Err(miss) => assert_eq!(miss, Miss::Absent),
                    }
                    if round % 11 == 0 {
                        tier.remove(&[cell_id(n)]).unwrap();
                    }
                    let usage = tier.usage();
                    assert!(usage.disk_bytes <= usage.quota_bytes);
                }
            });
        }
    });
    assert_eq!(store.cells().usage().damaged, 0);
    assert!(store.cells().usage().evicted > 0);
}

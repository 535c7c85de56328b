//! Mostly dead packs are written anew: nothing is lost on the way, whatever fails, and the room comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use store::{
    Disk, DiskEntry, DiskFault, DiskFile, DiskLock, DiskOp, FailAction, Failpoints, FaultEffect, FaultyDisk,
    MetaKind, Miss, SimDisk, Store, StoreOptions,
};
use support::{CONTRACT, cell, cell_bytes, cell_id, on_disk, options, put_cell};

const DIR: &str = "/data";
/// Cells that are put, and those of them that stay.
const CELLS: u64 = 40;

fn stays(n: u64) -> bool {
    n % 6 == 1
}

/// Puts cells and removes most of them again.
fn sparse(store: &Store) {
    for n in 0..CELLS {
        assert!(put_cell(store, n));
    }
    let gone: Vec<_> = (0..CELLS).filter(|n| !stays(*n)).map(cell_id).collect();
    assert_eq!(store.cells().remove(&gone).unwrap().removed.len(), gone.len());
}

fn hold(store: &Store, context: &str) {
    for n in 0..CELLS {
        let expected = if stays(n) { Ok(cell_bytes(n)) } else { Err(Miss::Absent) };
        assert!(store.cells().get(&cell_id(n), &CONTRACT) == expected, "{context}: cell {n}");
    }
}

/// A file system without holes.
struct NoHoles(Arc<dyn Disk>);

struct NoHolesFile(Arc<dyn DiskFile>);

impl Disk for NoHoles {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.0.create_dir(path)
    }
    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(NoHolesFile(self.0.create(path)?)))
    }
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(NoHolesFile(self.0.open(path)?)))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.remove(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.0.remove_dir_all(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<DiskEntry>> {
        self.0.list(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.0.sync_dir(path)
    }
    fn exists(&self, path: &Path) -> bool {
        self.0.exists(path)
    }
    fn lock(&self, path: &Path) -> io::Result<Box<dyn DiskLock>> {
        self.0.lock(path)
    }
}

impl DiskFile for NoHolesFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, bytes)
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read_at(offset, buf)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn allocated(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn truncate(&self, len: u64) -> io::Result<()> {
        self.0.truncate(len)
    }
    fn punch(&self, _: u64, _: u64) -> io::Result<bool> {
        Ok(false)
    }
}

/// Bytes that a cell takes in a pack.
fn record(n: u64) -> u64 {
    (256 + cell_bytes(n).len() as u64).next_multiple_of(4096)
}

#[test]
fn mostly_dead_packs_go_and_their_cells_stay() {
    for holes in [true, false] {
        let sim: Arc<dyn Disk> = Arc::new(SimDisk::new());
        let disk: Arc<dyn Disk> = if holes { sim } else { Arc::new(NoHoles(sim)) };
        let store = Store::open(Path::new(DIR), on_disk(Arc::clone(&disk))).unwrap();
        sparse(&store);
        let before = store.cells().usage();
        let mut compacted = 0;
        while store.cells().compact().unwrap() {
            compacted += 1;
            hold(&store, "on the way");
        }
        let after = store.cells().usage();
        assert!(compacted >= before.packs - 1 && after.packs <= 2, "{before:?} {after:?}");
        assert_eq!((after.cells, after.payload_bytes), (before.cells, before.payload_bytes));
        let live: u64 = (0..CELLS).filter(|n| stays(*n)).map(record).sum();
        // Beside the live cells: headers of packs, and without holes what died in the pack that is written.
        let most = live + after.packs * 4096 + if holes { 0 } else { 64 << 10 };
        assert!(after.disk_bytes <= most && after.disk_bytes <= before.disk_bytes, "{after:?} of {most}");
        assert!(holes || after.disk_bytes < before.disk_bytes / 2, "{before:?} {after:?}");
        assert_eq!(disk.list(&Path::new(DIR).join("packs")).unwrap().len() as u64, after.packs);
        assert!(!store.cells().compact().unwrap(), "nothing is left to compact");
        // From the headers alone, each cell is found once.
        let report = store.cells().rebuild_index().unwrap();
        assert_eq!((report.cells, report.damaged_cells), (after.cells, 0));
        hold(&store, "rebuilt");
        drop(store);
        let store = Store::open(Path::new(DIR), on_disk(disk)).unwrap();
        hold(&store, "reopened");
        assert_eq!(store.cells().usage().disk_bytes, after.disk_bytes);
    }
}

#[test]
fn the_store_compacts_packs_with_its_journal_and_an_index_on_disk_follows() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), options(MetaKind::Sled)).unwrap();
    let store = open();
    sparse(&store);
    let packs = store.cells().usage().packs;
    store.checkpoint().unwrap();
    while store.compact().unwrap() {}
    assert!(store.cells().usage().packs < packs);
    let places = store.cells().locate(&(0..CELLS).map(cell_id).collect::<Vec<_>>());
    store.close().unwrap();
    let store = open();
    assert_eq!((store.recovery().cells_recovered, store.recovery().cells_dropped), (0, 0));
    assert_eq!(store.cells().locate(&(0..CELLS).map(cell_id).collect::<Vec<_>>()), places);
    hold(&store, "reopened");
}

#[test]
fn the_order_of_use_survives_a_move_and_leases_hold() {
    let store = Store::open(Path::new(DIR), on_disk(Arc::new(SimDisk::new()))).unwrap();
    sparse(&store);
    // The first one is used last of all.
    store.cells().get(&cell_id(1), &CONTRACT).unwrap();
    let lease = store.leases().acquire(&[cell_id(7)], Duration::from_secs(60)).unwrap();
    while store.cells().compact().unwrap() {}
    let mut evicted = Vec::new();
    for n in 1000.. {
        let report = store.cells().put(&[cell(n, &[9; 60_000])]).unwrap();
        evicted.extend(report.evicted);
        if evicted.contains(&cell_id(1)) {
            break;
        }
    }
    let old: Vec<_> = evicted.into_iter().take_while(|id| *id != cell_id(1)).collect();
    let expected: Vec<_> = (2..CELLS).filter(|n| stays(*n) && *n != 7).map(cell_id).collect();
    assert_eq!(old, expected, "least recently used first, the leased one not at all");
    assert_eq!(store.cells().get(&cell_id(7), &CONTRACT).unwrap(), cell_bytes(7));
    drop(lease);
}

#[test]
fn i6_a_power_cut_at_any_point_of_a_compaction_loses_no_cell_and_brings_none_back() {
    for point in [
        "packs.before_compact",
        "packs.before_write",
        "packs.before_fsync",
        "packs.before_index",
        "packs.after_index",
        "packs.before_wipe",
        "none",
    ] {
        for seed in 0..12 {
            let disk = SimDisk::new();
            let failpoints = Failpoints::default();
            let with =
                StoreOptions { failpoints: Some(failpoints.clone()), ..on_disk(Arc::new(disk.clone())) };
            let store = Store::open(Path::new(DIR), with).unwrap();
            sparse(&store);
            if point != "none" {
                failpoints.arm(point, FailAction::Error, seed % 2).unwrap();
            }
            let mut failed = false;
            for _ in 0..8 {
                failed |= store.cells().compact().is_err();
            }
            assert_eq!(failed, point != "none", "{point}");
            hold(&store, point);
            let disk = disk.crash(seed);
            let store = Store::open(Path::new(DIR), on_disk(Arc::new(disk.clone()))).unwrap();
            hold(&store, &format!("{point} and a power cut, seed {seed}"));
            // What was left is finished by the next one.
            while store.cells().compact().unwrap() {}
            hold(&store, point);
            assert!(store.cells().usage().packs <= 3, "{point}: {:?}", store.cells().usage());
        }
    }
}

#[test]
fn a_compaction_that_finds_no_room_leaves_everything_as_it_was() {
    let faulty = FaultyDisk::new(Arc::new(SimDisk::new()));
    let store = Store::open(Path::new(DIR), on_disk(Arc::new(faulty.clone()))).unwrap();
    sparse(&store);
    let places = |store: &Store| store.cells().locate(&(0..CELLS).map(cell_id).collect::<Vec<_>>());
    let before = places(&store);
    let full = FaultEffect::Errno(28);
    let nth = faulty.count(DiskOp::Write) + 1;
    faulty.plan(DiskFault { on: DiskOp::Write, nth, effect: full, repeat: true });
    assert!(store.cells().compact().is_err());
    assert_eq!(places(&store), before);
    faulty.clear();
    hold(&store, "after a full disk");
    while store.cells().compact().unwrap() {}
    hold(&store, "compacted");
    // And where the quota has no room for the copies: two packs of two cells, one of which is dead.
    let small = StoreOptions {
        cell_quota_bytes: 2 * (4096 + 2 * 8192) + 4096,
        pack_bytes: 24 << 10,
        ..on_disk(Arc::new(NoHoles(Arc::new(SimDisk::new()))))
    };
    let store = Store::open(Path::new(DIR), small).unwrap();
    for n in 0..4 {
        assert_eq!(store.cells().put(&[cell(n, &[1; 5000])]).unwrap().stored, [cell_id(n)]);
    }
    store.cells().remove(&[cell_id(0)]).unwrap();
    let before = (places(&store), store.cells().usage());
    assert!(!store.cells().compact().unwrap());
    assert_eq!((places(&store), store.cells().usage()), before);
}

#[test]
fn a_damaged_cell_is_dropped_and_the_others_move() {
    let disk = SimDisk::new();
    let store = Store::open(Path::new(DIR), on_disk(Arc::new(disk.clone()))).unwrap();
    sparse(&store);
    let place = store.cells().locate(&[cell_id(7)])[0].unwrap();
    let path = Path::new(DIR).join(format!("packs/pack-{:010}.pack", place.pack));
    disk.flip_bit(&path, (place.offset + 300) * 8).unwrap();
    while store.cells().compact().unwrap() {}
    assert_eq!(store.cells().get(&cell_id(7), &CONTRACT), Err(Miss::Absent));
    assert_eq!(store.cells().usage().damaged, 1);
    for n in (0..CELLS).filter(|n| stays(*n) && *n != 7) {
        assert_eq!(store.cells().get(&cell_id(n), &CONTRACT).unwrap(), cell_bytes(n));
    }
}

#[test]
fn readers_and_writers_go_on_while_packs_are_compacted() {
    let store = Store::open(Path::new(DIR), on_disk(Arc::new(SimDisk::new()))).unwrap();
    for n in 0..8 {
        assert!(put_cell(&store, n));
    }
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..120u64 {
                    // Eight cells stay for good: they are always there.
                    let n = (thread + round) % 8;
                    assert_eq!(store.cells().get(&cell_id(n), &CONTRACT).unwrap(), cell_bytes(n));
                    let own = 1000 * (thread + 1) + round;
                    assert!(put_cell(store, own));
                    store.cells().remove(&[cell_id(own)]).unwrap();
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..200 {
                store.cells().compact().unwrap();
            }
        });
    });
    let usage = store.cells().usage();
    assert_eq!((usage.cells, usage.damaged), (8, 0));
}

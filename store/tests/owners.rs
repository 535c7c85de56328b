//! Owners of cells: a quota and a share of the disk tier for each.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use store::{CellWrite, MetaKind, OwnerId, Refusal, SimDisk, Store, StoreOptions};
use support::{CONTRACT, cell, cell_id, on_disk, options};

/// A store whose quota holds `blocks` blocks besides one pack header and the room kept for another.
fn with_quota(blocks: u64) -> Store {
    let cell_quota_bytes = (blocks + 2) * 4096;
    let options = StoreOptions { cell_quota_bytes, pack_bytes: 1 << 20, ..on_disk(Arc::new(SimDisk::new())) };
    Store::open(Path::new("/data"), options).unwrap()
}

const A: OwnerId = [1; 16];
const B: OwnerId = [2; 16];

/// A cell of one block of an owner.
fn owned(number: u64, owner: OwnerId, owner_quota: Option<u64>) -> CellWrite<'static> {
    CellWrite { owner, owner_quota, ..cell(number, b"one block") }
}

#[test]
fn i8_an_owner_at_its_quota_drops_its_own() {
    let store = with_quota(20);
    let put = |n: u64, owner| {
        let quota = (owner == A).then_some(3 * 4096);
        store.cells().put(&[owned(n, owner, quota)]).unwrap()
    };
    for (n, owner) in [(0, B), (1, A), (2, A), (3, A), (4, B)] {
        assert!(put(n, owner).evicted.is_empty());
    }
    store.cells().get(&cell_id(1), &CONTRACT).unwrap();
    assert_eq!(put(5, A).evicted, [cell_id(2)], "the least recently used of its own");
    assert_eq!((store.cells().held_by(&A), store.cells().held_by(&B)), (3 * 4096, 2 * 4096));
    // Several at once: what is written and not yet indexed counts.
    let many: Vec<CellWrite<'_>> = (10..14).map(|n| owned(n, A, Some(3 * 4096))).collect();
    let report = store.cells().put(&many).unwrap();
    assert_eq!(report.refused, [(cell_id(13), Refusal::OwnerQuota { quota: 3 * 4096 })]);
    assert_eq!((report.stored.len(), store.cells().held_by(&A)), (3, 3 * 4096));
    let nothing = store.cells().put(&[owned(20, [3; 16], Some(0))]).unwrap();
    assert_eq!(nothing.refused, [(cell_id(20), Refusal::OwnerQuota { quota: 0 })]);
    assert_eq!(nothing.evicted, [] as [[u8; 32]; 0]);
    // Leased ones stay.
    let lease = store.leases().acquire(&[10, 11, 12].map(cell_id), Duration::from_secs(60)).unwrap();
    assert_eq!(put(14, A).refused, [(cell_id(14), Refusal::OwnerQuota { quota: 3 * 4096 })]);
    drop(lease);
    assert_eq!(put(14, A).evicted, [cell_id(10)]);
}

#[test]
fn i8_what_owners_have_above_their_share_goes_first() {
    let store = with_quota(6);
    let put = |n: u64, owner| store.cells().put(&[owned(n, owner, None)]).unwrap().evicted;
    for (n, owner) in [(0, B), (1, A), (2, A), (3, A), (4, A), (5, A)] {
        assert!(put(n, owner).is_empty(), "an unused share is anyone's");
    }
    assert_eq!(put(6, B), [cell_id(1)], "though 0 was used longest ago");
    assert_eq!(put(7, A), [cell_id(2)], "who asks for more gives its own");
    assert_eq!(
        [put(8, B), put(9, B)],
        [[cell_id(0)], [cell_id(3)]],
        "within their shares the least recently used"
    );
    assert_eq!((store.cells().held_by(&A), store.cells().held_by(&B)), (3 * 4096, 3 * 4096));
    // Leased cells stay, and the rest goes by use.
    let lease = store.leases().acquire(&[4, 5, 7].map(cell_id), Duration::from_secs(60)).unwrap();
    assert_eq!(put(10, A), [cell_id(6)]);
    drop(lease);
}

#[test]
fn owners_are_kept_over_a_restart_and_found_again_in_the_headers() {
    // The index in memory is rebuilt from the headers at each open.
    for kind in [MetaKind::Memory, MetaKind::Sled] {
        let dir = tempfile::tempdir().unwrap();
        let open = || Store::open(dir.path(), options(kind)).unwrap();
        let held = |store: &Store| [A, B, OwnerId::default()].map(|owner| store.cells().held_by(&owner));
        let store = open();
        let cells = [owned(0, A, None), owned(1, B, None), owned(2, A, None), cell(3, b"one block")];
        store.cells().put(&cells).unwrap();
        let expected = [2 * 4096, 4096, 4096];
        assert_eq!(held(&store), expected);
        store.close().unwrap();
        let store = open();
        assert_eq!(held(&store), expected, "{kind:?}");
        assert_eq!(store.cells().locate(&[cell_id(1)])[0].unwrap().owner, B);
        store.cells().remove(&[cell_id(0), cell_id(2)]).unwrap();
        assert_eq!(held(&store), [0, 4096, 4096]);
    }
}

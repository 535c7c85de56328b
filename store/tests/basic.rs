//! The main path of a store on a real disk, for both kinds of index.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::mpsc;
use std::time::Duration;

use store::{CellWrite, MetaKind, Miss, OpenError, Retention, Segment, Store, StoreOptions};

fn options(meta: MetaKind) -> StoreOptions {
    StoreOptions { meta, group_window: Duration::ZERO, ..StoreOptions::default() }
}

fn cell(n: u8, payload: &[u8]) -> CellWrite<'_> {
    CellWrite {
        id: [n; 32],
        contract: [7; 32],
        chunk: [9; 32],
        layer: 1,
        tokens: 16,
        codec: 0,
        owner: [0; 16],
        owner_quota: None,
        payload,
    }
}

fn segment(session: &str, start: u64) -> Segment {
    Segment {
        id: Segment::new_id(),
        session: session.into(),
        kind: "reasoning".into(),
        start,
        end: start + 10,
        retention: Retention::Keep,
        deadline_ms: None,
        supersedes: None,
        created_ms: 1,
        pinned_by: None,
    }
}

#[test]
fn i6_what_was_acknowledged_is_there_after_a_reopen() {
    for kind in [MetaKind::Sled, MetaKind::Memory] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), options(kind)).unwrap();
        assert!(store.recovery().created);
        let mut last = None;
        for i in 0..100u32 {
            last = Some(store.journal().append("sess_a", "token", i.to_le_bytes()).unwrap());
            store.journal().append("sess_b", "note", i.to_string().into_bytes()).unwrap();
        }
        let last = last.unwrap();
        assert_eq!(last.seq, 100);
        let (told, hears) = mpsc::channel();
        last.ticket.on_durable(Box::new(move |result| told.send(result).unwrap()));
        assert_eq!(hears.recv().unwrap(), Ok(()));
        store.meta().put(b"sess_a", b"record").unwrap();
        let kept = store.segments().put(segment("sess_a", 5)).unwrap();
        store.segments().put(segment("sess_a", 1)).unwrap();
        let payload = vec![3; 10_000];
        let report = store.cells().put(&[cell(1, &payload), cell(2, b"small"), cell(1, &payload)]).unwrap();
        assert_eq!((report.stored.len(), report.present.len(), report.refused.len()), (2, 1, 0));
        store.journal().barrier().unwrap();
        store.close().unwrap();

        let store = Store::open(dir.path(), options(kind)).unwrap();
        let report = store.recovery();
        assert!(!report.created && report.rebuilt.is_none() && !report.has_loss(), "{report:?}");
        let sessions = store.journal().sessions();
        assert_eq!(
            sessions.iter().map(|s| (s.session.as_str(), s.last_seq)).collect::<Vec<_>>(),
            [("sess_a", 100), ("sess_b", 100)]
        );
        let records = store.journal().read("sess_a", 40, 1000).unwrap();
        assert_eq!(records.len(), 60);
        assert_eq!((records[0].seq, records[0].payload.as_slice()), (41, &40u32.to_le_bytes()[..]));
        assert_eq!(store.meta().get(b"sess_a").unwrap().as_deref(), Some(&b"record"[..]));
        let listed = store.segments().list("sess_a").unwrap();
        assert_eq!(listed.iter().map(|s| s.start).collect::<Vec<_>>(), [1, 5]);
        assert_eq!(listed[1], kept);
        assert_eq!(store.cells().get(&[1; 32], &[7; 32]).unwrap(), payload);
        assert_eq!(store.cells().get(&[2; 32], &[7; 32]).unwrap(), b"small");
        assert_eq!(
            store.cells().get(&[2; 32], &[8; 32]),
            Err(Miss::ContractMismatch { stored: [7; 32], expected: [8; 32] })
        );
        assert_eq!(store.journal().append("sess_a", "token", vec![]).unwrap().seq, 101);
    }
}

#[test]
fn a_second_open_is_refused_and_told_where_to_go() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), options(MetaKind::Memory)).unwrap();
    store.set_address("http://127.0.0.1:4321").unwrap();
    let holder = store::holder(dir.path()).unwrap();
    assert_eq!((holder.pid, holder.address.as_deref()), (std::process::id(), Some("http://127.0.0.1:4321")));
    match Store::open(dir.path(), options(MetaKind::Memory)).err().unwrap() {
        OpenError::InUse { pid, address, .. } => {
            assert_eq!((pid, address.as_deref()), (Some(std::process::id()), Some("http://127.0.0.1:4321")));
        }
        other => panic!("{other}"),
    }
    drop(store);
    assert_eq!(store::holder(dir.path()), None);
    Store::open(dir.path(), options(MetaKind::Memory)).unwrap();
}

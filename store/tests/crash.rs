//! Real processes, really killed: what a child was told is durable must be there for its successor.
//!
//! The child is this test binary again, told by the environment to work on a directory. It prints a line for each
//! acknowledgement; the parent kills it, opens the directory and holds the store to those lines.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use store::failpoint::ALL_POINTS;
use store::{FAILPOINTS_ENV, MetaKind, Op, Retention, Store, StoreOptions, TierFault};
use support::{CONTRACT, Dice, append, bytes_of, cell_bytes, cell_id, options, put_cell, segment};

const DIR_ENV: &str = "STORE_TEST_DIR";
const MODE_ENV: &str = "STORE_TEST_MODE";
const WRITERS: u64 = 3;

fn child_options() -> StoreOptions {
    StoreOptions { cell_quota_bytes: 1 << 30, metalog_bytes: 4096, ..options(MetaKind::Sled) }
}

/// Says that something is durable. The line is in the pipe, and so survives this process, when it returns.
fn acknowledge(what: &str, name: &str, number: u64) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nACK {what} {name} {number}").unwrap();
    out.flush().unwrap();
}

#[test]
fn child() {
    let Ok(dir) = std::env::var(DIR_ENV) else { return };
    let store = Store::open(Path::new(&dir), child_options()).unwrap();
    acknowledge("open", "store", 0);
    match std::env::var(MODE_ENV).unwrap().as_str() {
        "endless" => std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let store = &store;
                scope.spawn(move || write_for_ever(store, writer));
            }
        }),
        "script" => {
            script(&store);
            store.close().unwrap();
        }
        "sacrifice" => {
            for n in 900..904 {
                assert!(put_cell(&store, n));
            }
            store.cells().set_fault(TierFault::FlipBit);
            for n in 900..904 {
                assert!(store.cells().get(&cell_id(n), &CONTRACT).is_err());
            }
        }
        other => panic!("{other}"),
    }
}

fn write_for_ever(store: &Store, writer: u64) {
    let session = format!("w{writer}");
    let temporary = format!("tmp{writer}");
    let mut n = store.journal().last_seq(&session);
    loop {
        n += 1;
        append(store, &session, n).unwrap();
        acknowledge("record", &session, n);
        let number = writer * 1_000_000 + n;
        match n % 8 {
            0 => {
                // Both keys or neither.
                let (a, b) = (format!("{session}-a").into_bytes(), format!("{session}-b").into_bytes());
                let value = n.to_be_bytes();
                store.meta().batch(vec![Op::put(a, value), Op::put(b, value)]).unwrap();
                acknowledge("meta", &session, n);
            }
            2 => {
                store
                    .segments()
                    .put(segment(&format!("{session}-{n}"), &session, n, Retention::Keep))
                    .unwrap();
                acknowledge("segment", &session, n);
            }
            4 | 5 => {
                assert!(put_cell(store, number));
                acknowledge("cell", &session, number);
            }
            6 => drop(store.journal().append(&temporary, "x", vec![0; 500]).unwrap()),
            7 if n % 64 == 63 => store.journal().remove_session(&temporary).unwrap(),
            7 if n % 128 == 71 => {
                store.checkpoint().unwrap();
                store.compact().unwrap();
            }
            _ => {}
        }
    }
}

/// Reaches every fail point that a healthy directory can reach.
fn script(store: &Store) {
    let from = store.journal().last_seq("w0");
    for n in from + 1..=from + 12 {
        append(store, "w0", n).unwrap();
        acknowledge("record", "w0", n);
        store.journal().append("tmp0", "x", vec![0; 1500]).unwrap().ticket.wait().unwrap();
        store
            .meta()
            .batch(vec![Op::put(*b"w0-a", n.to_be_bytes()), Op::put(*b"w0-b", n.to_be_bytes())])
            .unwrap();
        acknowledge("meta", "w0", n);
        store.meta().put(b"filler", &[1; 800]).unwrap();
    }
    for n in 1000 + from..1004 + from {
        assert!(put_cell(store, n));
        acknowledge("cell", "w0", n);
        assert!(put_cell(store, 700));
        store.cells().remove(&[cell_id(700)]).unwrap();
    }
    // Packs of which little is left, behind them one that is written.
    let packed = 100_000 + 100 * from;
    for n in packed..packed + 40 {
        assert!(put_cell(store, n));
    }
    let (kept, dropped): (Vec<u64>, Vec<u64>) = (packed..packed + 40).partition(|n| n % 8 == 0);
    let dropped: Vec<_> = dropped.into_iter().map(cell_id).collect();
    assert_eq!(store.cells().remove(&dropped).unwrap().removed.len(), dropped.len());
    kept.into_iter().for_each(|n| acknowledge("cell", "w0", n));
    while store.cells().compact().unwrap() {}
    // Files that hold nothing else.
    for _ in 0..40 {
        store.journal().append("tmp0", "x", vec![0; 1500]).unwrap().ticket.wait().unwrap();
    }
    store.journal().remove_session("tmp0").unwrap();
    store.checkpoint().unwrap();
}

/// What a child said.
#[derive(Default)]
struct Said {
    records: HashMap<String, u64>,
    meta: HashMap<String, u64>,
    segments: Vec<(String, u64)>,
    cells: Vec<u64>,
    lines: u64,
}

impl Said {
    fn take(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("ACK ") else { return };
        let mut words = rest.split(' ');
        // A last line may be cut; it is then no acknowledgement.
        let (Some(what), Some(name), Some(number)) = (words.next(), words.next(), words.next()) else {
            return;
        };
        let Ok(number) = number.parse::<u64>() else { return };
        self.lines += 1;
        match what {
            "record" => drop(self.records.insert(name.to_owned(), number)),
            "meta" => drop(self.meta.insert(name.to_owned(), number)),
            "segment" => self.segments.push((name.to_owned(), number)),
            "cell" => self.cells.push(number),
            _ => {}
        }
    }

    /// Reads the child's lines to the end; calls `each` after every one.
    fn listen(&mut self, child: &mut Child, mut each: impl FnMut(&mut Child, u64)) {
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while lines.read_line(&mut line).unwrap() > 0 {
            let before = self.lines;
            if line.ends_with('\n') {
                self.take(line.trim_end());
            }
            line.clear();
            if self.lines > before {
                each(child, self.lines);
            }
        }
    }

    /// Holds the store to everything that was said.
    fn hold(&self, store: &Store, context: &str) {
        let report = store.recovery();
        assert!(!report.has_loss(), "{context}: {report:?}");
        for (session, last) in &self.records {
            let mut next = 1;
            loop {
                let records = store.journal().read(session, next - 1, 500).unwrap();
                if records.is_empty() {
                    break;
                }
                for record in records {
                    assert_eq!((record.seq, &record.payload), (next, &bytes_of(session, next)), "{context}");
                    next += 1;
                }
            }
            assert!(next > *last, "{context}: {session} was told of {last}, {} are there", next - 1);
        }
        for (session, last) in &self.meta {
            let get = |key: String| store.meta().get(key.as_bytes()).unwrap();
            let (a, b) = (get(format!("{session}-a")), get(format!("{session}-b")));
            assert_eq!(a, b, "{context}: a batch is whole");
            assert!(a.unwrap() >= last.to_be_bytes().to_vec(), "{context}: {session} {last}");
        }
        for (session, n) in &self.segments {
            let found = store.segments().get(&format!("{session}-{n}")).unwrap();
            assert_eq!(found.unwrap().start, *n, "{context}");
        }
        for n in &self.cells {
            assert_eq!(store.cells().get(&cell_id(*n), &CONTRACT).as_ref(), Ok(&cell_bytes(*n)), "{context}");
        }
    }
}

/// Where a child's panics go: beside its directory.
fn complaints(dir: &Path) -> std::path::PathBuf {
    dir.with_file_name("complaints")
}

/// A directory for a store, and what keeps it alive.
fn home() -> (tempfile::TempDir, std::path::PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("data");
    (home, dir)
}

fn spawn(dir: &Path, mode: &str, failpoints: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(DIR_ENV, dir)
        .env(MODE_ENV, mode)
        .env(FAILPOINTS_ENV, failpoints)
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(complaints(dir)).unwrap())
        .spawn()
        .unwrap()
}

/// Set `STORE_CRASH_CYCLES` for a longer run.
#[test]
fn i6_a_killed_process_loses_nothing_it_acknowledged() {
    let cycles = std::env::var("STORE_CRASH_CYCLES").ok().and_then(|n| n.parse().ok()).unwrap_or(16u64);
    let seed = std::env::var("STORE_CRASH_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1u64);
    let (_home, dir) = home();
    let mut said = Said::default();
    let mut dice = Dice(seed);
    for cycle in 0..cycles {
        let mut child = spawn(&dir, "endless", "");
        let context = format!("cycle {cycle} of seed {seed}");
        // Every third child is killed at a random moment after its start, most often while it opens and recovers;
        // the others after some acknowledgements.
        if cycle % 3 == 2 {
            let wait = dice.below(80);
            std::thread::sleep(Duration::from_millis(wait));
            child.kill().unwrap();
            said.listen(&mut child, |_, _| {});
        } else {
            let enough = said.lines + 1 + dice.below(250);
            said.listen(&mut child, |child, lines| {
                if lines == enough {
                    child.kill().unwrap();
                }
            });
        }
        let signal = child.wait().unwrap().signal();
        let complaint = std::fs::read_to_string(complaints(&dir)).unwrap();
        assert_eq!(signal, Some(9), "{context}: the child ended by itself: {complaint}");
        if cycle % 4 == 1 {
            let store = Store::open(&dir, child_options()).unwrap();
            said.hold(&store, &context);
        }
    }
    let store = Store::open(&dir, child_options()).unwrap();
    said.hold(&store, "at the end");
    store.close().unwrap();
    // And from the logs and packs alone.
    std::fs::remove_dir_all(dir.join("meta")).unwrap();
    let store = Store::open(&dir, child_options()).unwrap();
    assert!(store.recovery().rebuilt.is_some());
    said.hold(&store, "rebuilt");
    assert!(said.lines > 100, "{} acknowledgements", said.lines);
}

#[test]
fn i6_an_abort_at_any_fail_point_loses_nothing_acknowledged() {
    let (_home, dir) = home();
    let mut said = Said::default();
    let run = |said: &mut Said, mode: &str, failpoints: &str| {
        let mut child = spawn(&dir, mode, failpoints);
        said.listen(&mut child, |_, _| {});
        child.wait().unwrap()
    };
    for (i, name) in ALL_POINTS.iter().enumerate() {
        let mode = match *name {
            "open.before_quarantine" | "open.after_quarantine" => {
                std::fs::create_dir_all(dir.join("meta")).unwrap();
                std::fs::write(dir.join("meta/suspect"), b"").unwrap();
                "script"
            }
            "packs.before_quarantine" => {
                // The quarantine takes saved cells with it.
                said.cells.clear();
                "sacrifice"
            }
            _ => "script",
        };
        // Points on the busy paths let a few hits pass.
        let pass = if name.starts_with("journal.") && name.ends_with("sync") { i % 5 } else { 0 };
        let status = run(&mut said, mode, &format!("{name}=abort@{pass}"));
        assert_eq!(status.signal(), Some(6), "{name} was not reached");
        let store = Store::open(&dir, child_options()).unwrap();
        said.hold(&store, name);
        store.close().unwrap();
    }
    assert!(run(&mut said, "script", "").success());
    said.hold(&Store::open(&dir, child_options()).unwrap(), "at the end");
}

#[test]
fn a_killed_holder_frees_the_directory() {
    let (_home, dir) = home();
    let mut child = spawn(&dir, "endless", "");
    let mut said = Said::default();
    let mut pid = None;
    let id = child.id();
    said.listen(&mut child, |child, lines| {
        if lines == 5 {
            pid = store::holder(&dir).map(|h| h.pid);
            let refused = Store::open(&dir, child_options()).err().unwrap();
            assert!(matches!(refused, store::OpenError::InUse { pid: Some(p), .. } if p == id), "{refused}");
            child.kill().unwrap();
        }
    });
    child.wait().unwrap();
    assert_eq!(pid, Some(id));
    assert_eq!(store::holder(&dir), None);
    said.hold(&Store::open(&dir, child_options()).unwrap(), "after the kill");
}

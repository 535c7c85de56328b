//! The worker pool on real threads. `tests/workers_loom.rs` has it under a model of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::workers::{Disjoint, Workers};

#[test]
fn every_item_runs_exactly_once() {
    for threads in [1, 2, 3, 5] {
        let workers = Workers::new(threads).unwrap();
        assert_eq!(workers.threads(), threads);
        for items in [0, 1, 2, 7, 1000] {
            for _ in 0..20 {
                let counts: Vec<_> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                workers.run(items, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }
}

#[test]
fn callers_on_several_threads_take_turns() {
    let workers = Workers::new(3).unwrap();
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    workers.run(10, &|_| {
                        total.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(total.into_inner(), 4 * 50 * 10);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let workers = Workers::new(2).unwrap();
    let outcome = catch_unwind(AssertUnwindSafe(|| workers.run(50, &|i| assert_ne!(i, 20))));
    assert!(outcome.is_err());
    let total = AtomicUsize::new(0);
    workers.run(5, &|_| {
        total.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(total.into_inner(), 5);
}

#[test]
fn ranges_out_of_bounds_are_empty() {
    let mut values = [1, 2, 3];
    let shared = Disjoint::new(&mut values);
    // SAFETY: the slices do not overlap.
    let (a, b, c) = unsafe { (shared.slice(0, 2), shared.slice(2, 2), shared.slice(usize::MAX, 2)) };
    assert_eq!((a.len(), b.len(), c.len()), (2, 0, 0));
}

//! The worker pool under every interleaving of its threads and every value its atomics may give, up to a bound on
//! preemptions: its source, compiled over loom's twins of threads, locks and atomics.
#![allow(clippy::unwrap_used, dead_code, missing_docs, unreachable_pub)]

mod error {
    pub use kernels::error::KernelError;
}

mod sync {
    use loom::cell::UnsafeCell;
    pub use loom::hint::spin_loop;
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
    pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub use loom::thread::{Builder, JoinHandle, yield_now};

    /// A worker sleeps at once: looking a second time shows nothing new.
    pub const SPINS: u32 = 1;

    /// As the real one; unordered access is found and reported.
    pub struct Slot<T>(UnsafeCell<T>);

    impl<T: Copy> Slot<T> {
        pub fn new(value: T) -> Self {
            Self(UnsafeCell::new(value))
        }

        /// # Safety
        /// As the real one.
        pub unsafe fn get(&self) -> T {
            // SAFETY: by the caller's promise.
            self.0.with(|value| unsafe { *value })
        }

        /// # Safety
        /// As the real one.
        pub unsafe fn set(&self, value: T) {
            // SAFETY: by the caller's promise.
            self.0.with_mut(|place| unsafe { *place = value });
        }
    }
}

#[path = "../src/cpu/workers.rs"]
mod workers;

use std::sync::atomic::Ordering;

use loom::sync::atomic::AtomicUsize;
use workers::Workers;

/// `jobs` jobs of two items each on `threads` threads.
fn explore(threads: usize, jobs: usize, preemptions: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let workers = Workers::new(threads).unwrap();
        for _ in 0..jobs {
            let counts = [AtomicUsize::new(0), AtomicUsize::new(0)];
            workers.run(counts.len(), &|item| {
                counts[item].fetch_add(1, Ordering::Relaxed);
            });
            // Nobody is inside any more, and what was done is seen.
            for count in counts {
                assert_eq!(count.into_inner(), 1);
            }
        }
    });
}

#[test]
fn every_item_runs_once_and_is_seen() {
    explore(2, 1, 3);
}

#[test]
fn a_late_worker_never_enters_the_next_job_with_the_last_ones_work() {
    explore(2, 2, 2);
}

#[test]
fn three_threads_leave_before_the_caller_goes_on() {
    explore(3, 1, 2);
}

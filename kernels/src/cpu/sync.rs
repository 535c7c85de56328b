//! What the worker pool needs of threads, under the names of the standard library. A test compiles the pool a second time
//! over twins of these that explore every interleaving.

use std::cell::UnsafeCell;

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
pub(super) use std::thread::{Builder, JoinHandle, yield_now};

/// How long an idle worker looks for work before it sleeps: some tens of microseconds, the time
/// between two kernels of a decode step.
pub(super) const SPINS: u32 = 2000;

/// A value that threads hand to each other without a lock.
pub(super) struct Slot<T>(UnsafeCell<T>);

impl<T: Copy> Slot<T> {
    /// A slot with a value.
    pub(super) fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// The value.
    ///
    /// # Safety
    /// No thread sets it at the same time.
    pub(super) unsafe fn get(&self) -> T {
        // SAFETY: by the caller's promise.
        unsafe { *self.0.get() }
    }

    /// Replaces the value.
    ///
    /// # Safety
    /// No other thread gets or sets it at the same time.
    pub(super) unsafe fn set(&self, value: T) {
        // SAFETY: by the caller's promise.
        unsafe { *self.0.get() = value };
    }
}

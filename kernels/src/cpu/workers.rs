//! The worker pool: persistent threads that share the items of one job at a time.
//!
//! A job is `items` independent pieces of work, cut by data. Which thread runs which item is a race;
//! the result is not, because items write to places of their own and reduce nothing across items.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::sync::{
    Arc, AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Builder, Condvar, JoinHandle, Mutex, MutexGuard,
    SPINS, Slot, spin_loop, yield_now,
};
use crate::error::KernelError;

/// Most threads a pool may have.
pub(crate) const MAX_THREADS: usize = 256;
/// Gate bit: the current job accepts workers.
const OPEN: u64 = 1 << 31;

type Work = dyn Fn(usize) + Sync;

/// What the threads share. `gate` is `job number << 32 | OPEN | workers that joined`.
struct Shared {
    gate: AtomicU64,
    left: AtomicU32,
    next: AtomicUsize,
    items: AtomicUsize,
    work: Slot<Option<*const Work>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

// SAFETY: `work` is written only by the caller of `run` while the gate is closed and every joined
// worker has left, and read only by workers that joined through the open gate; what it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is not tied to a thread.
unsafe impl Send for Shared {}

/// A pool of `threads - 1` workers; the calling thread is the last one.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    call: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// Starts the threads (at least one in all, the caller's).
    pub(crate) fn new(threads: usize) -> Result<Self, KernelError> {
        if threads > MAX_THREADS {
            return Err(KernelError::OutOfRange {
                kernel: "workers",
                what: "threads",
                index: threads,
                limit: MAX_THREADS + 1,
            });
        }
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            left: AtomicU32::new(0),
            next: AtomicUsize::new(0),
            items: AtomicUsize::new(0),
            work: Slot::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
        });
        let mut workers = Self { shared, handles: Vec::new(), call: Mutex::new(()) };
        for index in 1..threads {
            let shared = Arc::clone(&workers.shared);
            let handle = Builder::new()
                .name(format!("kernels-{index}"))
                .spawn(move || shared.serve())
                .map_err(|error| KernelError::Workers { problem: error.to_string() })?;
            workers.handles.push(handle);
        }
        Ok(workers)
    }

    /// Threads that share a job, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Runs `work(0..items)`, each item once, and returns when all are done. One job at a time:
    /// callers on several threads wait for each other.
    pub(crate) fn run(&self, items: usize, work: &(dyn Fn(usize) + Sync)) {
        if items <= 1 || self.handles.is_empty() {
            (0..items).for_each(work);
            return;
        }
        let turn = lock(&self.call);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is used by workers that joined this job, and
        // this function does not return or unwind before all of them have left.
        let work: *const Work = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), *const Work>(work) };
        // SAFETY: the gate is closed and nobody is inside (see `Shared`).
        unsafe { shared.work.set(Some(work)) };
        shared.left.store(0, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        shared.items.store(items, Ordering::Relaxed);
        let job = (shared.gate.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        shared.gate.store((job << 32) | OPEN, Ordering::SeqCst);
        if *lock(&shared.sleepers) > 0 {
            shared.wake.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| shared.take_items(work)));
        let joined = shared.gate.fetch_and(!OPEN, Ordering::SeqCst) & (OPEN - 1);
        let mut spins = 0u32;
        while u64::from(shared.left.load(Ordering::Acquire)) != joined {
            spins += 1;
            if spins.is_multiple_of(SPINS) {
                yield_now();
            }
            spin_loop();
        }
        let theirs = shared.panicked.swap(false, Ordering::Relaxed);
        drop(turn);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        if theirs {
            resume_unwind(Box::new("a kernel worker panicked"));
        }
    }
}

impl Shared {
    fn take_items(&self, work: *const Work) {
        let items = self.items.load(Ordering::Relaxed);
        loop {
            let item = self.next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                return;
            }
            // SAFETY: the caller of `run` keeps the closure alive until everyone has left.
            unsafe { (*work)(item) };
        }
    }

    /// A worker's life: join a job, help, leave, look for the next one, sleep.
    fn serve(&self) {
        let mut last = 0;
        let mut spins = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let gate = self.gate.load(Ordering::Acquire);
            if gate & OPEN == 0 || gate >> 32 == last {
                spins += 1;
                if spins < SPINS {
                    spin_loop();
                } else {
                    self.sleep(last);
                    spins = 0;
                }
                continue;
            }
            if self.gate.compare_exchange_weak(gate, gate + 1, Ordering::SeqCst, Ordering::Relaxed).is_err() {
                continue;
            }
            last = gate >> 32;
            spins = 0;
            // SAFETY: joined, so the caller of `run` does not write to it.
            let work = unsafe { self.work.get() };
            let done = catch_unwind(AssertUnwindSafe(|| work.map(|work| self.take_items(work))));
            if done.is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.left.fetch_add(1, Ordering::Release);
        }
    }

    fn sleep(&self, last: u64) {
        let mut sleepers = lock(&self.sleepers);
        *sleepers += 1;
        loop {
            let gate = self.gate.load(Ordering::SeqCst);
            if self.stop.load(Ordering::Relaxed) || (gate & OPEN != 0 && gate >> 32 != last) {
                break;
            }
            sleepers = self.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
        }
        *sleepers -= 1;
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        {
            let _sleepers = lock(&self.shared.sleepers);
            self.shared.stop.store(true, Ordering::Relaxed);
            self.shared.wake.notify_all();
        }
        for handle in self.handles.drain(..) {
            // A worker catches the panics of its work, so there is nothing to learn here.
            let _ = handle.join();
        }
    }
}

/// A mutable slice that the items of one job share, each writing to ranges of its own.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose callers promise disjoint ranges.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Shares `slice` until the borrow ends.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// The values at `start..start + len`; none if that is out of range.
    ///
    /// # Safety
    /// No two slices that live at one time may overlap.
    #[expect(clippy::mut_from_ref, reason = "the point of this type; see the safety section")]
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        if start.checked_add(len).is_none_or(|end| end > self.len) {
            return &mut [];
        }
        // SAFETY: in range; disjoint by the caller's promise; unique through the borrow held.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

//! Logical pages: which are free, how often each is used. No bytes here; a page's K and V live on
//! the device under the same [`PageId`].
//!
//! Invariants: a page is either free with no references or used with at least one; the free list
//! holds every free page once; `free + used = total` at any time.

use kernels::backend::PageId;

/// Reference counts and the free list of one device pool.
#[derive(Debug)]
pub struct PagePool {
    references: Vec<u32>,
    free: Vec<PageId>,
}

/// The pool has fewer free pages than asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} pages wanted, {free} free")]
pub struct OutOfPages {
    /// Pages asked for.
    pub wanted: usize,
    /// Pages free.
    pub free: usize,
}

impl PagePool {
    /// A pool of `pages` free pages.
    pub fn new(pages: usize) -> Self {
        let free = (0..pages as u32).rev().map(PageId).collect();
        Self { references: vec![0; pages], free }
    }

    /// All pages.
    pub fn total(&self) -> usize {
        self.references.len()
    }

    /// Free pages.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// References to a page.
    pub fn references(&self, page: PageId) -> u32 {
        self.references.get(page.0 as usize).copied().unwrap_or(0)
    }

    /// Whether another table uses the page too, so that it must be copied before it is written.
    pub fn is_shared(&self, page: PageId) -> bool {
        self.references(page) > 1
    }

    /// Takes `count` pages, each with one reference; all or none.
    ///
    /// # Errors
    /// [`OutOfPages`] when fewer are free.
    pub fn allocate(&mut self, count: usize) -> Result<Vec<PageId>, OutOfPages> {
        if count > self.free.len() {
            return Err(OutOfPages { wanted: count, free: self.free.len() });
        }
        let pages = self.free.split_off(self.free.len() - count);
        for page in &pages {
            self.references[page.0 as usize] = 1;
        }
        Ok(pages)
    }

    /// Adds a reference to a used page.
    pub fn share(&mut self, page: PageId) {
        let count = &mut self.references[page.0 as usize];
        debug_assert!(*count > 0, "a free page cannot be shared");
        *count += 1;
    }

    /// Drops a reference; the page is free when it was the last.
    pub fn release(&mut self, page: PageId) {
        let count = &mut self.references[page.0 as usize];
        debug_assert!(*count > 0, "a page is freed exactly once");
        *count = count.saturating_sub(1);
        if *count == 0 {
            self.free.push(page);
        }
    }

    /// Checks conservation against the tables that hold the pages.
    ///
    /// # Errors
    /// A sentence that names the first page whose count is wrong.
    pub fn check<'a>(&self, holders: impl Iterator<Item = &'a PageId>) -> Result<(), String> {
        let mut counts = vec![0_u32; self.references.len()];
        for page in holders {
            counts[page.0 as usize] += 1;
        }
        for (index, (have, want)) in self.references.iter().zip(&counts).enumerate() {
            if have != want {
                return Err(format!("page {index} has {have} references, {want} holders"));
            }
        }
        let mut listed = vec![false; self.references.len()];
        for page in &self.free {
            if counts[page.0 as usize] > 0 || std::mem::replace(&mut listed[page.0 as usize], true) {
                return Err(format!("page {} is on the free list wrongly", page.0));
            }
        }
        let used = counts.iter().filter(|count| **count > 0).count();
        if used + self.free.len() != self.references.len() {
            return Err(format!("{used} used + {} free != {} pages", self.free.len(), self.references.len()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_is_all_or_none() {
        let mut pool = PagePool::new(3);
        let pages = pool.allocate(2).unwrap();
        assert_eq!(pool.allocate(2), Err(OutOfPages { wanted: 2, free: 1 }));
        assert_eq!(pool.free(), 1);
        pool.share(pages[0]);
        pool.release(pages[0]);
        assert_eq!(pool.free(), 1, "a shared page stays used");
        pool.release(pages[0]);
        pool.release(pages[1]);
        assert_eq!(pool.free(), 3);
        pool.check([].into_iter()).unwrap();
    }
}

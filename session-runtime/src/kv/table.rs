//! Block tables: for each (layer, KV head) the page ids of a session, in token order.

use kernels::backend::{PAGE_TOKENS, PageId};

use super::pool::{OutOfPages, PagePool};

/// A page that must be copied on the device before its owner writes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The shared page.
    pub source: PageId,
    /// The owner's new page.
    pub target: PageId,
}

/// The pages of one session. Every (layer, KV head) has its own list, so that later policies can
/// keep different tokens per head; in this version all lists have the same length.
#[derive(Debug, Default)]
pub struct BlockTable {
    layers: usize,
    kv_heads: usize,
    lists: Vec<Vec<PageId>>,
}

impl BlockTable {
    /// An empty table.
    pub fn new(layers: usize, kv_heads: usize) -> Self {
        Self { layers, kv_heads, lists: vec![Vec::new(); layers * kv_heads] }
    }

    /// Pages needed for `tokens` tokens in a model of this shape.
    pub fn pages_for(layers: usize, kv_heads: usize, tokens: usize) -> usize {
        layers * kv_heads * tokens.div_ceil(PAGE_TOKENS)
    }

    /// Pages of one (layer, KV head), in token order.
    pub fn pages(&self, layer: usize, kv_head: usize) -> &[PageId] {
        &self.lists[layer * self.kv_heads + kv_head]
    }

    /// Pages of every KV head of a layer.
    pub fn layer(&self, layer: usize) -> Vec<&[PageId]> {
        (0..self.kv_heads).map(|head| self.pages(layer, head)).collect()
    }

    /// Every page of the table.
    pub fn all(&self) -> impl Iterator<Item = &PageId> {
        self.lists.iter().flatten()
    }

    /// Tokens that fit.
    pub fn capacity(&self) -> usize {
        self.lists.first().map_or(0, |list| list.len() * PAGE_TOKENS)
    }

    /// Pages that `prepare(tokens_written, tokens)` would take from the pool.
    pub fn pages_wanted(&self, pool: &PagePool, written: usize, tokens: usize) -> usize {
        let have = self.capacity() / PAGE_TOKENS;
        let want = tokens.div_ceil(PAGE_TOKENS);
        let grow = want.saturating_sub(have) * self.lists.len();
        let first = written / PAGE_TOKENS;
        let copies = self
            .lists
            .iter()
            .flat_map(|list| list.iter().take(want).skip(first))
            .filter(|page| pool.is_shared(**page))
            .count();
        grow + copies
    }

    /// Makes room for `tokens` tokens of which those from index `written` on will be written: grows the
    /// lists and replaces shared pages that would be written (copy on write). All or nothing.
    ///
    /// Returns the copies the device must make before the first write.
    ///
    /// # Errors
    /// [`OutOfPages`]; the table is unchanged.
    pub fn prepare(
        &mut self,
        pool: &mut PagePool,
        written: usize,
        tokens: usize,
    ) -> Result<Vec<PageCopy>, OutOfPages> {
        let mut fresh = pool.allocate(self.pages_wanted(pool, written, tokens))?.into_iter();
        let want = tokens.div_ceil(PAGE_TOKENS);
        let first = written / PAGE_TOKENS;
        let mut copies = Vec::new();
        for list in &mut self.lists {
            for page in list.iter_mut().take(want).skip(first) {
                if pool.is_shared(*page)
                    && let Some(target) = fresh.next()
                {
                    copies.push(PageCopy { source: *page, target });
                    pool.release(*page);
                    *page = target;
                }
            }
            let grow = want.saturating_sub(list.len());
            list.extend(fresh.by_ref().take(grow));
        }
        debug_assert!(fresh.next().is_none(), "every page taken from the pool is in the table");
        Ok(copies)
    }

    /// A table over the same pages for the first `tokens` tokens.
    pub fn fork(&self, pool: &mut PagePool, tokens: usize) -> Self {
        let keep = tokens.div_ceil(PAGE_TOKENS);
        let lists: Vec<Vec<PageId>> =
            self.lists.iter().map(|list| list.iter().take(keep).copied().collect()).collect();
        for page in lists.iter().flatten() {
            pool.share(*page);
        }
        Self { layers: self.layers, kv_heads: self.kv_heads, lists }
    }

    /// Drops the pages behind the first `tokens` tokens.
    pub fn truncate(&mut self, pool: &mut PagePool, tokens: usize) {
        let keep = tokens.div_ceil(PAGE_TOKENS);
        for list in &mut self.lists {
            for page in list.drain(keep.min(list.len())..) {
                pool.release(page);
            }
        }
    }

    /// Pages shared with another table.
    pub fn shared_pages(&self, pool: &PagePool) -> usize {
        self.all().filter(|page| pool.is_shared(**page)).count()
    }
}

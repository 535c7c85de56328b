//! Block tables: for each (layer, KV head) the page ids of a session, in token order.

use std::ops::Range;
use std::sync::Arc;

use kernels::backend::{PAGE_TOKENS, PageId};

use super::pool::{OutOfPages, PagePool};
use super::shape::TableShape;

/// A page that must be copied on the device before its owner writes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The shared page.
    pub source: PageId,
    /// The owner's new page.
    pub target: PageId,
}

/// What a table is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Room to write the tokens from `written` on of a sequence that will have `tokens`.
    Write {
        /// Tokens that are there.
        written: usize,
        /// Tokens that will be.
        tokens: usize,
    },
    /// Room to restore `known` tokens into an empty table, of a sequence that will have `tokens`.
    Restore {
        /// Tokens that are brought back.
        known: usize,
        /// Tokens that will be.
        tokens: usize,
    },
    /// Within such a restore, room to recompute from token `start` on.
    Recompute {
        /// First token of the next step.
        start: usize,
        /// Tokens that are brought back.
        known: usize,
    },
}

/// The pages of one session. Every (layer, KV head) has its own list. Layers with a window hold the last tokens
/// only: the places of older ones are [`PageId::ABSENT`].
#[derive(Debug, Default)]
pub struct BlockTable {
    shape: Arc<TableShape>,
    lists: Vec<Vec<PageId>>,
}

impl BlockTable {
    /// An empty table of a model whose layers attend to all tokens.
    pub fn new(layers: usize, kv_heads: usize) -> Self {
        Self::with_shape(Arc::new(TableShape::full(layers, kv_heads)))
    }

    /// An empty table.
    pub fn with_shape(shape: Arc<TableShape>) -> Self {
        let lists = vec![Vec::new(); shape.layers() * shape.kv_heads()];
        Self { shape, lists }
    }

    /// The shape.
    pub fn shape(&self) -> &TableShape {
        &self.shape
    }

    /// Pages of one (layer, KV head), in token order.
    pub fn pages(&self, layer: usize, kv_head: usize) -> &[PageId] {
        &self.lists[layer * self.shape.kv_heads() + kv_head]
    }

    /// Pages of every KV head of a layer.
    pub fn layer(&self, layer: usize) -> Vec<&[PageId]> {
        (0..self.shape.kv_heads()).map(|head| self.pages(layer, head)).collect()
    }

    /// The pages of tokens `start..end` in a layer, for every KV head; `None` when the layer dropped some.
    pub fn range(&self, layer: usize, start: usize, end: usize) -> Option<Vec<&[PageId]>> {
        let places = start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS);
        let whole = |pages: &&[PageId]| !pages.contains(&PageId::ABSENT);
        self.layer(layer).into_iter().map(|pages| pages.get(places.clone()).filter(whole)).collect()
    }

    /// Every page of the table.
    pub fn all(&self) -> impl Iterator<Item = &PageId> {
        self.lists.iter().flatten().filter(|page| **page != PageId::ABSENT)
    }

    /// Whether the table holds no page.
    pub fn is_empty(&self) -> bool {
        self.all().next().is_none()
    }

    /// Places that must have a page, by list.
    fn places(&self, need: Need) -> Vec<[Range<usize>; 2]> {
        let kv_heads = self.shape.kv_heads().max(1);
        let layer = |layer: usize| match need {
            Need::Write { written, tokens } => [self.shape.written(layer, written, tokens), 0..0],
            Need::Restore { known, tokens } if self.shape.first_kept(layer, known) == 0 => {
                // The whole history is kept: so is room for what follows, where that is wanted at once.
                [0..self.shape.written(layer, known, tokens).end.max(self.shape.kept(layer, known).end), 0..0]
            }
            Need::Restore { known, .. } => {
                [self.shape.kept(layer, known), self.shape.scratch(layer, 0, known)]
            }
            Need::Recompute { start, known } => {
                [self.shape.kept(layer, known), self.shape.scratch(layer, start, known)]
            }
        };
        (0..self.lists.len()).map(|list| layer(list / kv_heads)).collect()
    }

    /// Pages that [`BlockTable::prepare`] would take from the pool.
    pub fn pages_wanted(&self, pool: &PagePool, need: Need) -> usize {
        let lists = self.lists.iter().zip(self.places(need));
        lists
            .map(|(list, [first, second])| {
                let shared = first.end;
                let places = first.clone().chain(second.filter(|place| !first.contains(place)));
                places
                    .filter(|place| match list.get(*place) {
                        None | Some(&PageId::ABSENT) => true,
                        Some(page) => *place < shared && copies(need) && pool.is_shared(*page),
                    })
                    .count()
            })
            .sum()
    }

    /// Makes room: takes missing pages and replaces shared pages that would be written (copy on write). All or
    /// nothing.
    ///
    /// Returns the copies the device must make before the first write.
    ///
    /// # Errors
    /// [`OutOfPages`]; the table is unchanged.
    pub fn prepare_for(&mut self, pool: &mut PagePool, need: Need) -> Result<Vec<PageCopy>, OutOfPages> {
        let mut fresh = pool.allocate(self.pages_wanted(pool, need))?.into_iter();
        let mut made = Vec::new();
        let wanted = self.places(need);
        for (list, [first, second]) in self.lists.iter_mut().zip(wanted) {
            let end = first.end.max(second.end);
            if list.len() < end {
                list.resize(end, PageId::ABSENT);
            }
            for place in first.chain(second) {
                let page = &mut list[place];
                if *page == PageId::ABSENT {
                    // As many were taken as `pages_wanted` counted: one for each place found absent or shared.
                    *page = fresh.next().unwrap_or(PageId::ABSENT);
                } else if copies(need)
                    && pool.is_shared(*page)
                    && let Some(target) = fresh.next()
                {
                    made.push(PageCopy { source: *page, target });
                    pool.release(*page);
                    *page = target;
                }
            }
        }
        debug_assert!(fresh.next().is_none(), "every page taken from the pool is in the table");
        Ok(made)
    }

    /// Makes room for `tokens` tokens of which those from index `written` on will be written.
    ///
    /// # Errors
    /// [`OutOfPages`]; the table is unchanged.
    pub fn prepare(
        &mut self,
        pool: &mut PagePool,
        written: usize,
        tokens: usize,
    ) -> Result<Vec<PageCopy>, OutOfPages> {
        self.prepare_for(pool, Need::Write { written, tokens })
    }

    /// Drops the pages of window layers that nothing reads once `computed` tokens are there.
    pub fn trim(&mut self, pool: &mut PagePool, computed: usize) {
        self.keep(pool, |shape, layer, place| place >= shape.kept(layer, computed).start);
    }

    /// Drops the pages of window layers that a restore of `known` tokens needs neither at its end nor for recomputing
    /// from token `start` on.
    pub fn trim_restore(&mut self, pool: &mut PagePool, start: usize, known: usize) {
        self.keep(pool, |shape, layer, place| {
            shape.kept(layer, known).contains(&place) || shape.scratch(layer, start, known).contains(&place)
        });
    }

    fn keep(&mut self, pool: &mut PagePool, wanted: impl Fn(&TableShape, usize, usize) -> bool) {
        if !self.shape.has_windows() {
            return;
        }
        let kv_heads = self.shape.kv_heads().max(1);
        for (list, pages) in self.lists.iter_mut().enumerate() {
            for (place, page) in pages.iter_mut().enumerate() {
                if *page != PageId::ABSENT && !wanted(&self.shape, list / kv_heads, place) {
                    pool.release(*page);
                    *page = PageId::ABSENT;
                }
            }
        }
    }

    /// Whether every layer still holds what a sequence of `computed` tokens needs to go on.
    pub fn covers(&self, computed: usize) -> bool {
        (0..self.shape.layers())
            .all(|layer| self.range(layer, self.shape.first_kept(layer, computed), computed).is_some())
    }

    /// A table over the same pages for the first `tokens` tokens.
    pub fn fork(&self, pool: &mut PagePool, tokens: usize) -> Self {
        let keep = tokens.div_ceil(PAGE_TOKENS);
        let lists: Vec<Vec<PageId>> =
            self.lists.iter().map(|list| list.iter().take(keep).copied().collect()).collect();
        let fork = Self { shape: Arc::clone(&self.shape), lists };
        fork.all().for_each(|page| pool.share(*page));
        fork
    }

    /// Drops the pages behind the first `tokens` tokens.
    pub fn truncate(&mut self, pool: &mut PagePool, tokens: usize) {
        let keep = tokens.div_ceil(PAGE_TOKENS);
        for list in &mut self.lists {
            for page in list.drain(keep.min(list.len())..) {
                if page != PageId::ABSENT {
                    pool.release(page);
                }
            }
        }
    }

    /// Pages shared with another table.
    pub fn shared_pages(&self, pool: &PagePool) -> usize {
        self.all().filter(|page| pool.is_shared(**page)).count()
    }
}

/// Whether shared pages in reach are copied: a restore begins with an empty table, which shares none.
fn copies(need: Need) -> bool {
    matches!(need, Need::Write { .. })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WINDOW: usize = 100;
    const STEP: usize = 128;

    fn shape() -> Arc<TableShape> {
        Arc::new(TableShape::new(vec![Some(WINDOW), None, Some(WINDOW)], 2, STEP))
    }

    #[test]
    fn window_layers_hold_bounded_pages_and_everything_is_given_back() {
        let mut pool = PagePool::new(4000);
        let mut table = BlockTable::with_shape(shape());
        let mut computed = 0;
        for rows in (1..).map(|step| step * 37 % STEP + 1).take(60) {
            table.prepare(&mut pool, computed, computed + rows).unwrap();
            for layer in [0, 2] {
                let first = (computed + 1).saturating_sub(WINDOW);
                assert!(table.range(layer, first, computed + rows).is_some(), "a step finds what it reads");
            }
            computed += rows;
            table.trim(&mut pool, computed);
            assert!(table.covers(computed));
            let again = computed.saturating_sub(WINDOW);
            assert!(table.range(0, again, computed).is_some(), "the last row can be computed again");
            assert!(table.all().count() <= table.shape().pages_most(computed));
            let held = table.pages(0, 1).iter().filter(|page| **page != PageId::ABSENT).count();
            assert!(held * PAGE_TOKENS <= WINDOW + STEP + 3 * 64, "{held} pages at {computed} tokens");
            pool.check(table.all()).unwrap();
        }
        assert!(!table.covers(computed / 2), "older tokens are gone from window layers");
        let fork = table.fork(&mut pool, computed);
        pool.check(table.all().chain(fork.all())).unwrap();
        for mut table in [table, fork] {
            table.truncate(&mut pool, 0);
        }
        assert_eq!(pool.free(), pool.total());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

        /// A restore that recomputes from the front never takes more pages than it began with.
        #[test]
        fn i9_a_restore_moves_inside_the_pages_it_began_with(known in 1usize..3000, step in 1usize..3) {
            let mut pool = PagePool::new(4000);
            let mut table = BlockTable::with_shape(shape());
            table.prepare_for(&mut pool, Need::Restore { known, tokens: known + 1 }).unwrap();
            let begun = table.all().count();
            prop_assert!(begun <= table.shape().pages_most(known + 1));
            for start in (0..known).step_by(step * 64) {
                let end = (start + step * 64).min(known);
                table.trim_restore(&mut pool, start, known);
                table.prepare_for(&mut pool, Need::Recompute { start, known }).unwrap();
                prop_assert!(table.all().count() <= begun);
                for layer in [0, 1, 2] {
                    let first = if layer == 1 { 0 } else { (start + 1).saturating_sub(WINDOW) };
                    prop_assert!(table.range(layer, first, end).is_some());
                }
            }
            table.trim(&mut pool, known);
            prop_assert!(table.covers(known));
            pool.check(table.all()).unwrap();
        }
    }
}

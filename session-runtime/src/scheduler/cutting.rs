//! Cutting tokens out of a history. What follows them is computed again, or, for sessions that take KV near what would be computed,
//! moved: its values stay, and its keys are turned to their new positions.
//!
//! KV that is not on the device when its history is cut is moved when it next comes back: it is brought back as it was saved first.

use std::ops::Range;
use std::sync::Arc;

use kernels::backend::Backend;

use super::Relocation;
use super::worker::{Worker, busy};
use crate::engine::Move;
use crate::error::Error;
use crate::kv::chunk::CHUNK_TOKENS;
use crate::kv::contract::{Place, Relation};
use crate::kv::state::KvState;
use crate::kv::table::Need;

impl<B: Backend> Worker<B> {
    /// Cuts tokens `start..end` out; whether what follows them is moved, now or when it next comes back.
    pub(super) fn cut(&mut self, session: &str, start: usize, end: usize) -> Result<bool, Error> {
        self.drop_prefetch(session);
        if self.job(session).is_some() {
            return Err(busy(session));
        }
        let sequence = self.sequences.get(session).ok_or_else(|| Error::no_session(session))?;
        if start > end || end > sequence.length() {
            return Err(Error::invalid(
                "range_invalid",
                format!("tokens {start}..{end} are not a range of the {} there are", sequence.length()),
            ));
        }
        let own = self.contract.relation(&self.contract, Place::Moved, sequence.reuse);
        let moves = own == Relation::Relocate && self.engine.can_relocate() && start < end;
        match sequence.state {
            // A cut behind one that waits is made after it.
            KvState::Evicted if !sequence.cuts.is_empty() || (moves && end < sequence.known) => {
                if let Some(sequence) = self.sequences.get_mut(session) {
                    sequence.cuts.push(start..end);
                }
                Ok(true)
            }
            state if moves && state.is_resident() => Ok(self.relocate(session, start, end)),
            _ => {
                self.cut_exactly(session, start, end);
                Ok(false)
            }
        }
    }

    /// Makes the cuts that waited for the KV to come back: it has, or it never will.
    pub(super) fn make_cuts(&mut self, session: &str) {
        let cuts = self.sequences.get_mut(session).map(|sequence| std::mem::take(&mut sequence.cuts));
        for cut in cuts.unwrap_or_default() {
            self.relocate(session, cut.start, cut.end);
        }
    }

    /// Cuts tokens out; the KV of what follows is computed again when next used.
    fn cut_exactly(&mut self, session: &str, start: usize, end: usize) {
        // Where a window layer dropped what the cut history ends with, all of it leaves and is restored when next
        // used.
        let uncovered = self.sequences.get(session).is_some_and(|sequence| {
            sequence.state.is_resident() && start < sequence.computed && !sequence.table.covers(start)
        });
        if uncovered {
            self.evict(&Arc::from(session), "cut");
        }
        self.take_out(session, start..end, start);
        self.note_resident(session);
    }

    /// Cuts tokens out of a history whose KV is on the device and moves what follows, where there is room for pages that others
    /// share; whether it did.
    fn relocate(&mut self, session: &str, start: usize, end: usize) -> bool {
        let begun = self.clock.monotonic();
        let tokens = self.sequences.get(session).map_or(0, |sequence| sequence.computed);
        let moved = self.move_pages(session, start, end, tokens);
        if let Err(error) = &moved {
            // What was moved half is cut off with all that follows.
            self.notice_loss(error);
            tracing::warn!(session, %error, "KV not moved: it is computed again");
        }
        if !matches!(moved, Ok(true)) {
            self.cut_exactly(session, start, end);
            return false;
        }
        self.take_out(session, start..end, tokens - (end - start));
        self.prefixes.truncate(session, start);
        self.note_resident(session);
        let ms = self.since(begun) * 1e3;
        let relocation =
            Relocation { start: start as u64, cut: (end - start) as u64, tokens: (tokens - end) as u64, ms };
        self.observer.relocated(session, &relocation);
        true
    }

    /// Takes tokens out of a history of which no more than `left` then have KV.
    fn take_out(&mut self, session: &str, cut: Range<usize>, left: usize) {
        let Some(sequence) = self.sequences.get_mut(session) else { return };
        sequence.saved_chunks = sequence.saved_chunks.min(cut.start / CHUNK_TOKENS);
        sequence.save_asked = sequence.save_asked.min(sequence.saved_chunks);
        sequence.tokens.drain(cut);
        (sequence.computed, sequence.known) = (sequence.computed.min(left), sequence.known.min(left));
        let keep = sequence.computed;
        sequence.table.truncate(&mut self.pool, keep);
    }

    /// Moves tokens `end..tokens` to `start`; `false`: there are none, or no room.
    fn move_pages(&mut self, session: &str, start: usize, end: usize, tokens: usize) -> Result<bool, Error> {
        let need = Need::Write { written: start, tokens };
        if end >= tokens || !self.reserve(&Arc::from(session), need)? {
            return Ok(false);
        }
        let Some(sequence) = self.sequences.get(session) else { return Ok(false) };
        let span = Move { from: end, to: start, tokens: tokens - end };
        for layer in 0..self.engine.config().layers {
            self.engine.relocate(&sequence.table.layer(layer), span)?;
        }
        self.engine.finish()?;
        Ok(true)
    }
}

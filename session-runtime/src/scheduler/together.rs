//! Restores under way beside each other: what they have left between them of compute and of the tiers.

use kernels::backend::Backend;

use super::worker::{Phase, Purpose, Worker};
use crate::kv::chunk::Chunk;
use crate::restore::cost::ComputeCost;
use crate::restore::plan::Work;

/// Predicted seconds of the lowest `layers` layers over a chunk.
pub(super) fn chunk_seconds(compute: &ComputeCost, chunk: &Chunk, layers: usize) -> f64 {
    compute.seconds(chunk.tokens, layers, chunk.start as f64 + chunk.tokens as f64 / 2.0)
}

impl<B: Backend> Worker<B> {
    /// What restores have left that are on the list of jobs: all but the one that asks, which has been taken off it or not
    /// begun. Those ahead of a return stand still while another is under way.
    pub(super) fn others_left(&self) -> Work {
        let mut sum = Work::default();
        for job in &self.jobs {
            if let (Phase::Restoring(run), Purpose::Message { .. } | Purpose::Restore { .. }) =
                (&job.phase, &job.purpose)
            {
                let left = run.progress.left(&|index, layers| {
                    chunk_seconds(&self.costs.compute, &run.chunks[index], layers as usize)
                });
                sum.compute += left.compute;
                sum.load = sum.load.and(&left.load);
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests;

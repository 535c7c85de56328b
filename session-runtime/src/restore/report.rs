//! What a restore did (invariant I10). The same report reaches the guest, the API, the journal and
//! the metrics.

use serde::{Deserialize, Serialize};

use super::source::Source;

/// Cells that were not used, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Refusal {
    /// Such as `absent`, `corrupt`, `truncated`, `pack_missing`, `contract: weights_digest`, `slow`.
    pub reason: String,
    /// Number of cells.
    pub cells: u64,
}

/// What a restore loaded from one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct TierLoads {
    /// Tokens with every layer loaded and this tier the lowest that one of their cells came from.
    pub tokens: u64,
    /// Cells (chunk, layer).
    pub cells: u64,
    /// Bytes moved, cells included that were recomputed in the end.
    pub bytes: u64,
}

/// What one restore did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RestoreReport {
    /// Tokens whose KV is on the device afterwards: what the next turn reuses.
    pub tokens: u64,
    /// Tokens that were still on the device.
    pub tokens_resident: u64,
    /// Tokens with every layer loaded.
    pub tokens_loaded: u64,
    /// Tokens with some layers loaded and some recomputed.
    pub tokens_mixed: u64,
    /// Tokens with every layer recomputed.
    pub tokens_recomputed: u64,
    /// Cells (chunk, layer) loaded.
    pub cells_loaded: u64,
    /// Cells recomputed.
    pub cells_recomputed: u64,
    /// Cells of window layers that nothing reads any more: neither loaded nor recomputed.
    #[serde(default)]
    pub cells_outside: u64,
    /// Bytes loaded.
    pub bytes_loaded: u64,
    /// What of it came from host memory.
    #[serde(default)]
    pub from_host: TierLoads,
    /// What of it came from disk.
    #[serde(default)]
    pub from_disk: TierLoads,
    /// Cells that could not be used.
    pub refused: Vec<Refusal>,
    /// The plan: per chunk, how many of the lowest layers were to be recomputed.
    pub plan: Vec<u32>,
    /// Layers of the model.
    pub layers: u32,
    /// Whether the cut was forced by a flag.
    pub forced: bool,
    /// Predicted milliseconds of the plan, until other restores that were under way are done too.
    pub predicted_ms: f64,
    /// Predicted milliseconds of recomputing everything, after what other restores under way had to compute.
    pub predicted_recompute_ms: f64,
    /// Milliseconds taken, from the plan to the last cell.
    pub ms: f64,
    /// Of these, milliseconds of compute.
    pub compute_ms: f64,
}

impl RestoreReport {
    /// What came from a tier.
    pub(super) fn of_tier(&mut self, source: Source) -> &mut TierLoads {
        match source {
            Source::Host => &mut self.from_host,
            Source::Disk => &mut self.from_disk,
        }
    }

    /// Counts cells under a reason.
    pub fn refuse(&mut self, reason: &str, cells: u64) {
        if cells == 0 {
            return;
        }
        match self.refused.iter_mut().find(|refusal| refusal.reason == reason) {
            Some(refusal) => refusal.cells += cells,
            None => self.refused.push(Refusal { reason: reason.to_owned(), cells }),
        }
    }

    /// Rounds times to microseconds, so that the report reads back from text as it was written.
    pub fn round_times(&mut self) {
        let times =
            [&mut self.predicted_ms, &mut self.predicted_recompute_ms, &mut self.ms, &mut self.compute_ms];
        for time in times {
            *time = (*time * 1e3).round() / 1e3;
        }
    }

    /// Cells that could not be used.
    pub fn cells_refused(&self) -> u64 {
        self.refused.iter().map(|refusal| refusal.cells).sum()
    }

    /// One line for people: `512 tokens in 84 ms: 256 from host, 128 from disk, 64 mixed, 64 recomputed`.
    pub fn summary(&self) -> String {
        let mut text = format!("{} tokens in {:.0} ms:", self.tokens, self.ms);
        let (host, disk) = (self.from_host.tokens, self.from_disk.tokens);
        for (count, word) in [
            (self.tokens_resident, "still resident"),
            (host, "from host"),
            (disk, "from disk"),
            // Reports of earlier versions do not tell the tiers apart.
            (self.tokens_loaded - (host + disk).min(self.tokens_loaded), "loaded"),
            (self.tokens_mixed, "mixed"),
            (self.tokens_recomputed, "recomputed"),
        ] {
            if count > 0 {
                text.push_str(&format!(" {count} {word},"));
            }
        }
        text.pop();
        for refusal in &self.refused {
            text.push_str(&format!("; {} cells refused ({})", refusal.cells, refusal.reason));
        }
        text
    }

    /// The plan and its predicted and real time, for people; a letter for each chunk.
    pub fn explain(&self) -> String {
        let letter = |cut: &u32| match *cut {
            0 => 'L',
            cut if cut == self.layers => 'R',
            _ => 'm',
        };
        let plan: String = self.plan.iter().map(letter).collect();
        format!(
            "plan {plan} (L load, R recompute, m by layer); predicted {:.0} ms, took {:.0} ms; recompute alone predicted {:.0} ms",
            self.predicted_ms, self.ms, self.predicted_recompute_ms
        )
    }
}

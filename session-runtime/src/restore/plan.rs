//! The restore plan: for each chunk c a cut m(c). Layers below m(c) are recomputed, layers from m(c)
//! up are loaded; 0 is pure load, the number of layers pure recompute.
//!
//! Compute advances from the first chunk, loads walk from the last one, until they meet (the two
//! pointers of CacheFlow, arXiv 2604.25080, section 4, over chunks and, in the chunk where they meet,
//! over layers). The plan is where they are predicted to meet.
//!
//! Layers with a window keep the last tokens only, so cells of early chunks are not needed in them, unless a later
//! chunk is recomputed: then the tokens just before it are. Where that can happen, cuts never rise with the chunk:
//! whatever recomputing a chunk reads was recomputed before it.

use std::fmt;
use std::str::FromStr;

use super::cost::{ComputeCost, LoadCost};

/// The least part of the time that doing both at once must save. What a mix saves is a prediction, and compute and loads
/// get in each other's way: where one of them is far slower, the other alone is the better plan.
pub const LEAST_GAIN: f64 = 0.15;

/// How a restore chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestoreMode {
    /// By measured costs.
    #[default]
    Planned,
    /// Load everything that can be loaded.
    Load,
    /// Recompute everything.
    Recompute,
    /// The same cut for every chunk.
    Cut(u32),
    /// Even chunks pure recompute, odd chunks pure load: a mixed plan whatever the costs.
    Alternate,
}

impl FromStr for RestoreMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "planned" => Ok(Self::Planned),
            "load" => Ok(Self::Load),
            "recompute" => Ok(Self::Recompute),
            "alternate" => Ok(Self::Alternate),
            _ => match text.strip_prefix("cut:").map(str::parse) {
                Some(Ok(cut)) => Ok(Self::Cut(cut)),
                _ => Err(format!(
                    "restore mode '{text}' is unknown: use planned, load, recompute, alternate or cut:LAYERS"
                )),
            },
        }
    }
}

impl fmt::Display for RestoreMode {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Planned => out.write_str("planned"),
            Self::Load => out.write_str("load"),
            Self::Recompute => out.write_str("recompute"),
            Self::Alternate => out.write_str("alternate"),
            Self::Cut(cut) => write!(out, "cut:{cut}"),
        }
    }
}

/// What the planner knows of one chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkFacts {
    /// Index of its first token.
    pub start: usize,
    /// Its tokens.
    pub tokens: usize,
    /// Per layer, whether a usable cell is on the tier.
    pub saved: Vec<bool>,
    /// Per layer, whether the cell must be on the device at the end.
    pub needed: Vec<bool>,
}

impl ChunkFacts {
    /// The lowest cut the saved cells allow: every layer from it up is saved, or not needed.
    pub fn lowest_cut(&self) -> u32 {
        let cells = self.saved.iter().zip(&self.needed).rev();
        let loadable = cells.take_while(|(saved, needed)| **saved || !**needed).count();
        (self.saved.len() - loadable) as u32
    }

    /// Cells that are loaded with this cut.
    pub fn loads(&self, cut: u32) -> usize {
        self.needed.iter().skip(cut as usize).filter(|needed| **needed).count()
    }

    /// Whether every needed cell is saved.
    pub fn is_saved(&self) -> bool {
        self.lowest_cut() == 0
    }
}

/// A cut per chunk, with what it is predicted to cost.
#[derive(Clone, Debug, PartialEq)]
pub struct RestorePlan {
    /// m(c) per chunk.
    pub cuts: Vec<u32>,
    /// Predicted seconds with compute and load overlapped.
    pub seconds: f64,
    /// Predicted seconds of recomputing everything.
    pub recompute_seconds: f64,
}

/// Plans a restore of `chunks` in a model of `layers` layers whose cells have `token_bytes` bytes a token.
pub fn plan(
    mode: RestoreMode,
    chunks: &[ChunkFacts],
    layers: u32,
    token_bytes: usize,
    compute: &ComputeCost,
    load: &LoadCost,
) -> RestorePlan {
    let compute_seconds = |chunk: &ChunkFacts, cut: u32| {
        compute.seconds(chunk.tokens, cut as usize, chunk.start as f64 + chunk.tokens as f64 / 2.0)
    };
    let load_seconds = |chunk: &ChunkFacts, cut: u32| {
        let cells = chunk.loads(cut);
        load.seconds(cells, cells * chunk.tokens * token_bytes)
    };
    let total = |cost: &dyn Fn(&ChunkFacts, u32) -> f64, cuts: &[u32]| -> f64 {
        chunks.iter().zip(cuts).map(|(chunk, cut)| cost(chunk, *cut)).sum()
    };
    let both = |cuts: &[u32]| total(&compute_seconds, cuts).max(total(&load_seconds, cuts));
    let mut cuts = match mode {
        RestoreMode::Load => chunks.iter().map(ChunkFacts::lowest_cut).collect(),
        RestoreMode::Recompute => vec![layers; chunks.len()],
        RestoreMode::Cut(cut) => chunks.iter().map(|chunk| cut.min(layers).max(chunk.lowest_cut())).collect(),
        RestoreMode::Alternate => chunks
            .iter()
            .enumerate()
            .map(|(index, chunk)| if index % 2 == 0 { layers } else { chunk.lowest_cut() })
            .collect(),
        RestoreMode::Planned => {
            let pure = [chunks.iter().map(ChunkFacts::lowest_cut).collect(), vec![layers; chunks.len()]];
            let [load, recompute] = pure;
            let better = if both(&load) <= both(&recompute) { load } else { recompute };
            let mixed = meeting_point(chunks, layers, &compute_seconds, &load_seconds);
            if both(&mixed) <= both(&better) * (1.0 - LEAST_GAIN) { mixed } else { better }
        }
    };
    if chunks.iter().any(|chunk| chunk.needed.contains(&false)) {
        for index in (1..cuts.len()).rev() {
            cuts[index - 1] = cuts[index - 1].max(cuts[index]);
        }
    }
    let seconds = both(&cuts);
    let recompute_seconds = total(&compute_seconds, &vec![layers; chunks.len()]);
    RestorePlan { cuts, seconds, recompute_seconds }
}

/// Walks the front (recompute) forward one layer of one chunk at a time while that lowers the larger of
/// the two totals, starting from everything loaded that can be.
fn meeting_point(
    chunks: &[ChunkFacts],
    layers: u32,
    compute_seconds: &dyn Fn(&ChunkFacts, u32) -> f64,
    load_seconds: &dyn Fn(&ChunkFacts, u32) -> f64,
) -> Vec<u32> {
    let mut cuts: Vec<u32> = chunks.iter().map(ChunkFacts::lowest_cut).collect();
    let mut compute: f64 = chunks.iter().zip(&cuts).map(|(chunk, cut)| compute_seconds(chunk, *cut)).sum();
    let mut load: f64 = chunks.iter().zip(&cuts).map(|(chunk, cut)| load_seconds(chunk, *cut)).sum();
    for (chunk, cut) in chunks.iter().zip(&mut cuts) {
        while *cut < layers {
            let next_compute = compute - compute_seconds(chunk, *cut) + compute_seconds(chunk, *cut + 1);
            let next_load = load - load_seconds(chunk, *cut) + load_seconds(chunk, *cut + 1);
            if next_compute.max(next_load) >= compute.max(load) {
                return cuts;
            }
            (compute, load) = (next_compute, next_load);
            *cut += 1;
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: u32 = 24;
    const TOKEN_BYTES: usize = 512;

    fn facts(count: usize) -> Vec<ChunkFacts> {
        (0..count)
            .map(|index| {
                let all = vec![true; LAYERS as usize];
                ChunkFacts { start: index * 64, tokens: 64, saved: all.clone(), needed: all }
            })
            .collect()
    }

    /// Costs at which computing a (token, layer) takes `compute` seconds and loading one `load` seconds.
    fn costs(compute: f64, load: f64) -> (ComputeCost, LoadCost) {
        let (mut computing, mut loading) = (ComputeCost::default(), LoadCost::default());
        computing.observe(64, 1, 32.0, 64.0 * compute);
        loading.observe(64 * TOKEN_BYTES, 64.0 * load);
        (computing, loading)
    }

    #[test]
    fn i4_the_plan_is_never_worse_than_the_better_pure_plan() {
        for exponent in -30..=30 {
            let (compute, load) = costs(1e-5, 1e-5 * 10_f64.powf(f64::from(exponent) / 10.0));
            let chunks = facts(60);
            let seconds = |mode| plan(mode, &chunks, LAYERS, TOKEN_BYTES, &compute, &load).seconds;
            let best = seconds(RestoreMode::Load).min(seconds(RestoreMode::Recompute));
            assert!(seconds(RestoreMode::Planned) <= best * 1.000_001, "at 10^({exponent}/10)");
        }
    }

    #[test]
    fn a_mix_that_saves_little_is_not_made() {
        let chunks = facts(60);
        for (load_over_compute, mixed) in
            [(0.01, false), (0.1, false), (0.3, true), (3.0, true), (10.0, false)]
        {
            let (compute, load) = costs(1e-5, 1e-5 * load_over_compute);
            let cuts = plan(RestoreMode::Planned, &chunks, LAYERS, TOKEN_BYTES, &compute, &load).cuts;
            let pure = if load_over_compute < 1.0 { 0 } else { LAYERS };
            assert_eq!(cuts.iter().any(|cut| *cut != pure), mixed, "{load_over_compute}: {cuts:?}");
        }
    }

    #[test]
    fn equal_costs_meet_in_the_middle_at_the_overlap_bound() {
        let (compute, load) = costs(1e-5, 1e-5);
        let chunks = facts(60);
        let planned = plan(RestoreMode::Planned, &chunks, LAYERS, TOKEN_BYTES, &compute, &load);
        let all = 60.0 * 64.0 * f64::from(LAYERS) * 1e-5;
        let bound = all * all / (all + all);
        assert!((planned.seconds / bound - 1.0).abs() < 0.01, "{} against {bound}", planned.seconds);
        assert!(planned.cuts[..29].iter().all(|cut| *cut == LAYERS));
        assert!(planned.cuts[31..].iter().all(|cut| *cut == 0));
    }

    #[test]
    fn layers_that_were_not_saved_are_recomputed_in_every_mode() {
        let (compute, load) = costs(1e-3, 1e-9);
        let mut chunks = facts(3);
        chunks[1].saved[5] = false;
        for mode in [RestoreMode::Planned, RestoreMode::Load, RestoreMode::Cut(2), RestoreMode::Alternate] {
            let planned = plan(mode, &chunks, LAYERS, TOKEN_BYTES, &compute, &load);
            assert!(planned.cuts[1] >= 6, "{mode}: {:?}", planned.cuts);
        }
    }

    #[test]
    fn cells_outside_a_window_are_not_loaded_and_cuts_do_not_rise() {
        let (compute, load) = costs(1e-5, 1e-5);
        let mut chunks = facts(6);
        for chunk in &mut chunks[..4] {
            for layer in (0..LAYERS as usize).filter(|layer| layer % 6 != 5) {
                (chunk.needed[layer], chunk.saved[layer]) = (false, false);
            }
        }
        let planned =
            |mode, chunks: &[ChunkFacts]| plan(mode, chunks, LAYERS, TOKEN_BYTES, &compute, &load).cuts;
        assert_eq!(planned(RestoreMode::Load, &chunks), [0; 6]);
        assert_eq!(chunks[0].loads(0), 4, "one layer of six attends to all tokens");
        for mode in [RestoreMode::Planned, RestoreMode::Alternate, RestoreMode::Cut(7)] {
            let cuts = planned(mode, &chunks);
            assert!(cuts.is_sorted_by(|before, after| before >= after), "{mode}: {cuts:?}");
        }
        // A needed cell that is gone can only be recomputed from the first chunk on.
        chunks[5].saved[3] = false;
        assert!(planned(RestoreMode::Load, &chunks).iter().all(|cut| *cut >= 4));
    }

    #[test]
    fn modes_are_read_as_they_are_written() {
        for mode in [
            RestoreMode::Planned,
            RestoreMode::Load,
            RestoreMode::Recompute,
            RestoreMode::Cut(7),
            RestoreMode::Alternate,
        ] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("half".parse::<RestoreMode>().is_err());
    }
}

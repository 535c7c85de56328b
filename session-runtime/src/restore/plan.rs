//! The restore plan: for each chunk c a cut m(c). Layers below m(c) are recomputed, layers from m(c)
//! up are loaded; 0 is pure load, the number of layers pure recompute.
//!
//! Compute advances from the first chunk, loads walk from the last one, until they meet (the two
//! pointers of CacheFlow, arXiv 2604.25080, section 4, over chunks and, in the chunk where they meet,
//! over layers). The plan is where they are predicted to meet. The tiers bring their cells side by side, so that a plan takes
//! as long as the slowest of compute, host and disk; chunks that only a fast tier has to bring are left to it.
//!
//! Restores under way share compute and tiers. A plan counts what the others have left and makes the last of all end soonest:
//! where they keep compute busy it loads, and where they keep the disk busy it recomputes.
//!
//! Layers with a window keep the last tokens only, so cells of early chunks are not needed in them, unless a later
//! chunk is recomputed: then the tokens just before it are. Where that can happen, cuts never rise with the chunk:
//! whatever recomputing a chunk reads was recomputed before it.

use std::fmt;
use std::str::FromStr;

use super::cost::{ComputeCost, LoadCost};
use super::source::{Amount, PerSource, Source};

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
    /// Per layer, the best tier that has a usable cell.
    pub saved: Vec<Option<Source>>,
    /// Per layer, whether the cell must be on the device at the end.
    pub needed: Vec<bool>,
    /// Bytes of one of its cells, as the tiers keep them.
    pub cell_bytes: usize,
}

impl ChunkFacts {
    /// The lowest cut the saved cells allow: every layer from it up is saved, or not needed.
    pub fn lowest_cut(&self) -> u32 {
        let cells = self.saved.iter().zip(&self.needed).rev();
        let loadable = cells.take_while(|(saved, needed)| saved.is_some() || !**needed).count();
        (self.saved.len() - loadable) as u32
    }

    /// The tier that the cell of a layer comes from; `None` without one, or where the cell is not needed.
    pub fn source(&self, layer: usize) -> Option<Source> {
        if self.needed[layer] { self.saved[layer] } else { None }
    }

    /// Cells that are loaded with this cut.
    pub fn loads(&self, cut: u32) -> PerSource<Amount> {
        let mut loads = PerSource::default();
        for source in (cut as usize..self.saved.len()).filter_map(|layer| self.source(layer)) {
            loads.add(source, 1, self.cell_bytes);
        }
        loads
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
    /// Predicted seconds with compute and load overlapped, until this and the others are done.
    pub seconds: f64,
    /// Predicted seconds of recomputing everything, after what the others compute.
    pub recompute_seconds: f64,
}

/// What is asked of compute, in seconds, and of each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Seconds of compute.
    pub compute: f64,
    /// Cells to load.
    pub load: PerSource<Amount>,
}

/// What planning goes by.
struct Pricing<'a> {
    chunks: &'a [ChunkFacts],
    layers: u32,
    compute: &'a ComputeCost,
    load: &'a PerSource<LoadCost>,
    others: &'a Work,
}

impl Pricing<'_> {
    fn compute_seconds(&self, chunk: &ChunkFacts, cut: u32) -> f64 {
        let context = chunk.start as f64 + chunk.tokens as f64 / 2.0;
        self.compute.seconds(chunk.tokens, cut as usize, context)
    }

    fn work(&self, cuts: &[u32]) -> Work {
        let mut work = Work { compute: 0.0, load: PerSource::default() };
        for (chunk, cut) in self.chunks.iter().zip(cuts) {
            work.compute += self.compute_seconds(chunk, *cut);
            let loads = chunk.loads(*cut);
            for source in Source::ALL {
                work.load.add(source, loads[source].cells, chunk.cell_bytes);
            }
        }
        work
    }

    /// Seconds with everything overlapped, until all is done that the others have left too.
    fn seconds(&self, work: &Work) -> f64 {
        let compute = self.others.compute + work.compute;
        compute.max(self.load.seconds(&work.load.and(&self.others.load)))
    }

    fn lowest(&self) -> Vec<u32> {
        self.chunks.iter().map(ChunkFacts::lowest_cut).collect()
    }

    /// Walks the front (recompute) forward, chunk by chunk, each to the cut at which everything is predicted to end
    /// soonest, starting from everything loaded that can be. It stops in the chunk where compute and the disk meet.
    fn meeting_point(&self) -> Vec<u32> {
        let mut cuts = self.lowest();
        let mut work = self.work(&cuts);
        for (chunk, cut) in self.chunks.iter().zip(&mut cuts) {
            let cell_bytes = chunk.cell_bytes;
            let (lowest, compute) = (*cut, work.compute - self.compute_seconds(chunk, *cut));
            let mut best = (self.seconds(&work), work);
            for next in lowest + 1..=self.layers {
                if let Some(source) = chunk.source(next as usize - 1) {
                    work.load.take(source, 1, cell_bytes);
                }
                work.compute = compute + self.compute_seconds(chunk, next);
                let seconds = self.seconds(&work);
                if seconds < best.0 {
                    best = (seconds, work);
                    *cut = next;
                }
            }
            work = best.1;
            if *cut < self.layers && chunk.loads(*cut).disk.cells > 0 {
                return cuts;
            }
        }
        cuts
    }
}

/// Plans a restore of `chunks` in a model of `layers` layers, beside `others` that have so much left.
pub fn plan(
    mode: RestoreMode,
    chunks: &[ChunkFacts],
    layers: u32,
    (compute, load): (&ComputeCost, &PerSource<LoadCost>),
    others: &Work,
) -> RestorePlan {
    let pricing = Pricing { chunks, layers, compute, load, others };
    let seconds = |cuts: &[u32]| pricing.seconds(&pricing.work(cuts));
    let mut cuts = match mode {
        RestoreMode::Load => pricing.lowest(),
        RestoreMode::Recompute => vec![layers; chunks.len()],
        RestoreMode::Cut(cut) => chunks.iter().map(|chunk| cut.min(layers).max(chunk.lowest_cut())).collect(),
        RestoreMode::Alternate => chunks
            .iter()
            .enumerate()
            .map(|(index, chunk)| if index % 2 == 0 { layers } else { chunk.lowest_cut() })
            .collect(),
        RestoreMode::Planned => {
            let (load, recompute) = (pricing.lowest(), vec![layers; chunks.len()]);
            let better = if seconds(&load) <= seconds(&recompute) { load } else { recompute };
            let mixed = pricing.meeting_point();
            // What the others take anyway is nobody's gain.
            let apart = pricing.seconds(&Work::default());
            let gains = seconds(&mixed) - apart <= (seconds(&better) - apart) * (1.0 - LEAST_GAIN);
            if gains { mixed } else { better }
        }
    };
    if chunks.iter().any(|chunk| chunk.needed.contains(&false)) {
        for index in (1..cuts.len()).rev() {
            cuts[index - 1] = cuts[index - 1].max(cuts[index]);
        }
    }
    let recompute_seconds = others.compute + pricing.work(&vec![layers; chunks.len()]).compute;
    RestorePlan { seconds: seconds(&cuts), cuts, recompute_seconds }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LAYERS: u32 = 24;
    const TOKEN_BYTES: usize = 512;

    fn facts(count: usize) -> Vec<ChunkFacts> {
        (0..count)
            .map(|index| {
                let (saved, needed) =
                    (vec![Some(Source::Disk); LAYERS as usize], vec![true; LAYERS as usize]);
                ChunkFacts { start: index * 64, tokens: 64, saved, needed, cell_bytes: 64 * TOKEN_BYTES }
            })
            .collect()
    }

    /// Costs at which computing a (token, layer) takes `compute` seconds and loading one from disk `load` seconds, from
    /// host a hundredth of that.
    fn costs(compute: f64, load: f64) -> (ComputeCost, PerSource<LoadCost>) {
        let mut computing = ComputeCost::default();
        computing.observe(64, 1, 32.0, 64.0 * compute);
        let loading = |load: f64| {
            let mut cost = LoadCost::default();
            cost.observe(64 * TOKEN_BYTES, 64.0 * load);
            cost
        };
        (computing, PerSource { host: loading(load / 100.0), disk: loading(load) })
    }

    /// The tier that brings every cell of a chunk.
    fn held_by(chunk: &mut ChunkFacts, source: Source) {
        chunk.saved.fill(Some(source));
    }

    #[test]
    fn i4_the_plan_is_never_worse_than_the_better_pure_plan() {
        for exponent in -30..=30 {
            let (compute, load) = costs(1e-5, 1e-5 * 10_f64.powf(f64::from(exponent) / 10.0));
            let chunks = facts(60);
            let seconds = |mode| plan(mode, &chunks, LAYERS, (&compute, &load), &Work::default()).seconds;
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
            let cuts = plan(RestoreMode::Planned, &chunks, LAYERS, (&compute, &load), &Work::default()).cuts;
            let pure = if load_over_compute < 1.0 { 0 } else { LAYERS };
            assert_eq!(cuts.iter().any(|cut| *cut != pure), mixed, "{load_over_compute}: {cuts:?}");
        }
    }

    /// What a plan asks for.
    fn work(chunks: &[ChunkFacts], cuts: &[u32], costs: &(ComputeCost, PerSource<LoadCost>)) -> Work {
        let (compute, load) = (&costs.0, &costs.1);
        Pricing { chunks, layers: LAYERS, compute, load, others: &Work::default() }.work(cuts)
    }

    #[test]
    fn beside_one_that_computes_it_loads_and_beside_one_that_loads_it_recomputes() {
        let costs = costs(1e-5, 1e-5);
        let chunks = facts(20);
        let planned =
            |others: &Work| plan(RestoreMode::Planned, &chunks, LAYERS, (&costs.0, &costs.1), others);
        let alone = planned(&Work::default());
        let [load, recompute] = [0, LAYERS].map(|cut| work(&chunks, &[cut; 20], &costs));
        let beside = planned(&recompute);
        assert_eq!(beside.cuts, [0; 20]);
        assert!(
            (beside.seconds / recompute.compute - 1.0).abs() < 1e-9,
            "nothing is added to what the other takes"
        );
        assert_eq!(planned(&load).cuts, [LAYERS; 20]);
        // Beside one that does both it does both, and the two take twice the time of one.
        let both = planned(&work(&chunks, &alone.cuts, &costs));
        assert!((both.seconds / alone.seconds - 2.0).abs() < 0.1, "{} {}", both.seconds, alone.seconds);
        assert!(both.cuts.contains(&0) && both.cuts.contains(&LAYERS), "{:?}", both.cuts);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Restores planned beside what the earlier ones have left, against the same restores one after another: what each
        /// adds is no more than it takes alone, but for the gain that a mix has to have.
        #[test]
        fn planned_together_is_no_worse_than_one_after_another(
            sizes in prop::collection::vec((1..30_usize, 0..3_usize), 1..8),
            load_over_compute in 0.05..20.0_f64,
        ) {
            let costs = costs(1e-5, 1e-5 * load_over_compute);
            let seconds = |work: &Work| work.compute.max(costs.1.seconds(&work.load));
            let (mut left, mut apart) = (Work::default(), 0.0);
            for (count, saved) in sizes {
                let mut chunks = facts(count);
                for chunk in &mut chunks {
                    match saved {
                        0 => chunk.saved.fill(None),
                        1 => held_by(chunk, Source::Host),
                        _ => {}
                    }
                }
                let planned = |others: &Work| plan(RestoreMode::Planned, &chunks, LAYERS, (&costs.0, &costs.1), others);
                let (alone, beside) = (planned(&Work::default()), planned(&left));
                apart += alone.seconds;
                let before = seconds(&left);
                let own = work(&chunks, &beside.cuts, &costs);
                left = Work { compute: left.compute + own.compute, load: left.load.and(&own.load) };
                prop_assert!((seconds(&left) - beside.seconds).abs() <= beside.seconds * 1e-9);
                let added = beside.seconds - before;
                prop_assert!(added <= alone.seconds / (1.0 - LEAST_GAIN) * 1.000_001, "{added} {}", alone.seconds);
            }
            prop_assert!(seconds(&left) <= apart / (1.0 - LEAST_GAIN) * 1.000_001);
        }
    }

    #[test]
    fn equal_costs_meet_in_the_middle_at_the_overlap_bound() {
        let (compute, load) = costs(1e-5, 1e-5);
        let chunks = facts(60);
        let planned = plan(RestoreMode::Planned, &chunks, LAYERS, (&compute, &load), &Work::default());
        let all = 60.0 * 64.0 * f64::from(LAYERS) * 1e-5;
        let bound = all * all / (all + all);
        assert!((planned.seconds / bound - 1.0).abs() < 0.01, "{} against {bound}", planned.seconds);
        assert!(planned.cuts[..29].iter().all(|cut| *cut == LAYERS));
        assert!(planned.cuts[31..].iter().all(|cut| *cut == 0));
    }

    #[test]
    fn chunks_in_host_memory_are_loaded_and_only_those_on_disk_are_weighed() {
        // The disk takes as long as compute. Of sixty chunks it has every third.
        let (compute, load) = costs(1e-5, 1e-5);
        let mut chunks = facts(60);
        for (_, chunk) in chunks.iter_mut().enumerate().filter(|(index, _)| index % 3 != 0) {
            held_by(chunk, Source::Host);
        }
        let planned = plan(RestoreMode::Planned, &chunks, LAYERS, (&compute, &load), &Work::default());
        for (index, cut) in planned.cuts.iter().enumerate() {
            let in_host = index % 3 != 0;
            assert!(!in_host || *cut == 0, "{index}: {:?}", planned.cuts);
            // Ten of the disk's twenty are computed while it brings the others.
            assert!(in_host || !(3..27).contains(&index) || *cut == LAYERS, "{:?}", planned.cuts);
            assert!(in_host || !(33..).contains(&index) || *cut == 0, "{:?}", planned.cuts);
        }
        let half = 10.0 * 64.0 * f64::from(LAYERS) * 1e-5;
        assert!((planned.seconds / half - 1.0).abs() < 0.02, "{} against {half}", planned.seconds);
    }

    #[test]
    fn the_cost_of_each_tier_is_its_own() {
        let (compute, load) = costs(1.0, 1e-5);
        let mut chunks = facts(4);
        let seconds = |chunks: &[ChunkFacts]| {
            plan(RestoreMode::Load, chunks, LAYERS, (&compute, &load), &Work::default()).seconds
        };
        let chunk = 64.0 * f64::from(LAYERS) * 1e-5;
        for (in_host, expected) in [(0, 4.0 * chunk), (1, 3.0 * chunk), (4, 4.0 * chunk / 100.0)] {
            chunks.iter_mut().take(in_host).for_each(|chunk| held_by(chunk, Source::Host));
            let predicted = seconds(&chunks);
            assert!((predicted / expected - 1.0).abs() < 0.01, "{in_host}: {predicted} for {expected}");
        }
    }

    #[test]
    fn layers_that_were_not_saved_are_recomputed_in_every_mode() {
        let (compute, load) = costs(1e-3, 1e-9);
        let mut chunks = facts(3);
        chunks[1].saved[5] = None;
        for mode in [RestoreMode::Planned, RestoreMode::Load, RestoreMode::Cut(2), RestoreMode::Alternate] {
            let planned = plan(mode, &chunks, LAYERS, (&compute, &load), &Work::default());
            assert!(planned.cuts[1] >= 6, "{mode}: {:?}", planned.cuts);
        }
    }

    #[test]
    fn cells_outside_a_window_are_not_loaded_and_cuts_do_not_rise() {
        let (compute, load) = costs(1e-5, 1e-5);
        let mut chunks = facts(6);
        for chunk in &mut chunks[..4] {
            for layer in (0..LAYERS as usize).filter(|layer| layer % 6 != 5) {
                (chunk.needed[layer], chunk.saved[layer]) = (false, None);
            }
        }
        let planned = |mode, chunks: &[ChunkFacts]| {
            plan(mode, chunks, LAYERS, (&compute, &load), &Work::default()).cuts
        };
        assert_eq!(planned(RestoreMode::Load, &chunks), [0; 6]);
        assert_eq!(chunks[0].loads(0).disk.cells, 4, "one layer of six attends to all tokens");
        for mode in [RestoreMode::Planned, RestoreMode::Alternate, RestoreMode::Cut(7)] {
            let cuts = planned(mode, &chunks);
            assert!(cuts.is_sorted_by(|before, after| before >= after), "{mode}: {cuts:?}");
        }
        // A needed cell that is gone can only be recomputed from the first chunk on.
        chunks[5].saved[3] = None;
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

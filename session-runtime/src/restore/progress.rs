//! A restore under way: what to compute and what to load next, until every cell is on the device.
//!
//! Pure state: the scheduler asks for the next action, carries it out and tells the outcome. Compute
//! walks from the first chunk, loads from the last. A cell that cannot be used raises its chunk's cut,
//! so that it is recomputed; when the tier falls behind its prediction, compute takes the next chunk
//! over (invariant I4). When compute falls behind, loads go on towards the front: where the two meet is decided on the way.
//!
//! Where window layers keep the last tokens only, the pages that recompute reads in them move with it. So compute
//! goes on from where it stands, or begins anew at the first chunk; nothing in between has what it reads.

use super::plan::{ChunkFacts, LEAST_GAIN, RestoreMode};
use super::report::RestoreReport;

/// Bytes of cells that may be under way from the tier at once, and the chunks that always may. A step of compute is not
/// interrupted: what the tier has to do meanwhile must have been asked for before.
const LOADING_BYTES: usize = 64 << 20;
const LOADING_CHUNKS: usize = 2;

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the tier for cells of `chunk`.
    Load {
        /// Index of the chunk.
        chunk: usize,
        /// The layers, lowest first.
        layers: Vec<u32>,
    },
    /// Run `layers` layers over `chunks` consecutive chunks.
    Compute {
        /// Index of the first chunk.
        chunk: usize,
        /// How many chunks.
        chunks: usize,
        /// How many of the lowest layers.
        layers: u32,
    },
    /// Nothing until a load arrives.
    Wait,
    /// Every cell is on the device.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    Unasked,
    Asked,
    Ended,
}

#[derive(Clone, Debug)]
struct ChunkProgress {
    tokens: usize,
    cut: u32,
    computed: bool,
    load: Load,
    /// Whether every needed cell is saved and the tier was not asked for any yet.
    fresh: bool,
    /// Per layer, whether the cell must be on the device at the end.
    needed: Vec<bool>,
}

impl ChunkProgress {
    /// Layers whose cells are to be loaded, lowest first.
    fn loads(&self) -> impl Iterator<Item = u32> + '_ {
        (self.cut..)
            .zip(self.needed.iter().skip(self.cut as usize))
            .filter(|(_, needed)| **needed)
            .map(|(layer, _)| layer)
    }
}

/// Predictions used to decide whether to wait or to take over, in seconds.
pub struct Outlook<'a> {
    /// Compute every layer of the chunk with this index.
    pub compute_chunk: &'a dyn Fn(usize) -> f64,
    /// Load what is still to come: cells, bytes.
    pub load: &'a dyn Fn(usize, usize) -> f64,
    /// Since the last cell arrived, or since the first was asked for.
    pub stalled: f64,
}

/// A restore under way.
#[derive(Debug)]
pub struct Progress {
    layers: u32,
    token_bytes: usize,
    forced: bool,
    chunks: Vec<ChunkProgress>,
    in_flight: usize,
    /// Whether nobody waits for it: little is asked of the tier ahead, so that others find it free.
    patient: bool,
    /// Whether some layer does not keep every token.
    windows: bool,
    /// One past the last chunk that was computed since compute last began at the first.
    frontier: usize,
    /// Counts for the report.
    pub report: RestoreReport,
}

impl Progress {
    /// Begins a restore of `chunks` by `cuts` (m(c) per chunk) in a model of `layers` layers whose cells
    /// have `token_bytes` bytes a token. `mode` other than planned is never departed from while the tier
    /// answers.
    pub fn new(
        chunks: &[ChunkFacts],
        cuts: &[u32],
        layers: u32,
        token_bytes: usize,
        mode: RestoreMode,
    ) -> Self {
        debug_assert_eq!(chunks.len(), cuts.len());
        let forced = mode != RestoreMode::Planned;
        let report = RestoreReport { plan: cuts.to_vec(), layers, forced, ..RestoreReport::default() };
        let windows = chunks.iter().any(|chunk| chunk.needed.contains(&false));
        let chunks = chunks
            .iter()
            .zip(cuts)
            .map(|(chunk, cut)| ChunkProgress {
                tokens: chunk.tokens,
                cut: *cut,
                computed: *cut == 0,
                load: if chunk.loads(*cut) == 0 { Load::Ended } else { Load::Unasked },
                fresh: chunk.is_saved(),
                needed: chunk.needed.clone(),
            })
            .collect();
        Self {
            layers,
            token_bytes,
            forced,
            chunks,
            in_flight: 0,
            patient: false,
            windows,
            frontier: 0,
            report,
        }
    }

    fn complete(&self, chunk: &ChunkProgress) -> bool {
        chunk.computed && (chunk.cut == self.layers || chunk.load == Load::Ended)
    }

    /// Whether every layer below `layers` of every chunk before `end` is on the device.
    fn ready_below(&self, end: usize, layers: u32) -> bool {
        self.chunks[..end].iter().all(|chunk| self.complete(chunk) || (chunk.computed && chunk.cut >= layers))
    }

    /// Bytes and cells still to come from the tier.
    fn to_load(&self) -> (usize, usize) {
        self.chunks.iter().filter(|chunk| chunk.load != Load::Ended).fold((0, 0), |(cells, bytes), chunk| {
            let count = chunk.loads().count();
            (cells + count, bytes + count * chunk.tokens * self.token_bytes)
        })
    }

    /// The next thing to do. At most `chunks_max` chunks are computed at once.
    pub fn next(&mut self, chunks_max: usize, outlook: &Outlook<'_>) -> Action {
        if let Some(chunk) = self.chunks.iter().rposition(|chunk| chunk.load == Load::Unasked)
            && self.may_ask()
        {
            return self.ask(chunk);
        }
        if let Some(chunk) = self.sooner_loaded(outlook) {
            (self.chunks[chunk].cut, self.chunks[chunk].computed) = (0, true);
            return self.ask(chunk);
        }
        if let Some(action) = self.planned_compute(chunks_max) {
            return action;
        }
        let Some(front) = self.chunks.iter().position(|chunk| !self.complete(chunk)) else {
            return Action::Done;
        };
        let front = self.compute_from(front);
        let overtaken = self.overtaken(front, outlook);
        for chunk in &mut self.chunks[front..front + overtaken] {
            chunk.cut = self.layers;
            chunk.computed = false;
            if chunk.load == Load::Unasked {
                chunk.load = Load::Ended;
            }
        }
        if overtaken == 0 {
            return Action::Wait;
        }
        self.report.refuse("slow", overtaken as u64 * u64::from(self.layers));
        self.frontier = self.frontier.min(front);
        let chunks = overtaken.min(chunks_max);
        Action::Compute { chunk: front, chunks, layers: self.layers }
    }

    /// Whether more may be under way.
    fn may_ask(&self) -> bool {
        let asked = self.chunks.iter().filter(|chunk| chunk.load == Load::Asked);
        let bytes: usize = asked.map(|chunk| chunk.loads().count() * chunk.tokens * self.token_bytes).sum();
        self.in_flight < LOADING_CHUNKS || (bytes < LOADING_BYTES && !self.patient)
    }

    /// Nobody waits for this restore: the tier is waited for, and asked for little at once.
    pub fn be_patient(&mut self) {
        (self.patient, self.forced) = (true, true);
        self.report.forced = false;
    }

    /// Somebody waits for it now: from here on it goes by predictions, unless its `mode` is forced.
    pub fn hurry(&mut self, mode: RestoreMode) {
        (self.patient, self.forced) = (false, mode != RestoreMode::Planned);
        self.report.forced = self.forced;
    }

    fn ask(&mut self, chunk: usize) -> Action {
        self.in_flight += 1;
        let state = &mut self.chunks[chunk];
        (state.load, state.fresh) = (Load::Asked, false);
        Action::Load { chunk, layers: state.loads().collect() }
    }

    /// The last chunk that is to be recomputed, where the tier brings it before compute gets there.
    fn sooner_loaded(&self, outlook: &Outlook<'_>) -> Option<usize> {
        if self.forced || self.windows || !self.may_ask() {
            return None;
        }
        let front = self.chunks.iter().position(|chunk| !chunk.computed)?;
        let last = self.chunks.iter().rposition(|chunk| !chunk.computed)?;
        let chunk = &self.chunks[last];
        if chunk.cut < self.layers || !chunk.fresh {
            return None;
        }
        let compute: f64 = (front..=last).map(|index| (outlook.compute_chunk)(index)).sum();
        let (cells, bytes) = self.to_load();
        let more = chunk.needed.iter().filter(|needed| **needed).count();
        let load = (outlook.load)(cells + more, bytes + more * chunk.tokens * self.token_bytes);
        (load.max(outlook.stalled) < compute).then_some(last)
    }

    /// Compute the plan asks for, whose inputs are on the device.
    fn planned_compute(&self, chunks_max: usize) -> Option<Action> {
        let chunk = self.chunks.iter().position(|chunk| !chunk.computed)?;
        let layers = self.chunks[chunk].cut;
        if !self.ready_below(chunk, layers) {
            return None;
        }
        let chunks = self.chunks[chunk..]
            .iter()
            .take(chunks_max)
            .take_while(|next| !next.computed && next.cut == layers)
            .count();
        Some(Action::Compute { chunk, chunks, layers })
    }

    /// Where compute must begin to reach chunk `chunk`, which no one computes yet.
    fn compute_from(&self, chunk: usize) -> usize {
        if !self.windows {
            return chunk;
        }
        let first = self.chunks[..chunk].iter().position(|chunk| chunk.cut != self.layers).unwrap_or(chunk);
        if self.frontier <= first + 1 { first } else { 0 }
    }

    /// Has every chunk up to `last` recomputed, from where compute can begin.
    fn demote(&mut self, last: usize) {
        let first = self.compute_from(last);
        for state in &mut self.chunks[first..=last] {
            state.cut = self.layers;
            state.computed = false;
            if state.load == Load::Unasked {
                state.load = Load::Ended;
            }
        }
        self.frontier = self.frontier.min(first);
    }

    /// How many chunks from `front` on are recomputed sooner than the tier would bring what is left: the
    /// meeting point again, with what the restore has shown of the tier so far. None where that saves little.
    fn overtaken(&self, front: usize, outlook: &Outlook<'_>) -> usize {
        if self.forced {
            return 0;
        }
        let (mut cells, mut bytes) = self.to_load();
        let waiting = (outlook.load)(cells, bytes).max(outlook.stalled);
        let (mut compute, mut computing) = (0.0, 0.0);
        let mut count = 0;
        for (index, chunk) in self.chunks.iter().enumerate().skip(front) {
            if !self.windows && (self.complete(chunk) || chunk.cut == self.layers) {
                break;
            }
            compute += (outlook.compute_chunk)(index);
            if compute >= (outlook.load)(cells, bytes).max(outlook.stalled) {
                break;
            }
            if chunk.load != Load::Ended {
                let left = chunk.loads().count();
                cells -= left;
                bytes -= left * chunk.tokens * self.token_bytes;
            }
            computing = compute;
            count += 1;
        }
        if computing.max((outlook.load)(cells, bytes)) > waiting * (1.0 - LEAST_GAIN) {
            return 0;
        }
        // Chunks that are there are computed again only to reach one that is not.
        let missing = self.chunks[front..front + count].iter().rposition(|chunk| !self.complete(chunk));
        missing.map_or(0, |last| last + 1)
    }

    /// Whether a chunk's cells are still wanted when they arrive.
    pub fn wants(&self, chunk: usize) -> bool {
        self.chunks[chunk].load == Load::Asked && self.chunks[chunk].cut < self.layers
    }

    /// Told that the tier answered for a chunk. `refused` are the layers it could not give, with reasons.
    pub fn loaded(&mut self, chunk: usize, refused: &[(u32, String)]) {
        self.in_flight -= 1;
        let wanted = self.wants(chunk);
        let state = &mut self.chunks[chunk];
        state.load = Load::Ended;
        if !wanted {
            return;
        }
        let before = state.cut;
        for (layer, reason) in refused {
            self.report.refuse(reason, 1);
            if *layer >= state.cut {
                state.cut = layer + 1;
                state.computed = false;
            }
        }
        let cells = state.loads().count();
        self.report.bytes_loaded += (cells * state.tokens * self.token_bytes) as u64;
        let reachable =
            self.chunks[..chunk].iter().all(|state| state.cut == self.layers) && self.frontier <= chunk + 1;
        if self.windows && self.chunks[chunk].cut > before && !reachable {
            self.demote(chunk);
        }
    }

    /// Told that a compute action ended after `seconds`.
    pub fn computed(&mut self, chunk: usize, chunks: usize, seconds: f64) {
        for state in &mut self.chunks[chunk..chunk + chunks] {
            state.computed = true;
        }
        self.frontier = self.frontier.max(chunk + chunks);
        self.report.compute_ms += seconds * 1e3;
    }

    /// Fills the report's counts once everything is on the device.
    pub fn finish(&mut self, resident: usize) -> RestoreReport {
        let mut report = std::mem::take(&mut self.report);
        for chunk in &self.chunks {
            let tokens = chunk.tokens as u64;
            report.cells_recomputed += u64::from(chunk.cut);
            let loaded = chunk.loads().count() as u64;
            report.cells_loaded += loaded;
            report.cells_outside += u64::from(self.layers - chunk.cut) - loaded;
            match chunk.cut {
                0 => report.tokens_loaded += tokens,
                cut if cut == self.layers => report.tokens_recomputed += tokens,
                _ => report.tokens_mixed += tokens,
            }
        }
        report.tokens_resident = resident as u64;
        report.tokens =
            report.tokens_resident + report.tokens_loaded + report.tokens_mixed + report.tokens_recomputed;
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: u32 = 4;

    fn chunks(count: usize) -> Vec<ChunkFacts> {
        let all = vec![true; LAYERS as usize];
        let facts =
            |index| ChunkFacts { start: index * 64, tokens: 64, saved: all.clone(), needed: all.clone() };
        (0..count).map(facts).collect()
    }

    /// Chunks of which only the last is in the window of layers 0 and 2.
    fn window_chunks(count: usize) -> Vec<ChunkFacts> {
        let mut chunks = chunks(count);
        for chunk in &mut chunks[..count - 1] {
            chunk.needed = vec![false, true, false, true];
        }
        chunks
    }

    fn outlook<'a>(
        compute: &'a dyn Fn(usize) -> f64,
        load: &'a dyn Fn(usize, usize) -> f64,
        stalled: f64,
    ) -> Outlook<'a> {
        Outlook { compute_chunk: compute, load, stalled }
    }

    /// Runs a restore with a tier that answers every request at once, refusing what `refuse` says.
    fn run(progress: &mut Progress, refuse: impl Fn(usize) -> Vec<(u32, String)>) -> RestoreReport {
        let (compute, load) = (|_: usize| 1.0, |_: usize, _: usize| 0.0);
        for _ in 0..1000 {
            match progress.next(2, &outlook(&compute, &load, 0.0)) {
                Action::Load { chunk, .. } => progress.loaded(chunk, &refuse(chunk)),
                Action::Compute { chunk, chunks, .. } => progress.computed(chunk, chunks, 0.5),
                Action::Wait => panic!("nothing is under way"),
                Action::Done => return progress.finish(0),
            }
        }
        panic!("the restore does not end");
    }

    #[test]
    fn i10_the_report_counts_every_cell_once() {
        for cuts in [vec![0, 0, 0], vec![4, 4, 4], vec![4, 2, 0], vec![1, 0, 3]] {
            let mut progress = Progress::new(&chunks(3), &cuts, LAYERS, 8, RestoreMode::Cut(0));
            let report = run(&mut progress, |_| Vec::new());
            assert_eq!(report.cells_loaded + report.cells_recomputed, 12, "{cuts:?}");
            assert_eq!(report.cells_recomputed, cuts.iter().map(|cut| u64::from(*cut)).sum::<u64>());
            assert_eq!(report.tokens, 192);
        }
    }

    #[test]
    fn i2_a_refused_cell_is_recomputed_with_the_layers_below_it() {
        let mut progress = Progress::new(&chunks(3), &[0, 0, 0], LAYERS, 8, RestoreMode::Load);
        let refuse = |chunk| if chunk == 1 { vec![(2, "corrupt".to_owned())] } else { Vec::new() };
        let report = run(&mut progress, refuse);
        assert_eq!((report.cells_recomputed, report.cells_loaded), (3, 9));
        assert_eq!(report.tokens_mixed, 64);
        assert_eq!(report.cells_refused(), 1);
    }

    #[test]
    fn i4_a_stuck_tier_is_taken_over_chunk_by_chunk() {
        let mut progress = Progress::new(&chunks(2), &[0, 0], LAYERS, 8, RestoreMode::Planned);
        let (compute, load) = (|_: usize| 1.0, |_: usize, _: usize| 0.1);
        let ask = |progress: &mut Progress, stalled| progress.next(4, &outlook(&compute, &load, stalled));
        assert_eq!(ask(&mut progress, 0.0), Action::Load { chunk: 1, layers: vec![0, 1, 2, 3] });
        assert_eq!(ask(&mut progress, 0.0), Action::Load { chunk: 0, layers: vec![0, 1, 2, 3] });
        assert_eq!(ask(&mut progress, 0.5), Action::Wait);
        assert_eq!(ask(&mut progress, 1.5), Action::Compute { chunk: 0, chunks: 1, layers: LAYERS });
        progress.computed(0, 1, 1.0);
        assert_eq!(ask(&mut progress, 2.5), Action::Compute { chunk: 1, chunks: 1, layers: LAYERS });
        progress.computed(1, 1, 1.0);
        assert_eq!(ask(&mut progress, 3.5), Action::Done);
        progress.loaded(1, &[]);
        let report = progress.finish(0);
        assert_eq!((report.tokens_recomputed, report.tokens_loaded), (128, 0));
    }

    /// Seconds of a planned restore of forty chunks. Computing a chunk takes `compute` and loading one `load`; the costs that
    /// the plan is made with are off by `error` each.
    fn simulated(compute: f64, load: f64, error: [f64; 2]) -> f64 {
        let (believed_compute, believed_load) = (compute * error[0], load * error[1]);
        let cell = believed_load / f64::from(LAYERS);
        let (computing, loading) =
            (|_: usize| believed_compute, |cells: usize, _: usize| cells as f64 * cell);
        let facts = chunks(40);
        let front = (40.0 * believed_load / (believed_compute + believed_load)).round() as usize;
        let cuts: Vec<u32> = (0..40).map(|index| if index < front { LAYERS } else { 0 }).collect();
        let mut progress = Progress::new(&facts, &cuts, LAYERS, 1, RestoreMode::Planned);
        let (mut now, mut free, mut arrived) = (0.0_f64, 0.0_f64, 0.0);
        let mut under_way: Vec<(f64, usize)> = Vec::new();
        for _ in 0..10_000 {
            while under_way.first().is_some_and(|(end, _)| *end <= now) {
                let (end, chunk) = under_way.remove(0);
                arrived = end;
                progress.loaded(chunk, &[]);
            }
            match progress.next(4, &outlook(&computing, &loading, now - arrived)) {
                Action::Load { chunk, .. } => {
                    free = free.max(now) + load;
                    under_way.push((free, chunk));
                }
                Action::Compute { chunk, chunks, .. } => {
                    now += compute * chunks as f64;
                    progress.computed(chunk, chunks, compute);
                }
                Action::Wait => now = under_way[0].0,
                Action::Done => return now,
            }
        }
        panic!("the restore does not end");
    }

    #[test]
    fn i4_where_compute_and_loads_meet_is_corrected_on_the_way() {
        for (compute, load) in [(1.0, 1.0), (1.0, 0.3), (0.3, 1.0)] {
            let bound = 40.0 * compute * load / (compute + load);
            for error in [[1.0, 1.0], [0.5, 1.0], [2.0, 1.0], [1.0, 2.0], [1.0, 0.5]] {
                let seconds = simulated(compute, load, error);
                // A step of four chunks is not interrupted.
                let most = bound * 1.2 + 4.0 * compute;
                assert!(seconds <= most, "{compute} {load} {error:?}: {seconds} for {bound}");
            }
        }
    }

    #[test]
    fn i8_cells_under_way_are_bounded() {
        // Chunks of 40 MiB, and of 2 KiB.
        for (token_bytes, asked) in [(160 << 10, LOADING_CHUNKS), (8, 10)] {
            let mut progress = Progress::new(&chunks(10), &[0; 10], LAYERS, token_bytes, RestoreMode::Load);
            let (compute, load) = (|_: usize| 1.0, |_: usize, _: usize| 1.0);
            let mut next = || progress.next(4, &outlook(&compute, &load, 0.0));
            for _ in 0..asked {
                assert!(matches!(next(), Action::Load { .. }));
            }
            assert_eq!(next(), Action::Wait, "{token_bytes}");
        }
    }

    #[test]
    fn a_tier_that_is_nearly_done_is_waited_for() {
        // Ten chunks at a tenth of a second each are still to come; computing one takes as long as nine loads, or as four.
        for (seconds, taken) in [(0.9, 0), (0.4, 2)] {
            let mut progress = Progress::new(&chunks(10), &[0; 10], LAYERS, 1, RestoreMode::Planned);
            let (compute, load) = (|_: usize| seconds, |cells: usize, _: usize| cells as f64 * 0.025);
            for _ in 0..10 {
                assert!(matches!(progress.next(4, &outlook(&compute, &load, 0.0)), Action::Load { .. }));
            }
            match progress.next(4, &outlook(&compute, &load, 0.0)) {
                Action::Wait => assert_eq!(taken, 0, "{seconds}"),
                Action::Compute { chunks, .. } => assert_eq!(chunks, taken, "{seconds}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn only_needed_cells_of_window_layers_are_loaded() {
        let mut progress = Progress::new(&window_chunks(4), &[0; 4], LAYERS, 8, RestoreMode::Load);
        let report = run(&mut progress, |_| Vec::new());
        assert_eq!((report.cells_loaded, report.cells_recomputed, report.cells_outside), (3 * 2 + 4, 0, 6));
        assert_eq!(report.bytes_loaded, 10 * 64 * 8);
    }

    #[test]
    fn i2_what_recompute_reads_in_a_window_is_recomputed_from_the_first_chunk() {
        for (cuts, recomputed) in [([0, 0, 0, 0], 4 * 4), ([4, 4, 4, 1], 3 * 4 + 3)] {
            let mut progress = Progress::new(&window_chunks(4), &cuts, LAYERS, 8, RestoreMode::Load);
            let refuse = |chunk| if chunk == 3 { vec![(2, "corrupt".to_owned())] } else { Vec::new() };
            let report = run(&mut progress, refuse);
            assert_eq!(report.cells_recomputed, recomputed, "{cuts:?}");
            assert_eq!(report.cells_recomputed + report.cells_loaded + report.cells_outside, 16);
        }
    }

    #[test]
    fn i4_a_stuck_tier_is_overtaken_in_a_model_with_windows() {
        let mut progress = Progress::new(&window_chunks(6), &[0; 6], LAYERS, 8, RestoreMode::Planned);
        let (compute, load) = (|_: usize| 1.0, |_: usize, _: usize| 0.1);
        let mut ended = Vec::new();
        for step in 0..100 {
            match progress.next(4, &outlook(&compute, &load, f64::from(step))) {
                // The tier gives the first two chunks it is asked for and then nothing.
                Action::Load { chunk, .. } if chunk >= 4 => progress.loaded(chunk, &[]),
                Action::Load { .. } | Action::Wait => {}
                Action::Compute { chunk, chunks, layers } => {
                    assert_eq!((chunk, layers), (ended.len(), LAYERS), "from the first chunk, in order");
                    ended.extend(chunk..chunk + chunks);
                    progress.computed(chunk, chunks, 1.0);
                }
                Action::Done => {
                    assert_eq!(ended, [0, 1, 2, 3]);
                    return;
                }
            }
        }
        panic!("the restore does not end");
    }

    #[test]
    fn i4_a_patient_restore_hurries_once_someone_waits() {
        let mut progress = Progress::new(&chunks(4), &[0; 4], LAYERS, 8, RestoreMode::Load);
        progress.be_patient();
        let (compute, load) = (|_: usize| 1.0, |_: usize, _: usize| 9.0);
        let next = |progress: &mut Progress| progress.next(4, &outlook(&compute, &load, 100.0));
        for _ in 0..LOADING_CHUNKS {
            assert!(matches!(next(&mut progress), Action::Load { .. }));
        }
        assert_eq!(next(&mut progress), Action::Wait, "however slow the tier is");
        progress.hurry(RestoreMode::Planned);
        let asked: Vec<Action> = (0..2).map(|_| next(&mut progress)).collect();
        assert!(asked.iter().all(|action| matches!(action, Action::Load { .. })), "{asked:?}");
        assert_eq!(next(&mut progress), Action::Compute { chunk: 0, chunks: 4, layers: LAYERS });
    }

    #[test]
    fn a_forced_plan_waits_for_its_tier() {
        let mut progress = Progress::new(&chunks(1), &[0], LAYERS, 8, RestoreMode::Load);
        let (compute, load) = (|_: usize| 0.0, |_: usize, _: usize| 9.0);
        let view = outlook(&compute, &load, 100.0);
        assert!(matches!(progress.next(4, &view), Action::Load { .. }));
        assert_eq!(progress.next(4, &view), Action::Wait);
    }
}

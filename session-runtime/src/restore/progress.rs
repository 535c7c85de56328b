//! A restore under way: what to compute and what to load next, until every cell is on the device.
//!
//! Pure state: the scheduler asks for the next action, carries it out and tells the outcome. Compute
//! walks from the first chunk, loads from the last. A cell that cannot be used raises its chunk's cut,
//! so that it is recomputed; when the tier falls behind its prediction, compute takes the next chunk
//! over (invariant I4). When compute falls behind, loads go on towards the front: where the two meet is decided on the way.
//!
//! Where window layers keep the last tokens only, the pages that recompute reads in them move with it. So compute
//! goes on from where it stands, or begins anew at the first chunk; nothing in between has what it reads.

use super::plan::{ChunkFacts, LEAST_GAIN, RestoreMode, Work};
use super::report::RestoreReport;
use super::source::{Amount, PerSource, Source};

/// Bytes of cells that may be under way from the disk at once, and the chunks that always may. A step of compute is not
/// interrupted: what the disk has to do meanwhile must have been asked for before. Cells in host memory take no more of it
/// for being asked for, so all of them are.
const LOADING_BYTES: usize = 64 << 20;
const LOADING_CHUNKS: usize = 2;

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask a tier for cells of `chunk`.
    Load {
        /// Index of the chunk.
        chunk: usize,
        /// The tier.
        source: Source,
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Load {
    Unasked,
    Asked,
    #[default]
    Ended,
}

#[derive(Clone, Debug)]
struct ChunkProgress {
    tokens: usize,
    /// Bytes of one of its cells.
    cell_bytes: usize,
    cut: u32,
    computed: bool,
    load: PerSource<Load>,
    /// Whether every needed cell is saved and no tier was asked for any yet.
    fresh: bool,
    /// Per layer, the tier that the cell comes from; `None` where it need not be on the device at the end, or no tier has
    /// it.
    from: Vec<Option<Source>>,
}

impl ChunkProgress {
    /// Layers whose cells a tier is to bring, lowest first.
    fn loads(&self, source: Source) -> impl Iterator<Item = u32> + '_ {
        (self.cut..)
            .zip(self.from.iter().skip(self.cut as usize))
            .filter(move |(_, from)| **from == Some(source))
            .map(|(layer, _)| layer)
    }

    fn has_ended(&self) -> bool {
        Source::ALL.iter().all(|source| self.load[*source] == Load::Ended)
    }

    /// Has nothing asked for any more that was not yet.
    fn ask_no_more(&mut self) {
        for source in Source::ALL {
            if self.load[source] == Load::Unasked {
                self.load[source] = Load::Ended;
            }
        }
    }

    /// Has what the cut leaves to the tiers asked for.
    fn ask_anew(&mut self) {
        for source in Source::ALL {
            let none = self.loads(source).next().is_none();
            self.load[source] = if none { Load::Ended } else { Load::Unasked };
        }
    }
}

/// Predictions used to decide whether to wait or to take over, in seconds.
pub struct Outlook<'a> {
    /// Compute every layer of the chunk with this index.
    pub compute_chunk: &'a dyn Fn(usize) -> f64,
    /// Load what is still to come.
    pub load: &'a dyn Fn(&PerSource<Amount>) -> f64,
    /// Since the last cell arrived, or since the first was asked for.
    pub stalled: f64,
    /// What other restores have left: compute that comes before what is taken over now, and loads before those that are asked
    /// for now.
    pub others: Work,
}

/// A restore under way.
#[derive(Debug)]
pub struct Progress {
    layers: u32,
    forced: bool,
    chunks: Vec<ChunkProgress>,
    /// Chunks asked of the disk that it has not answered for.
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
    /// Begins a restore of `chunks` by `cuts` (m(c) per chunk) in a model of `layers` layers. `mode` other than planned is
    /// never departed from while the tier answers.
    pub fn new(chunks: &[ChunkFacts], cuts: &[u32], layers: u32, mode: RestoreMode) -> Self {
        debug_assert_eq!(chunks.len(), cuts.len());
        let forced = mode != RestoreMode::Planned;
        let report = RestoreReport { plan: cuts.to_vec(), layers, forced, ..RestoreReport::default() };
        let windows = chunks.iter().any(|chunk| chunk.needed.contains(&false));
        let chunks = chunks
            .iter()
            .zip(cuts)
            .map(|(chunk, cut)| {
                let mut state = ChunkProgress {
                    tokens: chunk.tokens,
                    cell_bytes: chunk.cell_bytes,
                    cut: *cut,
                    computed: *cut == 0,
                    load: PerSource::default(),
                    fresh: chunk.is_saved(),
                    from: (0..layers as usize).map(|layer| chunk.source(layer)).collect(),
                };
                state.ask_anew();
                state
            })
            .collect();
        Self { layers, forced, chunks, in_flight: 0, patient: false, windows, frontier: 0, report }
    }

    fn complete(&self, chunk: &ChunkProgress) -> bool {
        chunk.computed && (chunk.cut == self.layers || chunk.has_ended())
    }

    /// Whether every layer below `layers` of every chunk before `end` is on the device.
    fn ready_below(&self, end: usize, layers: u32) -> bool {
        self.chunks[..end].iter().all(|chunk| self.complete(chunk) || (chunk.computed && chunk.cut >= layers))
    }

    /// What is still to come from each tier.
    fn to_load(&self) -> PerSource<Amount> {
        let mut left = PerSource::default();
        for chunk in &self.chunks {
            for source in Source::ALL.into_iter().filter(|source| chunk.load[*source] != Load::Ended) {
                left.add(source, chunk.loads(source).count(), chunk.cell_bytes);
            }
        }
        left
    }

    /// What is left to do, where `compute` predicts the seconds of the lowest layers of a chunk.
    pub fn left(&self, compute: &dyn Fn(usize, u32) -> f64) -> Work {
        let uncomputed = self.chunks.iter().enumerate().filter(|(_, chunk)| !chunk.computed);
        Work {
            compute: uncomputed.map(|(index, chunk)| compute(index, chunk.cut)).sum(),
            load: self.to_load(),
        }
    }

    /// The next thing to do. At most `chunks_max` chunks are computed at once; none, where the device is another's for now.
    pub fn next(&mut self, chunks_max: usize, outlook: &Outlook<'_>) -> Action {
        if let Some(load) = self.next_load() {
            return load;
        }
        if let Some(chunk) = self.sooner_loaded(outlook) {
            (self.chunks[chunk].cut, self.chunks[chunk].computed) = (0, true);
            self.chunks[chunk].ask_anew();
            if let Some(load) = self.next_load() {
                return load;
            }
        }
        if chunks_max == 0 {
            let done = self.chunks.iter().all(|chunk| self.complete(chunk));
            return if done { Action::Done } else { Action::Wait };
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
            chunk.ask_no_more();
        }
        if overtaken == 0 {
            return Action::Wait;
        }
        self.report.refuse("slow", overtaken as u64 * u64::from(self.layers));
        self.frontier = self.frontier.min(front);
        let chunks = overtaken.min(chunks_max);
        Action::Compute { chunk: front, chunks, layers: self.layers }
    }

    /// Whether more may be under way from the disk.
    fn may_ask(&self) -> bool {
        let asked = self.chunks.iter().filter(|chunk| chunk.load.disk == Load::Asked);
        let bytes: usize = asked.map(|chunk| chunk.loads(Source::Disk).count() * chunk.cell_bytes).sum();
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

    /// The next cells to ask for, from the last chunk on; of the disk first, which brings them meanwhile.
    fn next_load(&mut self) -> Option<Action> {
        let may_ask = self.may_ask();
        for source in [Source::Disk, Source::Host] {
            if let Some(chunk) = self.chunks.iter().rposition(|chunk| chunk.load[source] == Load::Unasked)
                && (may_ask || source == Source::Host)
            {
                self.in_flight += usize::from(source == Source::Disk);
                let state = &mut self.chunks[chunk];
                (state.load[source], state.fresh) = (Load::Asked, false);
                return Some(Action::Load { chunk, source, layers: state.loads(source).collect() });
            }
        }
        None
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
        let own: f64 = (front..=last).map(|index| (outlook.compute_chunk)(index)).sum();
        let compute = outlook.others.compute + own;
        let mut left = self.to_load().and(&outlook.others.load);
        for source in chunk.from.iter().flatten() {
            left.add(*source, 1, chunk.cell_bytes);
        }
        let load = (outlook.load)(&left);
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
            state.ask_no_more();
        }
        self.frontier = self.frontier.min(first);
    }

    /// How many chunks from `front` on are recomputed sooner than the tier would bring what is left: the
    /// meeting point again, with what the restore has shown of the tier so far. None where that saves little.
    fn overtaken(&self, front: usize, outlook: &Outlook<'_>) -> usize {
        if self.forced {
            return 0;
        }
        let mut left = self.to_load();
        let waiting = (outlook.load)(&left).max(outlook.stalled);
        let (mut compute, mut computing) = (outlook.others.compute, 0.0);
        let mut count = 0;
        for (index, chunk) in self.chunks.iter().enumerate().skip(front) {
            if !self.windows && (self.complete(chunk) || chunk.cut == self.layers) {
                break;
            }
            compute += (outlook.compute_chunk)(index);
            if compute >= (outlook.load)(&left).max(outlook.stalled) {
                break;
            }
            for source in Source::ALL.into_iter().filter(|source| chunk.load[*source] != Load::Ended) {
                left.take(source, chunk.loads(source).count(), chunk.cell_bytes);
            }
            computing = compute;
            count += 1;
        }
        if computing.max((outlook.load)(&left)) > waiting * (1.0 - LEAST_GAIN) {
            return 0;
        }
        // Chunks that are there are computed again only to reach one that is not.
        let missing = self.chunks[front..front + count].iter().rposition(|chunk| !self.complete(chunk));
        missing.map_or(0, |last| last + 1)
    }

    /// The lowest layer whose cell is still wanted when a chunk's cells arrive from a tier; `None`: none is.
    pub fn wants(&self, chunk: usize, source: Source) -> Option<u32> {
        let state = &self.chunks[chunk];
        (state.load[source] == Load::Asked && state.cut < self.layers).then_some(state.cut)
    }

    /// Told that a tier answered for a chunk: `bytes` of the cells that were used, and the layers it could not give, with
    /// reasons.
    pub fn loaded(&mut self, chunk: usize, source: Source, bytes: u64, refused: &[(u32, String)]) {
        self.in_flight -= usize::from(source == Source::Disk);
        let wanted = self.wants(chunk, source).is_some();
        let state = &mut self.chunks[chunk];
        state.load[source] = Load::Ended;
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
        self.report.bytes_loaded += bytes;
        self.report.of_tier(source).bytes += bytes;
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
            let cells = |source| chunk.loads(source).count() as u64;
            let loaded: u64 = Source::ALL.into_iter().map(cells).sum();
            report.cells_loaded += loaded;
            report.cells_outside += u64::from(self.layers - chunk.cut) - loaded;
            Source::ALL.into_iter().for_each(|source| report.of_tier(source).cells += cells(source));
            match chunk.cut {
                0 => {
                    report.tokens_loaded += tokens;
                    let lowest = if cells(Source::Disk) > 0 { Source::Disk } else { Source::Host };
                    report.of_tier(lowest).tokens += tokens;
                }
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
mod tests;

use super::super::report::TierLoads;
use super::*;

const LAYERS: u32 = 4;
const CELL_BYTES: u64 = 64 * 8;

fn chunks(count: usize) -> Vec<ChunkFacts> {
    let (saved, needed) = (vec![Some(Source::Disk); LAYERS as usize], vec![true; LAYERS as usize]);
    let facts = |index| ChunkFacts {
        start: index * 64,
        tokens: 64,
        saved: saved.clone(),
        needed: needed.clone(),
        cell_bytes: 64 * 8,
    };
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
    load: &'a dyn Fn(&PerSource<Amount>) -> f64,
    stalled: f64,
) -> Outlook<'a> {
    Outlook { compute_chunk: compute, load, stalled, others: Work::default() }
}

/// Runs a restore with a tier that answers every request at once, refusing what `refuse` says.
fn run(progress: &mut Progress, refuse: impl Fn(usize) -> Vec<(u32, String)>) -> RestoreReport {
    let (compute, load) = (|_: usize| 1.0, |_: &PerSource<Amount>| 0.0);
    for _ in 0..1000 {
        match progress.next(2, &outlook(&compute, &load, 0.0)) {
            Action::Load { chunk, source, layers } => {
                let refused = refuse(chunk);
                progress.loaded(chunk, source, (layers.len() - refused.len()) as u64 * CELL_BYTES, &refused);
            }
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
        let mut progress = Progress::new(&chunks(3), &cuts, LAYERS, RestoreMode::Cut(0));
        let report = run(&mut progress, |_| Vec::new());
        assert_eq!(report.cells_loaded + report.cells_recomputed, 12, "{cuts:?}");
        assert_eq!(report.cells_recomputed, cuts.iter().map(|cut| u64::from(*cut)).sum::<u64>());
        assert_eq!(report.tokens, 192);
    }
}

#[test]
fn i2_a_refused_cell_is_recomputed_with_the_layers_below_it() {
    let mut progress = Progress::new(&chunks(3), &[0, 0, 0], LAYERS, RestoreMode::Load);
    let refuse = |chunk| if chunk == 1 { vec![(2, "corrupt".to_owned())] } else { Vec::new() };
    let report = run(&mut progress, refuse);
    assert_eq!((report.cells_recomputed, report.cells_loaded), (3, 9));
    assert_eq!(report.tokens_mixed, 64);
    assert_eq!(report.cells_refused(), 1);
}

#[test]
fn i4_a_stuck_tier_is_taken_over_chunk_by_chunk() {
    let mut progress = Progress::new(&chunks(2), &[0, 0], LAYERS, RestoreMode::Planned);
    let (compute, load) = (|_: usize| 1.0, |_: &PerSource<Amount>| 0.1);
    let ask = |progress: &mut Progress, stalled| progress.next(4, &outlook(&compute, &load, stalled));
    assert_eq!(
        ask(&mut progress, 0.0),
        Action::Load { chunk: 1, source: Source::Disk, layers: vec![0, 1, 2, 3] }
    );
    assert_eq!(
        ask(&mut progress, 0.0),
        Action::Load { chunk: 0, source: Source::Disk, layers: vec![0, 1, 2, 3] }
    );
    assert_eq!(ask(&mut progress, 0.5), Action::Wait);
    assert_eq!(ask(&mut progress, 1.5), Action::Compute { chunk: 0, chunks: 1, layers: LAYERS });
    progress.computed(0, 1, 1.0);
    assert_eq!(ask(&mut progress, 2.5), Action::Compute { chunk: 1, chunks: 1, layers: LAYERS });
    progress.computed(1, 1, 1.0);
    assert_eq!(ask(&mut progress, 3.5), Action::Done);
    progress.loaded(1, Source::Disk, 0, &[]);
    let report = progress.finish(0);
    assert_eq!((report.tokens_recomputed, report.tokens_loaded), (128, 0));
}

/// Seconds of a planned restore of forty chunks. Computing a chunk takes `compute` and loading one `load`; the costs that
/// the plan is made with are off by `error` each.
fn simulated(compute: f64, load: f64, error: [f64; 2]) -> f64 {
    let (believed_compute, believed_load) = (compute * error[0], load * error[1]);
    let cell = believed_load / f64::from(LAYERS);
    let (computing, loading) =
        (|_: usize| believed_compute, |left: &PerSource<Amount>| left.disk.cells as f64 * cell);
    let facts = chunks(40);
    let front = (40.0 * believed_load / (believed_compute + believed_load)).round() as usize;
    let cuts: Vec<u32> = (0..40).map(|index| if index < front { LAYERS } else { 0 }).collect();
    let mut progress = Progress::new(&facts, &cuts, LAYERS, RestoreMode::Planned);
    let (mut now, mut free, mut arrived) = (0.0_f64, 0.0_f64, 0.0);
    let mut under_way: Vec<(f64, usize)> = Vec::new();
    for _ in 0..10_000 {
        while under_way.first().is_some_and(|(end, _)| *end <= now) {
            let (end, chunk) = under_way.remove(0);
            arrived = end;
            progress.loaded(chunk, Source::Disk, 0, &[]);
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
        let mut facts = chunks(10);
        facts.iter_mut().for_each(|chunk| chunk.cell_bytes = 64 * token_bytes);
        let mut progress = Progress::new(&facts, &[0; 10], LAYERS, RestoreMode::Load);
        let (compute, load) = (|_: usize| 1.0, |_: &PerSource<Amount>| 1.0);
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
        let mut progress = Progress::new(&chunks(10), &[0; 10], LAYERS, RestoreMode::Planned);
        let (compute, load) = (|_: usize| seconds, |left: &PerSource<Amount>| left.disk.cells as f64 * 0.025);
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
fn what_other_restores_have_left_comes_before_what_is_taken_over_or_asked_for_now() {
    let (compute, load) = (|_: usize| 0.4, |left: &PerSource<Amount>| left.disk.cells as f64 * 0.025);
    let beside = |others| Outlook { others, ..outlook(&compute, &load, 0.0) };
    for (seconds, waits) in [(0.0, false), (0.5, true)] {
        let mut progress = Progress::new(&chunks(10), &[0; 10], LAYERS, RestoreMode::Planned);
        let others = Work { compute: seconds, ..Work::default() };
        for _ in 0..10 {
            assert!(matches!(progress.next(4, &beside(others)), Action::Load { .. }));
        }
        assert_eq!(progress.left(&|_, _| 0.4), Work { compute: 0.0, load: chunk_loads(10) });
        assert_eq!(
            progress.next(4, &beside(others)) == Action::Wait,
            waits,
            "compute is taken for {seconds} s"
        );
    }
    for (cells, loads) in [(0, true), (200, false)] {
        let mut progress = Progress::new(&chunks(10), &[LAYERS; 10], LAYERS, RestoreMode::Planned);
        assert_eq!(progress.left(&|_, layers| 0.1 * f64::from(layers)).compute.round(), 4.0);
        let mut others = Work::default();
        others.load.add(Source::Disk, cells, 1);
        let next = progress.next(4, &beside(others));
        assert_eq!(
            matches!(next, Action::Load { chunk: 9, .. }),
            loads,
            "the disk has {cells} cells to bring"
        );
    }
}

/// What the disk brings of so many chunks.
fn chunk_loads(count: usize) -> PerSource<Amount> {
    let mut loads = PerSource::default();
    loads.add(Source::Disk, count * LAYERS as usize, 64 * 8);
    loads
}

#[test]
fn only_needed_cells_of_window_layers_are_loaded() {
    let mut progress = Progress::new(&window_chunks(4), &[0; 4], LAYERS, RestoreMode::Load);
    let report = run(&mut progress, |_| Vec::new());
    assert_eq!((report.cells_loaded, report.cells_recomputed, report.cells_outside), (3 * 2 + 4, 0, 6));
    assert_eq!(report.bytes_loaded, 10 * 64 * 8);
}

#[test]
fn i2_what_recompute_reads_in_a_window_is_recomputed_from_the_first_chunk() {
    for (cuts, recomputed) in [([0, 0, 0, 0], 4 * 4), ([4, 4, 4, 1], 3 * 4 + 3)] {
        let mut progress = Progress::new(&window_chunks(4), &cuts, LAYERS, RestoreMode::Load);
        let refuse = |chunk| if chunk == 3 { vec![(2, "corrupt".to_owned())] } else { Vec::new() };
        let report = run(&mut progress, refuse);
        assert_eq!(report.cells_recomputed, recomputed, "{cuts:?}");
        assert_eq!(report.cells_recomputed + report.cells_loaded + report.cells_outside, 16);
    }
}

#[test]
fn i4_a_stuck_tier_is_overtaken_in_a_model_with_windows() {
    let mut progress = Progress::new(&window_chunks(6), &[0; 6], LAYERS, RestoreMode::Planned);
    let (compute, load) = (|_: usize| 1.0, |_: &PerSource<Amount>| 0.1);
    let mut ended = Vec::new();
    for step in 0..100 {
        match progress.next(4, &outlook(&compute, &load, f64::from(step))) {
            // The tier gives the first two chunks it is asked for and then nothing.
            Action::Load { chunk, .. } if chunk >= 4 => progress.loaded(chunk, Source::Disk, 0, &[]),
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
    let mut progress = Progress::new(&chunks(4), &[0; 4], LAYERS, RestoreMode::Load);
    progress.be_patient();
    let (compute, load) = (|_: usize| 1.0, |_: &PerSource<Amount>| 9.0);
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
    let mut progress = Progress::new(&chunks(1), &[0], LAYERS, RestoreMode::Load);
    let (compute, load) = (|_: usize| 0.0, |_: &PerSource<Amount>| 9.0);
    let view = outlook(&compute, &load, 100.0);
    assert!(matches!(progress.next(4, &view), Action::Load { .. }));
    assert_eq!(progress.next(4, &view), Action::Wait);
}

/// Chunks of which host memory has the higher two layers, and the disk all.
fn shared_chunks(count: usize) -> Vec<ChunkFacts> {
    let mut chunks = chunks(count);
    for chunk in &mut chunks {
        chunk.saved[2..].fill(Some(Source::Host));
    }
    chunks
}

#[test]
fn i10_the_report_tells_the_tiers_apart() {
    let mut facts = shared_chunks(4);
    facts[3].saved.fill(Some(Source::Host));
    let mut progress = Progress::new(&facts, &[4, 1, 0, 0], LAYERS, RestoreMode::Cut(0));
    let report = run(&mut progress, |_| Vec::new());
    let loads = |tokens, cells| TierLoads { tokens, cells, bytes: cells * 64 * 8 };
    assert_eq!((report.from_host, report.from_disk), (loads(64, 2 + 2 + 4), loads(64, 1 + 2)));
    assert_eq!((report.tokens_loaded, report.tokens_mixed, report.tokens_recomputed), (128, 64, 64));
    assert_eq!((report.cells_loaded, report.bytes_loaded), (11, 11 * 64 * 8));
    assert_eq!(report.summary(), "256 tokens in 0 ms: 64 from host, 64 from disk, 64 mixed, 64 recomputed");
}

#[test]
fn i2_what_one_tier_refuses_is_recomputed_whatever_the_other_brings() {
    for host_first in [false, true] {
        let mut progress = Progress::new(&shared_chunks(1), &[0], LAYERS, RestoreMode::Load);
        let (compute, load) = (|_: usize| 1.0, |_: &PerSource<Amount>| 0.0);
        let next = |progress: &mut Progress| progress.next(4, &outlook(&compute, &load, 0.0));
        assert!(matches!(next(&mut progress), Action::Load { source: Source::Disk, .. }));
        assert!(matches!(next(&mut progress), Action::Load { source: Source::Host, .. }));
        let host = |progress: &mut Progress| {
            progress.loaded(0, Source::Host, 0, &[(2, "corrupt".to_owned())]);
        };
        if host_first {
            host(&mut progress);
        }
        progress.loaded(0, Source::Disk, 0, &[]);
        if !host_first {
            assert_eq!(next(&mut progress), Action::Wait);
            host(&mut progress);
        }
        assert_eq!(next(&mut progress), Action::Compute { chunk: 0, chunks: 1, layers: 3 });
        progress.computed(0, 1, 0.5);
        assert_eq!(next(&mut progress), Action::Done);
        let report = progress.finish(0);
        assert_eq!((report.cells_recomputed, report.from_host.cells, report.from_disk.cells), (3, 1, 0));
    }
}

#[test]
fn i4_a_stuck_disk_is_overtaken_around_what_host_memory_has() {
    let mut facts = chunks(3);
    facts[1].saved.fill(Some(Source::Host));
    let mut progress = Progress::new(&facts, &[0; 3], LAYERS, RestoreMode::Planned);
    let (compute, load) = (|_: usize| 1.0, |_: &PerSource<Amount>| 0.1);
    let mut computed = Vec::new();
    for step in 0..20 {
        match progress.next(4, &outlook(&compute, &load, f64::from(step))) {
            Action::Load { chunk, source: Source::Host, .. } => progress.loaded(chunk, Source::Host, 0, &[]),
            Action::Load { .. } | Action::Wait => {}
            Action::Compute { chunk, chunks, layers } => {
                assert_eq!(layers, LAYERS);
                computed.extend(chunk..chunk + chunks);
                progress.computed(chunk, chunks, 1.0);
            }
            Action::Done => {
                assert_eq!(computed, [0, 2]);
                let report = progress.finish(0);
                assert_eq!((report.from_host.tokens, report.tokens_recomputed), (64, 128));
                return;
            }
        }
    }
    panic!("the restore does not end");
}

//! How fast a GPU is on the named models' shapes: prefill, decode, and bringing KV back by loading beside recomputing it.

use std::sync::Arc;
use std::time::Instant;

use kernels::backend::KvType;
use kernels::cuda::CudaBackend;

use super::logits::open;
use super::random_weights::Shape;
use super::sequence::{Sequences, tokens};
use crate::bench::{Figure, median};
use crate::engine::LogitRows;
use crate::error::Error;
use crate::kv::chunk::CHUNK_TOKENS;
use crate::runtime::STEP_ROWS;

const RUNS: usize = 5;
/// Tokens of a prompt, and those decoded after it.
const PROMPT: usize = 512;
const DECODE: usize = 32;
/// Sessions that decode at once.
const SESSIONS: usize = 8;

/// Bytes a second that the device's memory moves.
///
/// # Errors
/// What the device fails with.
pub(super) fn bandwidth(backend: &CudaBackend) -> Result<f64, Error> {
    let runs = (0..RUNS).map(|_| Ok(backend.memory_bandwidth()?)).collect::<Result<_, Error>>()?;
    Ok(median(runs))
}

/// Bandwidth as a figure.
pub(super) fn machine(bandwidth: f64) -> Figure {
    figure("machine", "memory_bandwidth", bandwidth, "B/s")
}

fn figure(case: &str, metric: &'static str, value: f64, unit: &'static str) -> Figure {
    let (against, ratio) = (None, None);
    Figure { bench: "gpu", case: case.to_owned(), metric, value, unit, against, ratio, n: RUNS }
}

/// Measures one shape.
///
/// # Errors
/// What the device fails with.
pub(super) fn measure(
    backend: &Arc<CudaBackend>,
    shape: &Shape,
    bandwidth: f64,
) -> Result<Vec<Figure>, Error> {
    let room = PROMPT + DECODE;
    let engine = open(backend, shape, KvType::F16, SESSIONS * room)?;
    let weights = engine.weight_bytes();
    let mut one = Sequences::new(engine, 1, room)?;
    let tokens = tokens(room, shape.config.vocab);
    let name = shape.name;
    let mut figures = Vec::new();

    let prefill = timed(|| one.read(&tokens[..PROMPT], STEP_ROWS, LogitRows::Last).map(drop))?;
    figures.push(figure(&format!("{name}/prefill-{PROMPT}"), "tok_per_s", PROMPT as f64 / prefill, "tok/s"));
    let decode = timed(|| (PROMPT..room).try_for_each(|index| one.decode(tokens[index], index).map(drop)))?;
    let per_second = DECODE as f64 / decode;
    let case = format!("{name}/decode-{PROMPT}");
    figures.push(figure(&case, "tok_per_s", per_second, "tok/s"));
    let kv = shape.config.kv_token_bytes(KvType::F16) * (PROMPT + DECODE / 2);
    let read = per_second * (weights + kv) as f64;
    let (against, ratio) = (Some("memory_bandwidth"), Some(read / bandwidth));
    figures.push(Figure { against, ratio, ..figure(&case, "bytes_per_s", read, "B/s") });
    figures.extend(restores(name, &mut one, &tokens[..PROMPT], prefill)?);

    let mut many = Sequences::new(one.engine, SESSIONS, room)?;
    let decode = timed(|| (0..DECODE).try_for_each(|index| many.decode(tokens[index], index).map(drop)))?;
    let case = format!("{name}/decode-{SESSIONS}-sessions");
    figures.push(figure(&case, "tok_per_s", (SESSIONS * DECODE) as f64 / decode, "tok/s"));
    Ok(figures)
}

/// The KV of the prompt on its way out and in again, beside recomputing it.
fn restores(
    name: &str,
    one: &mut Sequences<CudaBackend>,
    prompt: &[u32],
    recompute: f64,
) -> Result<Vec<Figure>, Error> {
    let layers = one.engine.config().layers;
    let places: Vec<(usize, usize)> = (0..prompt.len())
        .step_by(CHUNK_TOKENS)
        .flat_map(|start| (0..layers).map(move |layer| (start, layer)))
        .collect();
    let mut cells = Vec::new();
    let save = timed(|| {
        cells.clear();
        for (start, layer) in &places {
            let pages = one.tables[0].range(*layer, *start, *start + CHUNK_TOKENS);
            let pages = pages.ok_or_else(|| Error::internal("a chunk without pages"))?;
            cells.push(one.engine.gather_cell(&pages, CHUNK_TOKENS)?);
        }
        Ok(())
    })?;
    let load = timed(|| {
        for ((start, layer), cell) in places.iter().zip(&cells) {
            let pages = one.tables[0].range(*layer, *start, *start + CHUNK_TOKENS);
            let pages = pages.ok_or_else(|| Error::internal("a chunk without pages"))?;
            one.engine.scatter_cell(&pages, CHUNK_TOKENS, cell)?;
        }
        one.engine.finish()
    })?;
    let bytes: usize = cells.iter().map(Vec::len).sum();
    let case = format!("{name}/restore-{}", prompt.len());
    let against_recompute =
        |figure: Figure| Figure { against: Some("recompute_ms"), ratio: Some(load / recompute), ..figure };
    Ok(vec![
        figure(&case, "recompute_ms", recompute * 1e3, "ms"),
        against_recompute(figure(&case, "load_ms", load * 1e3, "ms")),
        figure(&case, "load_bytes_per_s", bytes as f64 / load, "B/s"),
        figure(&case, "save_bytes_per_s", bytes as f64 / save, "B/s"),
    ])
}

/// Seconds of the median run, after one that is not counted.
fn timed(mut run: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    run()?;
    let mut seconds = Vec::new();
    for _ in 0..RUNS {
        let begun = Instant::now();
        run()?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    Ok(median(seconds))
}

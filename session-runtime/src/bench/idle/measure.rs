//! What the simulation needs to know of this machine, measured on the real engine: the time of steps, of copies between pages
//! and cells, and of the disk.

use std::time::Instant;

use kernels::backend::Backend;

use crate::bench::median;
use crate::engine::{Engine, LogitRows, SequenceRows};
use crate::error::Error;
use crate::kv::chunk::CHUNK_TOKENS;
use crate::kv::pool::PagePool;
use crate::kv::table::BlockTable;
use crate::scheduler::simulation::DeviceCost;

/// Tokens of the context up to which steps are measured.
const CONTEXT: usize = 1024;
/// Runs of what is short.
const RUNS: usize = 15;
/// Runs of a prompt.
const PROMPTS: usize = 5;

struct Subject<'a, B: Backend> {
    engine: &'a mut Engine<B>,
    table: BlockTable,
    tokens: Vec<u32>,
}

impl<B: Backend> Subject<'_, B> {
    /// Seconds of a step over tokens `start..start + rows`.
    fn step(&mut self, start: usize, rows: usize, logits: LogitRows) -> Result<f64, Error> {
        let mut out = Vec::new();
        let begun = Instant::now();
        let piece = &self.tokens[start..start + rows];
        let rows = SequenceRows { tokens: piece, start, tables: &self.table, logits };
        let layers = self.engine.config().layers;
        self.engine.forward(&[rows], layers, &mut out)?;
        self.engine.finish()?;
        Ok(begun.elapsed().as_secs_f64())
    }

    fn median_step(&mut self, start: usize, rows: usize, logits: LogitRows) -> Result<f64, Error> {
        let runs: Result<Vec<f64>, Error> = (0..RUNS).map(|_| self.step(start, rows, logits)).collect();
        Ok(median(runs?))
    }
}

/// Measures an engine whose pool holds [`CONTEXT`] tokens and is not used yet.
pub(super) fn device<B: Backend>(engine: &mut Engine<B>) -> Result<DeviceCost, Error> {
    let (layers, kv_heads, vocab) = (engine.config().layers, engine.config().kv_heads, engine.config().vocab);
    let rows = engine.step_rows();
    let mut pool = PagePool::new(engine.pool_spec().pages);
    let mut table = BlockTable::new(layers, kv_heads);
    table.prepare(&mut pool, 0, CONTEXT + 1).map_err(Error::internal)?;
    let tokens = (0..=CONTEXT as u32).map(|index| index * 7919 % vocab as u32).collect();
    let mut subject = Subject { engine, table, tokens };
    // Of a prompt read in whole steps: seconds a row over the mean context, a line by least squares.
    let starts: Vec<usize> = (0..CONTEXT).step_by(rows).collect();
    let mut runs = vec![Vec::new(); starts.len()];
    for _ in 0..PROMPTS {
        for (start, run) in starts.iter().zip(&mut runs) {
            run.push(subject.step(*start, rows, LogitRows::None)? / rows as f64);
        }
    }
    let middle = |start: &usize| *start as f64 + rows as f64 / 2.0;
    let points: Vec<(f64, f64)> = starts.iter().map(middle).zip(runs.into_iter().map(median)).collect();
    let (at_zero, context) = line(&points);
    let single = subject.median_step(CONTEXT, 1, LogitRows::None)?;
    let with_logits = subject.median_step(CONTEXT, 1, LogitRows::Last)?;
    // `at_zero` holds the step's own time once for all its rows.
    let step = ((single - at_zero - context * CONTEXT as f64) / (1.0 - 1.0 / rows as f64)).max(0.0);
    let row = (at_zero - step / rows as f64).max(0.0);
    Ok(DeviceCost {
        step,
        row,
        context,
        logits: (with_logits - single).max(0.0),
        copy_bytes_per_s: copies(&subject)?,
    })
}

/// Bytes a second that are gathered into cells.
fn copies<B: Backend>(subject: &Subject<'_, B>) -> Result<f64, Error> {
    let mut rates = Vec::new();
    for layer in 0..subject.engine.config().layers {
        let Some(pages) = subject.table.range(layer, 0, CHUNK_TOKENS) else { continue };
        let begun = Instant::now();
        let cell = subject.engine.gather_cell(&pages, CHUNK_TOKENS)?;
        rates.push(cell.len() as f64 / begun.elapsed().as_secs_f64());
    }
    Ok(median(rates).max(1.0))
}

/// The line through points by least squares, never falling: value at zero, slope.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    let count = points.len() as f64;
    let mean = |value: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(value).sum::<f64>() / count;
    let (x, y) = (mean(&|point| point.0), mean(&|point| point.1));
    let spread = mean(&|point| (point.0 - x) * (point.0 - x));
    let together = mean(&|point| (point.0 - x) * (point.1 - y));
    let slope = if spread > 0.0 { (together / spread).max(0.0) } else { 0.0 };
    (y - slope * x, slope)
}

#[cfg(test)]
mod tests {
    use super::line;

    #[test]
    fn a_line_is_found_and_never_falls() {
        let (zero, slope) = line(&[(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)]);
        assert!((zero - 3.0).abs() < 1e-12 && (slope - 2.0).abs() < 1e-12);
        assert_eq!(line(&[(1.0, 5.0), (2.0, 3.0)]), (4.0, 0.0));
    }
}

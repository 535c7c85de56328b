//! `bench engine`: tokens per second of prefill and decode, milliseconds in each layer.

use std::sync::Arc;
use std::time::Instant;

use kernels::cpu::{CpuBackend, CpuOptions, ceiling};

use super::{Figure, median};
use crate::engine::{self, Engine, EngineOptions, LogitRows, SequenceRows};
use crate::error::Error;
use crate::kv::pool::PagePool;
use crate::kv::table::BlockTable;
use crate::models;
use crate::runtime::STEP_ROWS;

const RUNS: usize = 5;
const PROMPT: usize = 512;
const DECODE: usize = 32;

/// Measures every model, runs interleaved.
pub(super) fn run(
    names: &[String],
    threads: usize,
    tell: &mut (dyn FnMut(Figure) + Send),
) -> Result<(), Error> {
    let backend = Arc::new(CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() })?);
    let mut subjects = names
        .iter()
        .map(|name| Subject::open(name, Arc::clone(&backend)))
        .collect::<Result<Vec<_>, Error>>()?;
    let mut bandwidth = Vec::new();
    for _ in 0..RUNS {
        bandwidth.push(ceiling::memory_read(threads));
        for subject in &mut subjects {
            subject.measure()?;
        }
    }
    let bandwidth = median(bandwidth);
    tell(figure("machine/memory-read", "bytes_per_s", bandwidth, "B/s"));
    for subject in subjects {
        subject.tell(bandwidth, tell);
    }
    Ok(())
}

fn figure(case: &str, metric: &'static str, value: f64, unit: &'static str) -> Figure {
    Figure {
        bench: "engine",
        case: case.to_owned(),
        metric,
        value,
        unit,
        against: None,
        ratio: None,
        n: RUNS,
    }
}

struct Subject {
    name: String,
    engine: Engine<CpuBackend>,
    pool: PagePool,
    prefill: Vec<f64>,
    decode: Vec<f64>,
    layers: Vec<f64>,
}

impl Subject {
    fn open(name: &str, backend: Arc<CpuBackend>) -> Result<Self, Error> {
        let model = models::open(name)?;
        let bytes = (model.config.kv_token_bytes() * (PROMPT + DECODE + 64)) as u64;
        let options =
            EngineOptions { budget_bytes: bytes, context_length: PROMPT + DECODE + 64, step_rows: STEP_ROWS };
        let engine = engine::open(backend, &model, options)?;
        let pool = PagePool::new(engine.pool_spec().pages);
        let layers = vec![0.0; model.config.layers];
        Ok(Self { name: name.to_owned(), engine, pool, prefill: Vec::new(), decode: Vec::new(), layers })
    }

    fn measure(&mut self) -> Result<(), Error> {
        let config = self.engine.config();
        let vocab = config.vocab as u32;
        let tokens: Vec<u32> =
            (0..(PROMPT + DECODE) as u32).map(|index| (index * 7919 + 13) % vocab).collect();
        let mut table = BlockTable::new(config.layers, config.kv_heads);
        table.prepare(&mut self.pool, 0, tokens.len()).map_err(Error::internal)?;
        let layers = config.layers;
        let mut logits = Vec::new();
        let mut step = |engine: &mut Engine<CpuBackend>, start: usize, end: usize| {
            logits.clear();
            let rows = SequenceRows {
                tokens: &tokens[start..end],
                start,
                tables: &table,
                logits: if end < PROMPT { LogitRows::None } else { LogitRows::Last },
            };
            engine.forward(&[rows], layers, &mut logits)
        };
        let begun = Instant::now();
        for start in (0..PROMPT).step_by(STEP_ROWS) {
            step(&mut self.engine, start, (start + STEP_ROWS).min(PROMPT))?;
        }
        self.prefill.push(PROMPT as f64 / begun.elapsed().as_secs_f64());
        for (sum, seconds) in self.layers.iter_mut().zip(self.engine.take_layer_seconds()) {
            *sum += seconds / RUNS as f64;
        }
        let begun = Instant::now();
        for index in PROMPT..PROMPT + DECODE {
            step(&mut self.engine, index, index + 1)?;
        }
        self.decode.push(DECODE as f64 / begun.elapsed().as_secs_f64());
        self.engine.take_layer_seconds();
        table.truncate(&mut self.pool, 0);
        Ok(())
    }

    fn tell(self, bandwidth: f64, tell: &mut (dyn FnMut(Figure) + Send)) {
        let case = |part: &str| format!("{}/{part}", self.name);
        tell(figure(&case("prefill-512"), "tok_per_s", median(self.prefill), "tok/s"));
        let decode = median(self.decode);
        tell(figure(&case("decode-512"), "tok_per_s", decode, "tok/s"));
        let read = decode * self.engine.weight_bytes() as f64;
        tell(Figure {
            against: Some("memory-read"),
            ratio: Some(read / bandwidth),
            ..figure(&case("decode-512"), "weight_bytes_per_s", read, "B/s")
        });
        tell(figure(&case("weights"), "bytes_resident", self.engine.weight_bytes() as f64, "B"));
        for (layer, seconds) in self.layers.iter().enumerate() {
            tell(figure(&case(&format!("prefill-512/layer-{layer}")), "ms", seconds * 1e3, "ms"));
        }
    }
}

//! Whether a GPU computes what a model is: logits that another program computed, and those of the CPU for made-up weights of
//! the named models' shapes.

use std::path::Path;
use std::sync::Arc;

use kernels::backend::{Backend, KvType};
use kernels::cpu::{CpuBackend, CpuOptions, Rounding};
use kernels::cuda::CudaBackend;

use super::checkpoint::CHECKPOINTS;
use super::random_weights::{RandomWeights, Shape};
use super::sequence::{Sequences, tokens};
use crate::engine::{self, Engine, EngineOptions, LogitRows, Weights};
use crate::error::Error;
use crate::models;
use crate::models::progress::Silent;

/// How far rows of logits may be from those of the other program, relative to their length: what the CPU is held to.
const KNOWN_APART: f64 = 1e-4;
/// The same from the CPU, whose activations are rounded to 16 bits before every product of some thirty layers.
const CPU_APART: f64 = 1e-3;
/// Tokens that are read at once, by the matrix-matrix kernel, and then one by one.
const READ: usize = 40;
const ONE_BY_ONE: usize = 3;

/// Largest distance of a row of logits from the row it should be, relative to the length of that.
fn distance(got: &[f32], want: &[f32], vocab: usize) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let rows = got.chunks_exact(vocab).zip(want.chunks_exact(vocab));
    rows.map(|(got, want)| {
        let apart = squares(&mut got.iter().zip(want).map(|(got, want)| f64::from(got - want)));
        (apart / squares(&mut want.iter().map(|value| f64::from(*value)))).sqrt()
    })
    // A value that is no number is infinitely far.
    .fold(0.0, |most, apart| if apart.is_nan() { f64::INFINITY } else { f64::max(most, apart) })
}

/// Compares with the logits that another program computed of small checkpoints; what was found, in words.
///
/// # Errors
/// A distance that is too large, or what the device fails with.
pub(super) fn known(backend: &Arc<CudaBackend>, folder: &Path) -> Result<String, Error> {
    let mut worst = 0.0f64;
    for checkpoint in CHECKPOINTS {
        let directory = checkpoint.unpack(folder)?;
        let model = models::open(&directory.to_string_lossy())?;
        let want = checkpoint.logits()?;
        for (kv_type, rows) in [(KvType::F32, &want.exact), (KvType::F16, &want.rounded)] {
            let options =
                EngineOptions { budget_bytes: 16 << 20, context_length: 1024, step_rows: 64, kv_type };
            let engine = engine::open(Arc::clone(backend), &model, options, &Silent)?;
            let mut sequences = Sequences::new(engine, 1, want.ids.len())?;
            let all = sequences.read(&want.ids, 64, LogitRows::All)?;
            let got: Vec<f32> = want
                .positions
                .iter()
                .flat_map(|position| &all[position * want.vocab..][..want.vocab])
                .copied()
                .collect();
            let apart = distance(&got, rows, want.vocab);
            check(checkpoint.name, apart, KNOWN_APART)?;
            worst = worst.max(apart);
        }
    }
    Ok(format!(
        "two checkpoints, K and V of f32 and f16: at most {worst:.1e} apart (allowed {KNOWN_APART:.0e})"
    ))
}

/// Compares made-up weights of a shape with the CPU; what was found, in words.
///
/// # Errors
/// A distance that is too large, or what a device fails with.
pub(super) fn random(backend: &Arc<CudaBackend>, shape: &Shape, threads: usize) -> Result<String, Error> {
    let options = CpuOptions { threads, rounding: Rounding::Fine, ..CpuOptions::default() };
    let want = logits_of(&Arc::new(CpuBackend::new(options)?), shape)?;
    let got = logits_of(backend, shape)?;
    let apart = distance(&got, &want, shape.config.vocab);
    check(shape.name, apart, CPU_APART)?;
    Ok(format!("at most {apart:.1e} from the CPU's (allowed {CPU_APART:.0e})"))
}

/// Logits of a prompt's last token, and of those that follow.
fn logits_of<B: Backend>(backend: &Arc<B>, shape: &Shape) -> Result<Vec<f32>, Error> {
    let engine = open(backend, shape, KvType::F32, READ + ONE_BY_ONE)?;
    let mut sequences = Sequences::new(engine, 1, READ + ONE_BY_ONE)?;
    let tokens = tokens(READ + ONE_BY_ONE, shape.config.vocab);
    let mut logits = sequences.read(&tokens[..READ], READ, LogitRows::Last)?;
    for (index, token) in tokens.iter().enumerate().skip(READ) {
        logits.extend(sequences.decode(*token, index)?);
    }
    Ok(logits)
}

/// An engine with made-up weights and a pool for so many tokens.
pub(super) fn open<B: Backend>(
    backend: &Arc<B>,
    shape: &Shape,
    kv_type: KvType,
    tokens: usize,
) -> Result<Engine<B>, Error> {
    let config = shape.config.clone();
    let weights =
        Weights::load(backend.as_ref(), &RandomWeights(shape), &config, kv_type, shape.name, &Silent)?;
    // Every sequence may end in the middle of a page.
    let budget = (config.kv_token_bytes(kv_type) * tokens.next_multiple_of(64)) as u64 + (64 << 20);
    let spec = engine::pool_spec(&config, kv_type, budget)?;
    let context = config.context_length;
    Engine::new(Arc::clone(backend), config, weights, spec, context, crate::runtime::STEP_ROWS)
}

fn check(name: &str, apart: f64, allowed: f64) -> Result<(), Error> {
    if apart <= allowed {
        return Ok(());
    }
    Err(Error::internal(format!("{name}: logits are {apart:.1e} apart, {allowed:.0e} is allowed")))
}

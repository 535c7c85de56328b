//! The engine: a model's forward pass on a device, and the choice of the next token.
//!
//! Knows pages and tables by id; knows no session, no chunk and no tier.

mod forward;
mod key_scales;
mod memory;
mod relocate;
pub mod sampler;
mod weights;

use std::sync::Arc;

use kernels::backend::{Backend, KvType};

pub use forward::{Engine, LogitRows, SequenceRows, Tables};
pub use memory::available as memory_available;
pub use relocate::Move;
pub use weights::{Weights, pool_spec};

use crate::error::Error;
use crate::models::LoadedModel;
use crate::models::progress::Progress;

/// What a model gets of its device.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Bytes of KV pages.
    pub budget_bytes: u64,
    /// Most tokens of a sequence.
    pub context_length: usize,
    /// Most rows of a step.
    pub step_rows: usize,
    /// How K and V are stored.
    pub kv_type: KvType,
}

/// Puts a model on a device; `progress` is told how far it is.
///
/// # Errors
/// `out_of_memory` before anything is allocated, `device_budget_too_small`, `model_malformed`,
/// `model_unsupported`.
pub fn open<B: Backend>(
    backend: Arc<B>,
    model: &LoadedModel,
    options: EngineOptions,
    progress: &dyn Progress,
) -> Result<Engine<B>, Error> {
    let spec = pool_spec(&model.config, options.kv_type, options.budget_bytes)?;
    memory::check(backend.as_ref(), model, spec, options).map_err(|error| model.naming(error))?;
    let (source, file) = (model.path.display().to_string(), model.weights.as_ref());
    let weights = Weights::load(backend.as_ref(), file, &model.config, options.kv_type, &source, progress)
        .map_err(|error| model.naming(error))?;
    Engine::new(backend, model.config.clone(), weights, spec, options.context_length, options.step_rows)
}

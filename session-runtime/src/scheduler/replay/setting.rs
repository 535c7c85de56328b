//! What a replay is made of, from the header of a trace.

use std::str::FromStr;
use std::sync::Arc;

use kernels::backend::{KvType, PAGE_TOKENS, PoolSpec};
use store::ManualClock;

use super::invalid;
use crate::engine::{Engine, pool_spec};
use crate::error::Error;
use crate::kv::chunk::CHUNK_TOKENS;
use crate::models::architecture::{LayerKind, ModelConfig};
use crate::scheduler::simulation::{SimulatedDevice, Steps, engine, shaped};
use crate::scheduler::tenants::{TenantQuota, TenantQuotas};
use crate::scheduler::trace::{TraceHeader, TracedQuota, TracedShape};
use crate::scheduler::{HostControl, SchedulerOptions};

/// Most of anything that a header may name: enough for any model, and few enough to be tried.
const MOST: u64 = 1 << 32;

/// Reads a word of a trace.
pub(super) fn word<T: FromStr<Err = String>>(word: &str) -> Result<T, Error> {
    word.parse().map_err(|error: String| invalid(&error))
}

/// The scheduler's options as the header has them.
pub(super) fn options(header: &TraceHeader) -> Result<SchedulerOptions, Error> {
    let options = &header.options;
    Ok(SchedulerOptions {
        restore_mode: word(&options.restore_mode)?,
        idle_policy: word(&options.idle_policy)?,
        idle_ttl_ms: options.idle_ttl_ms,
        context_length: size(options.context_length)?,
        save_when_idle: options.save_when_idle,
        speculation: word(&options.speculation)?,
        share_prefixes: options.share_prefixes,
        host_budget_bytes: options.host_budget_bytes,
        host_control: HostControl::default(),
        tenants: TenantQuotas {
            named: options.quotas.iter().map(|(name, of)| (name.clone(), quota(of))).collect(),
            others: quota(&options.others),
        },
        step_seconds: options.step_seconds,
        trace: None,
    })
}

fn quota(traced: &TracedQuota) -> TenantQuota {
    let TracedQuota { device_bytes, host_bytes, disk_bytes } = *traced;
    TenantQuota { device_bytes, host_bytes, disk_bytes }
}

/// A model with KV of the traced shape.
pub(super) fn model(header: &TraceHeader) -> Result<ModelConfig, Error> {
    let TracedShape { layers, kv_heads, head_dim, windows, page_tokens, chunk_tokens, .. } = &header.shape;
    if (*page_tokens as usize, *chunk_tokens as usize) != (PAGE_TOKENS, CHUNK_TOKENS) {
        return Err(invalid(&format!(
            "its pages have {page_tokens} tokens and its chunks {chunk_tokens}, and those of this program {PAGE_TOKENS} and \
             {CHUNK_TOKENS}"
        )));
    }
    let bytes = u64::from(*layers).saturating_mul(u64::from(*kv_heads)).saturating_mul(u64::from(*head_dim));
    if bytes == 0 || bytes > MOST {
        return Err(invalid("the shape of its model is none"));
    }
    let mut kinds = vec![LayerKind::Full; *layers as usize];
    for (layer, window) in windows {
        let kind = kinds.get_mut(*layer as usize).ok_or_else(|| invalid("it has a window of no layer"))?;
        *kind = LayerKind::Window(size(*window)?);
    }
    Ok(shaped(size(header.options.context_length)?, *kv_heads as usize, *head_dim as usize, kinds))
}

/// The device's pages: the traced ones, or those that a budget pays for.
pub(super) fn pool(
    header: &TraceHeader,
    model: &ModelConfig,
    budget: Option<u64>,
) -> Result<PoolSpec, Error> {
    let kv_type: KvType = word(&header.shape.kv_type)?;
    match budget {
        Some(bytes) => pool_spec(model, kv_type, bytes),
        None => {
            let pages = size(header.shape.pages)?;
            Ok(PoolSpec { pages, head_dim: model.head_dim, kv_type })
        }
    }
}

/// An engine with the traced pages that takes no time.
pub(super) fn timeless(header: &TraceHeader) -> Result<Engine<SimulatedDevice>, Error> {
    let model = model(header)?;
    let spec = pool(header, &model, None)?;
    let cost = crate::scheduler::simulation::DeviceCost {
        step: 0.0,
        row: 0.0,
        context: 0.0,
        logits: 0.0,
        copy_bytes_per_s: f64::INFINITY,
    };
    let rows = (header.shape.step_rows as usize).max(1);
    let clock = Arc::new(ManualClock::new(0));
    engine(model, spec, Steps { cost, rows }, size(header.options.context_length)?, &clock)
}

fn size(count: u64) -> Result<usize, Error> {
    usize::try_from(count.min(MOST)).map_err(|_| invalid("a number is too large for this machine"))
}

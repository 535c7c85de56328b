//! Refusing a model that does not fit in the memory of its device, before anything is allocated.

use kernels::backend::{Backend, PoolSpec};

use super::EngineOptions;
use crate::error::{Error, ErrorKind};
use crate::models::{LoadedModel, Precision};

/// Refuses a model whose weights, pages and activations would not fit.
///
/// # Errors
/// `out_of_memory` with the bytes needed and available.
pub(super) fn check<B: Backend>(
    backend: &B,
    model: &LoadedModel,
    pool: PoolSpec,
    options: EngineOptions,
) -> Result<(), Error> {
    let weights = weight_bytes(model);
    let pages = (pool.pages as u64).saturating_mul(pool.page_bytes() as u64);
    let activations = activation_bytes(model, options);
    let needed = weights.saturating_add(pages).saturating_add(activations);
    let (room, place, fix) = match backend.free_memory()? {
        Some(free) => (Some(free), " of the GPU", ", or use the CPU with --device cpu"),
        None => (available(), "", ""),
    };
    match room {
        Some(available) if needed > available => Err(Error::new(
            ErrorKind::Limit,
            "out_of_memory",
            format!(
                "{needed} bytes of memory{place} are needed (weights {weights}, KV pages {pages}, activations \
                 {activations}) and {available} are available: lower the device budget or choose a smaller model{fix}"
            ),
        )),
        _ => Ok(()),
    }
}

/// Bytes the weights take at most: repacked, a tenth more than stored, for rows that are padded to whole groups; quantised
/// at load, 34 bytes for 32 values.
fn weight_bytes(model: &LoadedModel) -> u64 {
    let stored = match model.precision {
        Precision::Stored => model.weights.file_bytes(),
        Precision::Q8_0 => (model.weights.parameters() / 32).saturating_mul(34),
    };
    stored.saturating_add(stored / 10)
}

/// Bytes of the buffers of a step and of the rotary factors, all f32.
fn activation_bytes(model: &LoadedModel, options: EngineOptions) -> u64 {
    let config = &model.config;
    let heads = 2 * config.heads * config.head_dim + 2 * config.kv_heads * config.head_dim;
    let row = 5 * config.hidden + heads + 2 * config.ffn;
    let rows = (options.step_rows as u64).saturating_mul(row as u64);
    let logits = 32 * config.vocab as u64;
    let rope = (options.context_length as u64).saturating_mul(2 * config.rope_dims as u64);
    rows.saturating_add(logits).saturating_add(rope).saturating_mul(4)
}

/// Bytes this process may still take: what the system has, and what its control group leaves; `None`: not known.
pub fn available() -> Option<u64> {
    let system = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory_available(&text));
    [system, group_available()].into_iter().flatten().min()
}

fn memory_available(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// What the limit of the control group leaves; `None` without a limit.
fn group_available() -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    // Cached pages of files count as used and are given back when memory is asked for.
    let text = read("memory.stat")?;
    let cached = text.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let cached: u64 = cached.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal:       24689764 kB\nMemAvailable:   22000000 kB\n";
        assert_eq!(memory_available(text), Some(22_000_000 * 1024));
        assert_eq!(memory_available("MemAvailable: many kB"), None);
    }
}

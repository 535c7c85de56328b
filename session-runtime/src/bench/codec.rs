//! `bench codec`: what the KV of a fixed text takes packed without loss, beside what bytes alone could be brought to, and how fast it
//! is packed and unpacked by one thread.

use std::sync::Arc;
use std::time::Instant;

use kernels::backend::{Backend, KvType};
use kernels::codec::lossless::{self, CellLayout};

use super::engine::PASSAGE;
use super::{Figure, Setup, median};
use crate::engine::{self, Engine, EngineOptions, LogitRows, SequenceRows};
use crate::error::Error;
use crate::kv::chunk::CHUNK_TOKENS;
use crate::kv::pool::PagePool;
use crate::kv::table::BlockTable;
use crate::models::progress::Silent;
use crate::models::{self, LoadedModel};
use crate::runtime::STEP_ROWS;
use crate::runtime::device::{self, ChosenDevice};

/// Runs of every case.
const RUNS: usize = 5;

/// Measures every model.
pub(super) fn run(setup: &Setup, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    for name in &setup.models {
        let model = models::open_as(name, setup.config.weights, &Silent)?;
        let kv_type = setup.config.kv_type;
        let (layout, cells) = match device::choose(&setup.config, &model.config)? {
            ChosenDevice::Cpu(backend, _) => cells(backend, &model, kv_type)?,
            ChosenDevice::Cuda(backend) => cells(backend, &model, kv_type)?,
        };
        measure(&format!("{name}/{}", kv_type.name()), &layout, &cells, tell)?;
    }
    Ok(())
}

/// The cells of the sealed chunks of the passage, as they are on the device.
fn cells<B: Backend>(
    backend: Arc<B>,
    model: &LoadedModel,
    kv_type: KvType,
) -> Result<(CellLayout, Vec<Vec<u8>>), Error> {
    let tokens = model.tokenizer.encode_text(PASSAGE)?;
    let budget_bytes = (model.config.kv_token_bytes(kv_type) * (tokens.len() + CHUNK_TOKENS)) as u64;
    let options = EngineOptions { budget_bytes, context_length: tokens.len(), step_rows: STEP_ROWS, kv_type };
    let mut engine: Engine<B> = engine::open(backend, model, options, &Silent)?;
    let mut pool = PagePool::new(engine.pool_spec().pages);
    let (layers, kv_heads, head_dim) = {
        let config = engine.config();
        (config.layers, config.kv_heads, config.head_dim)
    };
    let mut table = BlockTable::new(layers, kv_heads);
    table.prepare(&mut pool, 0, tokens.len()).map_err(Error::internal)?;
    let mut logits = Vec::new();
    for (step, rows) in tokens.chunks(STEP_ROWS).enumerate() {
        let start = step * STEP_ROWS;
        let rows = SequenceRows { tokens: rows, start, tables: &table, logits: LogitRows::None };
        engine.forward(&[rows], layers, &mut logits)?;
    }
    let mut cells = Vec::new();
    for start in (0..tokens.len() / CHUNK_TOKENS).map(|chunk| chunk * CHUNK_TOKENS) {
        for layer in 0..layers {
            let pages = table.range(layer, start, start + CHUNK_TOKENS);
            let pages = pages.ok_or_else(|| Error::internal("the passage has no pages"))?;
            cells.push(engine.gather_cell(&pages, CHUNK_TOKENS)?);
        }
    }
    Ok((CellLayout { kv_heads, tokens: CHUNK_TOKENS, head_dim, kv_type }, cells))
}

fn measure(
    case: &str,
    layout: &CellLayout,
    cells: &[Vec<u8>],
    tell: &mut (dyn FnMut(Figure) + Send),
) -> Result<(), Error> {
    let raw = cells.iter().map(Vec::len).sum::<usize>() as f64;
    let (mut packing, mut unpacking, mut packed) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let begun = Instant::now();
        packed = cells.iter().map(|cell| lossless::pack(layout, cell)).collect::<Result<Vec<_>, _>>()?;
        packing.push(raw / begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        for cell in &packed {
            std::hint::black_box(lossless::unpack(layout, cell).map_err(Error::internal)?);
        }
        unpacking.push(raw / begun.elapsed().as_secs_f64());
    }
    let once = |metric, bytes: f64| {
        let (value, against) = (raw / bytes, Some("raw"));
        Figure { against, ratio: Some(value), n: 1, ..figure(case, metric, value, "ratio") }
    };
    tell(once("lossless_ratio", packed.iter().map(Vec::len).sum::<usize>() as f64));
    tell(once("plane_entropy_ratio", cells.iter().map(|cell| plane_entropy(layout, cell)).sum()));
    tell(figure(case, "pack_bytes_per_s", median(packing), "B/s"));
    tell(figure(case, "unpack_bytes_per_s", median(unpacking), "B/s"));
    Ok(())
}

fn figure(case: &str, metric: &'static str, value: f64, unit: &'static str) -> Figure {
    let (against, ratio) = (None, None);
    Figure { bench: "codec", case: case.to_owned(), metric, value, unit, against, ratio, n: RUNS }
}

/// Bytes that the cell would take if each of its bytes were coded by how often it occurs at its place in an element, with K and V
/// apart: what byte planes alone can be brought to, tables of codes not counted.
fn plane_entropy(layout: &CellLayout, cell: &[u8]) -> f64 {
    let CellLayout { kv_heads, tokens, head_dim, kv_type } = *layout;
    let width = match kv_type {
        KvType::F16 => 2,
        KvType::F32 => 4,
        KvType::Int8 => 1,
    };
    let (elements, part) = (tokens * head_dim * width, tokens * kv_type.head_bytes(head_dim));
    let head = |head: usize| &cell[head * 2 * part..][..2 * part];
    let mut bits = 0.0;
    for half in 0..2 {
        for place in 0..width {
            let heads = (0..kv_heads).flat_map(|index| head(index)[half * elements..][..elements].iter());
            bits += entropy(heads.skip(place).step_by(width));
        }
    }
    // Scales, where there are some.
    for place in 0..4 {
        bits += entropy(
            (0..kv_heads).flat_map(|index| head(index)[2 * elements..].iter()).skip(place).step_by(4),
        );
    }
    bits / 8.0
}

/// Bits of bytes that are coded by how often each occurs.
fn entropy<'a>(bytes: impl Iterator<Item = &'a u8>) -> f64 {
    let mut counts = [0_u32; 256];
    bytes.for_each(|byte| counts[usize::from(*byte)] += 1);
    let all = f64::from(counts.iter().sum::<u32>());
    let bits = |count: &u32| f64::from(*count) * (all / f64::from(*count)).log2();
    counts.iter().filter(|count| **count > 0).map(bits).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entropy_of_planes_is_that_of_their_bytes() {
        let layout = CellLayout { kv_heads: 1, tokens: 2, head_dim: 4, kv_type: KvType::F16 };
        // Of K's eight elements the high bytes are four times one and four times another, and the low ones all differ; of V's
        // all are the same.
        let keys = (0..8_u8).flat_map(|index| [index, index / 4]);
        let cell: Vec<u8> = keys.chain([7; 16]).collect();
        assert_eq!(plane_entropy(&layout, &cell), (8.0 * 3.0 + 8.0) / 8.0);
    }
}

//! The forward pass gives the same bits however a prompt is cut, batched and placed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use kernels::backend::KvType;
use kernels::cpu::{CpuBackend, CpuOptions};
use session_runtime::engine::{self, Engine, EngineOptions, LogitRows, SequenceRows};
use session_runtime::kv::pool::PagePool;
use session_runtime::kv::table::BlockTable;
use session_runtime::models;
use session_runtime::models::progress::Silent;

const TOKENS: usize = 97;

fn open(alias: &str, threads: usize) -> Engine<CpuBackend> {
    let model = models::open(alias).unwrap();
    let backend = Arc::new(CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() }).unwrap());
    let options =
        EngineOptions { budget_bytes: 256 << 20, context_length: 512, step_rows: 128, kv_type: KvType::F16 };
    engine::open(backend, &model, options, &Silent).unwrap()
}

fn prompt(engine: &Engine<CpuBackend>, salt: u32) -> Vec<u32> {
    let vocab = engine.config().vocab as u32;
    (0..TOKENS as u32).map(|index| (index * 7919 + salt * 104_729 + 11) % vocab).collect()
}

/// Logits of every row and the cells of every layer after computing `tokens` in the given pieces.
fn compute(
    engine: &mut Engine<CpuBackend>,
    pool: &mut PagePool,
    tokens: &[u32],
    pieces: &[usize],
) -> (Vec<u32>, Vec<Vec<u8>>) {
    let (layers, kv_heads) = (engine.config().layers, engine.config().kv_heads);
    let mut table = BlockTable::new(layers, kv_heads);
    table.prepare(pool, 0, tokens.len()).unwrap();
    let mut logits = Vec::new();
    let mut start = 0;
    for rows in pieces.iter().copied().cycle() {
        let end = (start + rows).min(tokens.len());
        let piece =
            SequenceRows { tokens: &tokens[start..end], start, tables: &table, logits: LogitRows::All };
        engine.forward(&[piece], layers, &mut logits).unwrap();
        start = end;
        if start == tokens.len() {
            break;
        }
    }
    let cells =
        (0..layers).map(|layer| engine.gather_cell(&table.layer(layer), tokens.len()).unwrap()).collect();
    table.truncate(pool, 0);
    (logits.iter().map(|value| value.to_bits()).collect(), cells)
}

fn pieces_do_not_matter(alias: &str) {
    let mut engine = open(alias, 2);
    let mut pool = PagePool::new(engine.pool_spec().pages);
    let tokens = prompt(&engine, 0);
    let whole = compute(&mut engine, &mut pool, &tokens, &[TOKENS]);
    // Other pages than the first time, so that placement is varied too.
    let _held = pool.allocate(11).unwrap();
    for pieces in [vec![7], vec![1], vec![64, 1, 13]] {
        let other = compute(&mut engine, &mut pool, &tokens, &pieces);
        assert!(whole.0 == other.0, "{alias}: logits differ in pieces of {pieces:?}");
        assert!(whole.1 == other.1, "{alias}: K or V differ in pieces of {pieces:?}");
    }
    let mut single = open(alias, 1);
    let other = compute(&mut single, &mut pool, &tokens, &[TOKENS]);
    assert!(whole == other, "{alias}: one thread gives other bits than two");
}

#[test]
fn i1_smollm2_rows_do_not_depend_on_pieces_threads_or_pages() {
    pieces_do_not_matter("smollm2-135m");
}

#[test]
fn i1_qwen_rows_do_not_depend_on_pieces_threads_or_pages() {
    pieces_do_not_matter("qwen2.5-coder-0.5b");
}

#[test]
fn i1_neighbours_in_a_step_do_not_matter() {
    let mut engine = open("smollm2-135m", 2);
    let mut pool = PagePool::new(engine.pool_spec().pages);
    let (layers, kv_heads) = (engine.config().layers, engine.config().kv_heads);
    let prompts: Vec<Vec<u32>> = (0..3).map(|salt| prompt(&engine, salt)).collect();
    let alone: Vec<_> =
        prompts.iter().map(|tokens| compute(&mut engine, &mut pool, tokens, &[TOKENS]).0).collect();
    let mut tables: Vec<BlockTable> = prompts
        .iter()
        .map(|tokens| {
            let mut table = BlockTable::new(layers, kv_heads);
            table.prepare(&mut pool, 0, tokens.len()).unwrap();
            table
        })
        .collect();
    let mut together = vec![Vec::new(); prompts.len()];
    // Ragged on purpose: the first reads 5 tokens a step, the second 1, the third 30.
    let strides = [5, 1, 30];
    let mut done = [0; 3];
    while done.iter().any(|count| *count < TOKENS) {
        let mut rows = Vec::new();
        let mut ends = Vec::new();
        for index in 0..3 {
            let end = (done[index] + strides[index]).min(TOKENS);
            if end > done[index] {
                rows.push(SequenceRows {
                    tokens: &prompts[index][done[index]..end],
                    start: done[index],
                    tables: &tables[index],
                    logits: LogitRows::All,
                });
                ends.push((index, end));
            }
        }
        let mut logits = Vec::new();
        engine.forward(&rows, layers, &mut logits).unwrap();
        let vocab = engine.config().vocab;
        let mut offset = 0;
        for (index, end) in ends {
            let count = (end - done[index]) * vocab;
            together[index].extend(logits[offset..offset + count].iter().map(|value| value.to_bits()));
            offset += count;
            done[index] = end;
        }
    }
    assert!(alone == together, "logits depend on neighbours");
    tables.iter_mut().for_each(|table| table.truncate(&mut pool, 0));
    pool.check([].into_iter()).unwrap();
}

/// Saved cells, recomputed cells and cells that never left are the same bits, for any cut.
#[test]
fn i1_any_mix_of_loaded_and_recomputed_cells_has_the_same_bits() {
    let mut engine = open("smollm2-135m", 2);
    let mut pool = PagePool::new(engine.pool_spec().pages);
    let (layers, kv_heads) = (engine.config().layers, engine.config().kv_heads);
    let tokens = prompt(&engine, 3);
    let mut kept = BlockTable::new(layers, kv_heads);
    kept.prepare(&mut pool, 0, tokens.len()).unwrap();
    let all = SequenceRows { tokens: &tokens, start: 0, tables: &kept, logits: LogitRows::None };
    engine.forward(&[all], layers, &mut Vec::new()).unwrap();
    let saved: Vec<Vec<u8>> =
        (0..layers).map(|layer| engine.gather_cell(&kept.layer(layer), tokens.len()).unwrap()).collect();
    for cut in [0, 1, 13, layers - 1, layers] {
        let mut table = BlockTable::new(layers, kv_heads);
        table.prepare(&mut pool, 0, tokens.len()).unwrap();
        for (layer, cell) in saved.iter().enumerate().skip(cut) {
            engine.scatter_cell(&table.layer(layer), tokens.len(), cell).unwrap();
        }
        let rows = SequenceRows { tokens: &tokens, start: 0, tables: &table, logits: LogitRows::None };
        engine.forward(&[rows], cut, &mut Vec::new()).unwrap();
        for (layer, cell) in saved.iter().enumerate() {
            let now = engine.gather_cell(&table.layer(layer), tokens.len()).unwrap();
            assert!(now == *cell, "layer {layer} differs with cut {cut}");
        }
        table.truncate(&mut pool, 0);
    }
}

//! How close the kernels come to what the machine can do: int8 multiply-adds per second against a
//! measured peak loop, and weight bytes per second against a plain read. Best of several interleaved
//! rounds, because absolute figures drift with the machine's neighbours.
//!
//! `cargo run --release -p kernels --example ratio -- [threads] [name part]`
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement for people")]

use std::hint::black_box;
use std::time::Instant;

use kernels::backend::{AttentionShape, Backend, KvType, MatrixSpec, PageId, PoolSpec, RowGroup};
use kernels::cpu::{CpuBackend, CpuOptions, ceiling};
use kernels::formats::TensorType;

#[path = "../tests/sample/mod.rs"]
mod sample;

use sample::{Random, floats, tensor_of, weights};

const ROUNDS: usize = 5;
const PREFILL: usize = 512;

/// (name, format, outputs, inputs, uses per token): matrices of real models.
const SHAPES: &[(&str, TensorType, usize, usize, usize)] = &[
    ("0.5b gate/up", TensorType::Q5_0, 4864, 896, 48),
    ("0.5b down", TensorType::Q6_K, 896, 4864, 12),
    ("0.5b down", TensorType::Q4_K, 896, 4864, 12),
    ("0.5b q/o", TensorType::Q5_0, 896, 896, 48),
    ("0.5b v/output", TensorType::Q8_0, 16384, 896, 12),
    ("1.5b gate/up", TensorType::Q4_K, 8960, 1536, 56),
    ("1.5b down", TensorType::Q6_K, 1536, 8960, 14),
    ("smol gate/up", TensorType::Q4_1, 1536, 576, 60),
    ("smol down", TensorType::Q4_1, 576, 1536, 30),
    ("f16", TensorType::F16, 1536, 1536, 0),
];

/// Seconds that `f` takes: of this thread on a processor where the system tells, else by the clock. The system
/// counts in ticks of some milliseconds, so `f` is repeated.
fn seconds(threads: usize, f: &mut dyn FnMut()) -> f64 {
    f();
    let start = Instant::now();
    f();
    let times = (0.06 / start.elapsed().as_secs_f64()).ceil().clamp(1.0, 1000.0);
    let mut repeated = || (0..times as usize).for_each(|_| f());
    once(threads, &mut repeated) / times
}

fn once(threads: usize, f: &mut dyn FnMut()) -> f64 {
    let on_processor = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        Some(text.split_whitespace().next()?.parse::<f64>().ok()? / 1e9)
    };
    let (clock, before) = (Instant::now(), on_processor());
    f();
    let elapsed = clock.elapsed().as_secs_f64();
    match (threads, before, on_processor()) {
        (1, Some(before), Some(after)) if after > before => after - before,
        _ => elapsed,
    }
}

/// Best seconds of `f` over some repetitions.
fn best(backend: &CpuBackend, f: &mut dyn FnMut()) -> f64 {
    (0..3).map(|_| seconds(backend.threads(), f)).fold(f64::INFINITY, f64::min)
}

/// Runs `part` on `threads` threads at once; seconds.
fn together(threads: usize, part: &(dyn Fn(usize) + Sync)) -> f64 {
    seconds(threads, &mut || {
        std::thread::scope(|scope| {
            for index in 1..threads {
                scope.spawn(move || part(index));
            }
            part(0);
        });
    })
}

/// Bytes per second of a plain read.
fn read_speed(threads: usize, bytes: &[u64]) -> f64 {
    let part = bytes.len().div_ceil(threads);
    let time = together(threads, &|index| {
        black_box(bytes[index * part..].iter().take(part).fold(0u64, |a, b| a ^ b));
    });
    (bytes.len() * 8) as f64 / time
}

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|text| text.parse().ok()).unwrap_or(0);
    let filter = args.next().unwrap_or_default();
    let backend = CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() }).unwrap();
    println!("{}", backend.describe());
    let big = vec![1u64; 16 << 20];
    for &(name, format, outputs, inputs, _) in SHAPES.iter().filter(|shape| shape.0.contains(&filter)) {
        linear(&backend, &big, name, format, outputs, inputs);
    }
    if "attention".contains(&filter) || filter.is_empty() {
        attention(&backend, "0.5b prefill", 14, 2, 64, PREFILL, 0);
        attention(&backend, "0.5b decode 4k", 14, 2, 64, 1, 4095);
        attention(&backend, "1.5b prefill", 12, 2, 128, PREFILL, 0);
    }
}

fn linear(backend: &CpuBackend, big: &[u64], name: &str, format: TensorType, outputs: usize, inputs: usize) {
    let mut random = Random::new(1);
    let spec = MatrixSpec { name: name.to_string(), format, rows: outputs, cols: inputs };
    let bytes = weights(&mut random, format, outputs, inputs);
    // Enough copies that a matrix-vector product finds none of them in a cache.
    let copies = (96usize << 20).div_ceil(bytes.len());
    let matrices: Vec<_> = (0..copies).map(|_| backend.load_matrix(&spec, &bytes).unwrap()).collect();
    let x = tensor_of(backend, &floats(&mut random, PREFILL * inputs, 1.0), inputs);
    let mut out = backend.tensor(PREFILL, outputs).unwrap();
    let threads = backend.threads();
    let macs = (PREFILL * outputs * inputs) as f64;
    let resident = matrices.iter().map(|m| backend.matrix_bytes(m)).sum::<usize>() as f64;
    let (mut products, mut reads) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let before = ceiling::int8_multiply_adds(threads);
        let time =
            seconds(threads, &mut || backend.linear(&matrices[0], None, &x, &mut out, PREFILL).unwrap());
        products.push((macs / time, (before + ceiling::int8_multiply_adds(threads)) / 2.0));
        let before = read_speed(threads, big);
        let time = seconds(threads, &mut || {
            for matrix in &matrices {
                backend.linear(matrix, None, &x, &mut out, 1).unwrap();
            }
        });
        reads.push((resident / time, (before + read_speed(threads, big)) / 2.0));
    }
    let ((macs, of_peak), (read, of_read)) = (median(&products), median(&reads));
    println!(
        "{name:13} {format:5} {outputs:5} x {inputs:4}: {:6.1} GMAC/s {:3.0}% of peak | one row {:5.1} GB/s {:3.0}% of reading, {:.2} of the file's bytes",
        macs / 1e9,
        100.0 * of_peak,
        read / 1e9,
        100.0 * of_read,
        resident / (copies * bytes.len()) as f64,
    );
}

/// Of (value, what the machine could do then): the best value and the median share.
fn median(rounds: &[(f64, f64)]) -> (f64, f64) {
    let mut shares: Vec<f64> = rounds.iter().map(|(value, top)| value / top).collect();
    shares.sort_by(f64::total_cmp);
    (rounds.iter().map(|round| round.0).fold(0.0, f64::max), shares[shares.len() / 2])
}

fn attention(
    backend: &CpuBackend,
    name: &str,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rows: usize,
    start: usize,
) {
    let tokens = start + rows;
    let pages = tokens.div_ceil(16);
    let pool = backend.pool(PoolSpec { pages: pages * kv_heads, head_dim, kv_type: KvType::F16 }).unwrap();
    let tables: Vec<Vec<PageId>> =
        (0..kv_heads).map(|h| (0..pages).map(|p| PageId((p * kv_heads + h) as u32)).collect()).collect();
    let tables: Vec<&[PageId]> = tables.iter().map(Vec::as_slice).collect();
    let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.1, window: None };
    let groups = [RowGroup { tables: &tables, first_row: 0, rows, start }];
    let q = tensor_of(backend, &floats(&mut Random::new(2), rows * heads * head_dim, 1.0), heads * head_dim);
    let mut out = backend.tensor(rows, heads * head_dim).unwrap();
    let seconds = (0..ROUNDS)
        .map(|_| best(backend, &mut || backend.attention(&pool, shape, &groups, &q, &mut out, None).unwrap()))
        .fold(f64::INFINITY, f64::min);
    let macs = (rows * (start + rows.div_ceil(2)) * heads * head_dim * 2) as f64;
    println!("attention {name:14}: {:6.1} GMAC/s, {:.3} ms a layer", macs / seconds / 1e9, seconds * 1e3);
}

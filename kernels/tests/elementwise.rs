//! Norm, rope, activation and the small copies: against f64 references and across instruction sets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod sample;

use kernels::backend::{Backend, RopePairing};
use kernels::cpu::{CpuBackend, CpuOptions, CpuTensor, Isa, Rounding, best_isa};
use kernels::error::KernelError;
use kernels::reference;
use proptest::prelude::*;
use sample::{Random, backend, bits, floats, tensor_of};

fn values(backend: &CpuBackend, tensor: &CpuTensor, rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * cols];
    backend.read(tensor, rows, &mut out).unwrap();
    out
}

fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() <= tolerance * (1.0 + want.abs()), "[{i}] {got} {want}");
    }
}

/// norms, add, scale, gates and rope of the same rows; everything they give.
fn run_all(
    backend: &CpuBackend,
    x: &[f32],
    y: &[f32],
    weight: &[f32],
    dim: usize,
    first: usize,
) -> [Vec<f32>; 9] {
    let cols = weight.len();
    let rows = x.len() / cols;
    let head_weight = backend.load_vector("head norm", &weight[..dim]).unwrap();
    let weight = backend.load_vector("norm", weight).unwrap();
    let (x, y) = (tensor_of(backend, x, cols), tensor_of(backend, y, cols));
    let mut out = backend.tensor(rows, cols).unwrap();
    backend.rms_norm(&x, &weight, 1e-5, &mut out, rows).unwrap();
    let norm = values(backend, &out, rows, cols);
    backend.add(&mut out, &y, rows).unwrap();
    let sum = values(backend, &out, rows, cols);
    let mut gate = tensor_of(backend, &values(backend, &x, rows, cols), cols);
    backend.swiglu(&mut gate, &y, rows).unwrap();
    let gated = values(backend, &gate, rows, cols);
    let mut gate = tensor_of(backend, &values(backend, &x, rows, cols), cols);
    backend.geglu(&mut gate, &y, rows).unwrap();
    let gelu = values(backend, &gate, rows, cols);
    let mut heads = tensor_of(backend, &values(backend, &x, rows, cols), cols);
    backend.head_norm(&mut heads, cols / dim, &head_weight, 1e-5, rows).unwrap();
    let by_head = values(backend, &heads, rows, cols);
    let mut scaled = tensor_of(backend, &values(backend, &x, rows, cols), cols);
    backend.scale(&mut scaled, 1.7, rows).unwrap();
    let scaled = values(backend, &scaled, rows, cols);
    let mut by_channel = tensor_of(backend, &values(backend, &x, rows, cols), cols);
    backend.scale_channels(&mut by_channel, &weight, rows).unwrap();
    let by_channel = values(backend, &by_channel, rows, cols);
    let table = backend.rope_table(10_000.0, dim, first + rows + 1).unwrap();
    let positions: Vec<u32> = (first as u32..).take(rows).collect();
    let [halves, adjacent] = [RopePairing::Halves, RopePairing::Adjacent].map(|pairing| {
        let mut turned = tensor_of(backend, &values(backend, &x, rows, cols), cols);
        backend.rope(&mut turned, cols / dim, dim, &table, pairing, &positions).unwrap();
        values(backend, &turned, rows, cols)
    });
    [norm, sum, gated, halves, adjacent, gelu, by_head, scaled, by_channel]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn i1_rows_are_the_same_everywhere_and_right(
        heads in 1usize..5, half in 1usize..40, rows in 1usize..40, first in 0usize..3000, seed: u64,
    ) {
        let dim = 2 * half;
        let cols = heads * dim;
        let mut random = Random::new(seed);
        let (x, y) = (floats(&mut random, rows * cols, 9.0), floats(&mut random, rows * cols, 2.0));
        let weight = floats(&mut random, cols, 1.5);
        let got = run_all(&backend(2, best_isa()), &x, &y, &weight, dim, first);
        for (isa, threads) in [(Isa::Scalar, 1), (best_isa(), 1), (best_isa(), 3)] {
            let other = run_all(&backend(threads, isa), &x, &y, &weight, dim, first);
            for (got, other) in got.iter().zip(&other) {
                prop_assert_eq!(bits(got), bits(other));
            }
        }
        let row = rows / 2;
        let alone = run_all(&backend(2, best_isa()), &x[row * cols..][..cols], &y[row * cols..][..cols], &weight, dim, first + row);
        for (got, alone) in got.iter().zip(&alone) {
            prop_assert_eq!(bits(&got[row * cols..][..cols]), bits(alone));
        }
        let [norm, sum, gated, halves, adjacent, gelu, by_head, scaled, by_channel] = got;
        close(&gelu, &reference::geglu(&x, &y), 1e-6);
        close(&by_head, &reference::head_norm(&x, &weight[..dim], 1e-5), 2e-6);
        close(&scaled, &reference::scale(&x, 1.7), 1e-7);
        close(&by_channel, &reference::scale_channels(&x, &weight), 1e-7);
        close(&norm, &reference::rms_norm(&x, &weight, 1e-5), 2e-6);
        let sums: Vec<f64> = norm.iter().zip(&y).map(|(a, b)| f64::from(a + b)).collect();
        close(&sum, &sums, 0.0);
        close(&gated, &reference::swiglu(&x, &y), 1e-6);
        for (turned, pairing) in [(halves, RopePairing::Halves), (adjacent, RopePairing::Adjacent)] {
            let want: Vec<f64> = x.chunks_exact(cols).zip(first as u32..)
                .flat_map(|(row, position)| reference::rope(row, dim, 10_000.0, pairing, position)).collect();
            close(&turned, &want, 1e-5);
        }
    }
}

#[test]
fn gates_saturate_without_overflow() {
    let backend = backend(1, best_isa());
    let mut gate = tensor_of(&backend, &[-1e30, -200.0, -88.5, 0.0, 200.0, 1e30], 6);
    let up = tensor_of(&backend, &[1.0; 6], 6);
    backend.swiglu(&mut gate, &up, 1).unwrap();
    let got = values(&backend, &gate, 1, 6);
    assert!(got[0] <= 0.0 && got[0].abs() < 1e-7, "{got:?}");
    assert!(got[1].abs() < 1e-30 && got[2].abs() < 1e-30);
    assert_eq!(&got[3..], &[0.0, 200.0, 1e30]);
    let mut gate = tensor_of(&backend, &[-1e30, -200.0, -20.0, 0.0, 200.0, 1e30], 6);
    backend.geglu(&mut gate, &up, 1).unwrap();
    let got = values(&backend, &gate, 1, 6);
    assert!(got[..3].iter().all(|value| *value <= 0.0 && value.abs() < 1e-7), "{got:?}");
    assert_eq!(&got[3..], &[0.0, 200.0, 1e30]);
}

#[test]
fn rows_are_gathered_written_and_read() {
    let backend = backend(1, best_isa());
    let x = tensor_of(&backend, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
    let mut out = backend.tensor(2, 2).unwrap();
    backend.gather_rows(&x, &[2, 0], &mut out).unwrap();
    assert_eq!(values(&backend, &out, 2, 2), [5.0, 6.0, 1.0, 2.0]);
    assert!(matches!(
        backend.gather_rows(&x, &[3], &mut out),
        Err(KernelError::OutOfRange { index: 3, limit: 3, .. })
    ));
    assert!(backend.gather_rows(&x, &[0, 1, 2], &mut out).is_err());
    assert!(backend.write(&mut out, &[0.0; 3]).is_err());
    assert!(backend.write(&mut out, &[0.0; 6]).is_err());
    assert!(backend.read(&x, 3, &mut [0.0; 5]).is_err());
    assert!(backend.read(&x, 4, &mut [0.0; 8]).is_err());
}

#[test]
fn shapes_and_positions_are_checked() {
    let backend = backend(1, best_isa());
    let (mut x, narrow) = (backend.tensor(2, 8).unwrap(), backend.tensor(2, 4).unwrap());
    let weight = backend.load_vector("norm", &[1.0; 7]).unwrap();
    let mut out = backend.tensor(2, 8).unwrap();
    assert!(matches!(backend.rms_norm(&x, &weight, 1e-5, &mut out, 1), Err(KernelError::Shape { .. })));
    assert!(backend.add(&mut x, &narrow, 1).is_err());
    assert!(backend.swiglu(&mut x, &narrow, 1).is_err());
    assert!(backend.geglu(&mut x, &narrow, 1).is_err());
    assert!(backend.head_norm(&mut x, 2, &weight, 1e-5, 1).is_err());
    assert!(backend.scale(&mut x, 2.0, 3).is_err());
    assert!(backend.add(&mut x, &out, 3).is_err());
    let table = backend.rope_table(10_000.0, 8, 4).unwrap();
    let turn = |x: &mut CpuTensor, heads, dim, positions: &[u32]| {
        backend.rope(x, heads, dim, &table, RopePairing::Halves, positions)
    };
    assert!(turn(&mut x, 1, 8, &[0, 3]).is_ok());
    assert!(matches!(turn(&mut x, 1, 8, &[4]), Err(KernelError::OutOfRange { index: 4, limit: 4, .. })));
    assert!(turn(&mut x, 2, 4, &[0]).is_err());
    assert!(turn(&mut x, 2, 8, &[0]).is_err());
    assert!(turn(&mut x, 1, 8, &[0, 1, 2]).is_err());
    for (base, dims, positions) in
        [(1e4, 7, 1), (1e4, 0, 1), (1e4, 8, 0), (f32::NAN, 8, 1), (-1.0, 8, 1), (1e4, 8, usize::MAX)]
    {
        assert!(backend.rope_table(base, dims, positions).is_err());
    }
}

#[test]
fn options_are_checked_and_described() {
    let backend =
        CpuBackend::new(CpuOptions { threads: 2, isa: Some(Isa::Scalar), ..CpuOptions::default() }).unwrap();
    assert_eq!((backend.threads(), backend.isa()), (2, Isa::Scalar));
    assert_eq!((backend.name(), backend.numerics_class()), ("cpu", "cpu-2-fast"));
    let fine = CpuBackend::new(CpuOptions { rounding: Rounding::Fine, ..CpuOptions::default() }).unwrap();
    assert_eq!(fine.numerics_class(), "cpu-2-fine");
    assert_eq!(backend.describe(), "CPU, scalar, 2 threads");
    assert!(CpuBackend::new(CpuOptions::default()).unwrap().threads() >= 1);
    assert!(matches!(
        CpuBackend::new(CpuOptions { threads: 100_000, ..CpuOptions::default() }),
        Err(KernelError::OutOfRange { .. })
    ));
    if !Isa::Avx2.is_available() {
        let refused =
            CpuBackend::new(CpuOptions { threads: 1, isa: Some(Isa::Avx2), ..CpuOptions::default() }).err();
        assert_eq!(refused, Some(KernelError::MissingIsa { isa: "AVX2" }));
    }
}

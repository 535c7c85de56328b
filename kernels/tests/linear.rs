//! `linear` and `embed`: against the reference, and the same bits however the work is cut.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod sample;

use kernels::backend::{Backend, MatrixSpec};
use kernels::cpu::{CpuBackend, CpuOptions, Isa, Rounding, best_isa};
use kernels::error::KernelError;
use kernels::formats::TensorType;
use kernels::reference;
use proptest::prelude::*;
use sample::{Random, backend, bits, floats, tensor_of, weights};

fn spec(format: TensorType, rows: usize, cols: usize) -> MatrixSpec {
    MatrixSpec { name: "blk.0.test.weight".to_string(), format, rows, cols }
}

/// One product: the bytes of a matrix, a bias and inputs.
struct Case {
    spec: MatrixSpec,
    bytes: Vec<u8>,
    bias: Vec<f32>,
    x: Vec<f32>,
}

impl Case {
    fn new(format: TensorType, outputs: usize, blocks: usize, rows: usize, seed: u64) -> Self {
        let odd = seed as usize % 8;
        let cols = match format.block_size() {
            1 => blocks * 8 + odd,
            32 => 32 * (blocks * 8 - odd),
            size => blocks * size,
        };
        let mut random = Random::new(seed);
        let bytes = weights(&mut random, format, outputs, cols);
        let mut x = floats(&mut random, rows * cols, 1.0);
        // A row that is all zero, and one of wild magnitudes.
        x[..cols].fill(0.0);
        if rows > 2 {
            x[cols..2 * cols].iter_mut().for_each(|v| *v *= 1e6);
            x[2 * cols] = -3e4;
        }
        Self { spec: spec(format, outputs, cols), bytes, bias: floats(&mut random, outputs, 1.0), x }
    }

    /// The product of rows `first..first + rows`.
    fn run(&self, backend: &CpuBackend, first: usize, rows: usize) -> Vec<f32> {
        let matrix = backend.load_matrix(&self.spec, &self.bytes).unwrap();
        let bias = backend.load_vector("bias", &self.bias).unwrap();
        let x =
            tensor_of(backend, &self.x[first * self.spec.cols..][..rows * self.spec.cols], self.spec.cols);
        let mut out = backend.tensor(rows, self.spec.rows).unwrap();
        backend.linear(&matrix, Some(&bias), &x, &mut out, rows).unwrap();
        let mut values = vec![0.0; rows * self.spec.rows];
        backend.read(&out, rows, &mut values).unwrap();
        values
    }
}

fn precise(threads: usize, isa: Isa, rounding: Rounding) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, isa: Some(isa), rounding }).unwrap()
}

fn any_format() -> impl Strategy<Value = TensorType> {
    proptest::sample::select(TensorType::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn i1_linear_is_the_same_on_every_instruction_set_and_thread_count(
        format in any_format(), outputs in 1usize..70, blocks in 1usize..6, rows in 1usize..80, seed: u64,
    ) {
        let case = Case::new(format, outputs, blocks, rows, seed);
        for rounding in [Rounding::Fast, Rounding::Fine] {
            let want = bits(&case.run(&precise(1, Isa::Scalar, rounding), 0, rows));
            for (threads, isa) in (1..).zip(Isa::available()) {
                let got = bits(&case.run(&precise(threads, isa, rounding), 0, rows));
                prop_assert_eq!(&got, &want, "{}", isa.name());
            }
        }
    }

    #[test]
    fn i1_linear_gives_a_row_the_same_bits_in_any_company(
        format in any_format(), outputs in 1usize..40, blocks in 1usize..6, rows in 2usize..150, cut in 1usize..150,
        fine: bool, seed: u64,
    ) {
        let case = Case::new(format, outputs, blocks, rows, seed);
        let backend = precise(2, best_isa(), if fine { Rounding::Fine } else { Rounding::Fast });
        let want = bits(&case.run(&backend, 0, rows));
        let mut pieces = Vec::new();
        for first in (0..rows).step_by(cut) {
            pieces.extend(bits(&case.run(&backend, first, cut.min(rows - first))));
        }
        prop_assert_eq!(&pieces, &want);
        let single: Vec<u32> = (0..rows).flat_map(|row| bits(&case.run(&backend, row, 1))).collect();
        prop_assert_eq!(&single, &want);
    }

    #[test]
    fn embed_gives_the_values_of_the_format(format in any_format(), outputs in 1usize..40, blocks in 1usize..4, seed: u64) {
        let case = Case::new(format, outputs, blocks, 1, seed);
        let backend = backend(2, best_isa());
        let table = backend.load_matrix(&case.spec, &case.bytes).unwrap();
        let ids: Vec<u32> = (0..outputs as u32).rev().collect();
        let mut out = backend.tensor(outputs, case.spec.cols).unwrap();
        backend.embed(&table, &ids, &mut out).unwrap();
        let mut got = vec![0.0; outputs * case.spec.cols];
        backend.read(&out, outputs, &mut got).unwrap();
        let all = reference::dequantise("t", format, &case.bytes).unwrap();
        let want: Vec<f32> = all.chunks_exact(case.spec.cols).rev().flatten().copied().collect();
        prop_assert_eq!(bits(&got), bits(&want));
    }

    #[test]
    fn linear_is_within_the_rounding_of_its_inputs(
        format in any_format(), outputs in 1usize..30, blocks in 1usize..5, rows in 1usize..20,
        fine: bool, seed: u64,
    ) {
        let case = Case::new(format, outputs, blocks, rows, seed);
        let cols = case.spec.cols;
        // The second digit counts in 254ths of the first's steps.
        let (rounding, units) = if fine { (Rounding::Fine, 254.0) } else { (Rounding::Fast, 1.0) };
        let weights = reference::dequantise("t", format, &case.bytes).unwrap();
        let want = reference::linear(&case.x, &weights, Some(&case.bias), cols);
        let got = case.run(&precise(2, best_isa(), rounding), 0, rows);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let (row, output) = (i / outputs, i % outputs);
            let (x, w) = (&case.x[row * cols..][..cols], &weights[output * cols..][..cols]);
            // An activation is off by at most half a step of its block, a sum by the rounding of its terms.
            let mut bound = f64::from(case.bias[output].abs()) * 1e-6 + 1e-12;
            for (x, w) in x.chunks(32).zip(w.chunks(32)) {
                let step = if format.is_quantised() { x.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0 } else { 0.0 };
                for (x, w) in x.iter().zip(w) {
                    bound += f64::from(w.abs()) * (0.501 * f64::from(step) / units + 2e-6 * f64::from(x.abs()));
                    // Minima and codes of affine formats are summed apart and may cancel.
                    bound += 1e-5 * f64::from(step);
                }
            }
            prop_assert!((f64::from(*got) - want).abs() <= bound, "{format} [{row}][{output}]: {got} {want} {bound}");
        }
    }
}

#[test]
fn a_float_matrix_needs_no_block_size_and_a_quantised_one_says_its_own() {
    let backend = backend(1, best_isa());
    for format in TensorType::ALL.into_iter().filter(|f| f.is_quantised()) {
        let cols = format.block_size() + 16;
        let refused = backend.load_matrix(&spec(format, 2, cols), &[]).err().unwrap();
        assert_eq!(
            refused,
            KernelError::BlockSize {
                tensor: "blk.0.test.weight".into(),
                format,
                cols,
                block: format.block_size()
            }
        );
    }
}

#[test]
fn damaged_weights_are_refused_by_name() {
    let backend = backend(2, best_isa());
    for format in TensorType::ALL {
        let (rows, cols) = (11, 512);
        let mut random = Random::new(3);
        let good = weights(&mut random, format, rows, cols);
        assert!(backend.load_matrix(&spec(format, rows, cols), &good).is_ok());
        let short = backend.load_matrix(&spec(format, rows, cols), &good[1..]).err().unwrap();
        assert!(matches!(short, KernelError::ByteCount { .. }), "{short}");
        let row_bytes = good.len() / rows;
        let scale = match format {
            TensorType::Q6_K => 208,
            TensorType::F32 => 2,
            _ => 0,
        };
        for bad_half in [0x7c00u16, 0xfc00, 0x7e01] {
            let raw = match format {
                TensorType::F32 | TensorType::BF16 => 0x7f80 | (bad_half & 0x8001),
                _ => bad_half,
            };
            let mut bad = good.clone();
            bad[9 * row_bytes + scale..][..2].copy_from_slice(&raw.to_le_bytes());
            let refused = backend.load_matrix(&spec(format, rows, cols), &bad).err();
            assert_eq!(
                refused,
                Some(KernelError::NotFinite { tensor: "blk.0.test.weight".into(), row: 9 }),
                "{format}"
            );
        }
    }
    assert_eq!(
        backend.load_vector("norm", &[1.0, f32::NAN]).err(),
        Some(KernelError::NotFinite { tensor: "norm".into(), row: 1 })
    );
}

#[test]
fn shapes_are_checked() {
    let backend = backend(1, best_isa());
    let case = Case::new(TensorType::Q8_0, 10, 2, 3, 1);
    let matrix = backend.load_matrix(&case.spec, &case.bytes).unwrap();
    let x = backend.tensor(3, case.spec.cols).unwrap();
    let narrow = backend.tensor(3, 32).unwrap();
    let mut out = backend.tensor(2, 10).unwrap();
    assert!(matches!(backend.linear(&matrix, None, &narrow, &mut out, 1), Err(KernelError::Shape { .. })));
    assert!(matches!(backend.linear(&matrix, None, &x, &mut out, 3), Err(KernelError::OutOfRange { .. })));
    assert!(backend.linear(&matrix, None, &x, &mut out, 0).is_ok());
    let bias = backend.load_vector("bias", &[0.0; 9]).unwrap();
    assert!(matches!(backend.linear(&matrix, Some(&bias), &x, &mut out, 1), Err(KernelError::Shape { .. })));
    let mut rows = backend.tensor(2, case.spec.cols).unwrap();
    assert!(matches!(
        backend.embed(&matrix, &[10], &mut rows),
        Err(KernelError::OutOfRange { index: 10, limit: 10, .. })
    ));
    assert!(matches!(backend.embed(&matrix, &[0, 1, 2], &mut rows), Err(KernelError::OutOfRange { .. })));
    for (rows, cols) in [(0, 1), (1, 0), (usize::MAX, 2)] {
        assert!(matches!(backend.tensor(rows, cols), Err(KernelError::Size { .. })));
    }
    assert!(matches!(
        backend.load_matrix(&spec(TensorType::F32, usize::MAX, 2), &[]),
        Err(KernelError::Size { .. })
    ));
    assert!(matches!(backend.load_matrix(&spec(TensorType::F32, 0, 2), &[]), Err(KernelError::Size { .. })));
}

#[test]
fn activations_that_are_not_finite_poison_their_row_alone() {
    let backend = backend(2, best_isa());
    for format in [TensorType::Q4_0, TensorType::Q4_K, TensorType::Q6_K, TensorType::F16] {
        let mut case = Case::new(format, 9, 2, 7, 5);
        let clean = case.run(&backend, 0, 7);
        let cols = case.spec.cols;
        case.x[3 * cols + 1] = f32::INFINITY;
        case.x[4 * cols + 5] = f32::NAN;
        let got = case.run(&backend, 0, 7);
        for (row, (got, clean)) in got.chunks(9).zip(clean.chunks(9)).enumerate() {
            match row {
                3 | 4 => assert!(got.iter().all(|v| !v.is_finite()), "{format} {got:?}"),
                _ => assert_eq!(bits(got), bits(clean)),
            }
        }
    }
}

#[test]
fn i1_sums_hold_at_the_ends_of_their_range() {
    // Codes all at one end and activations all at +-127: the largest sums there are.
    for format in TensorType::ALL.into_iter().filter(|format| format.is_quantised()) {
        let (rows, cols) = (9, 2 * format.block_size());
        for fill in [0x00u8, 0xff, 0x80] {
            let mut bytes = weights(&mut Random::new(6), format, rows, cols);
            let scales = match format {
                TensorType::Q6_K => 208..210,
                TensorType::Q4_1 | TensorType::Q5_1 => 0..4,
                TensorType::Q4_K | TensorType::Q5_K => 0..16,
                _ => 0..2,
            };
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                let keep = block[scales.clone()].to_vec();
                block.fill(fill);
                block[scales.clone()].copy_from_slice(&keep);
            }
            let x: Vec<f32> =
                (0..3 * cols).map(|i| [0.5, -0.5, if i % 4 < 2 { 0.5 } else { -0.5 }][i / cols]).collect();
            let case = Case { spec: spec(format, rows, cols), bias: vec![0.0; rows], x, bytes };
            let got = case.run(&backend(2, best_isa()), 0, 3);
            assert_eq!(bits(&case.run(&backend(1, Isa::Scalar), 0, 3)), bits(&got));
            let values = reference::dequantise("t", format, &case.bytes).unwrap();
            let want = reference::linear(&case.x, &values, None, cols);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let row = &values[i % rows * cols..][..cols];
                let bound = row.iter().map(|v| f64::from(v.abs())).sum::<f64>() * 1e-6 + 1e-5;
                assert!((f64::from(*got) - want).abs() <= bound, "{format} {fill:x} {i}: {got} {want}");
            }
        }
    }
}

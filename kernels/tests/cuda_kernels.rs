//! The kernels of a GPU, run on the CPU through the shim behind the real launch code: against the references, and the
//! same bits however rows are put together and in whatever order threads run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod sample;
mod shim;

use kernels::backend::{Backend, MatrixSpec, RopePairing};
use kernels::cpu::best_isa;
use kernels::cuda::{CudaBackend, SOURCES, source_of};
use kernels::formats::TensorType;
use kernels::reference;
use proptest::prelude::*;
use sample::{Random, bits, floats, tensor_of, weights};

fn values<B: Backend>(backend: &B, tensor: &B::Tensor, rows: usize, cols: usize) -> Vec<f32> {
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

#[test]
fn every_kernel_of_the_shim_belongs_to_a_source_and_every_source_has_one() {
    let kernels = shim::Shim::get().kernels();
    for name in &kernels {
        assert!(source_of(name).is_some(), "{name}");
    }
    for source in SOURCES {
        let has = |name: &String| source_of(name).is_some_and(|found| found.file == source.file);
        assert!(kernels.iter().any(has), "{}", source.file);
    }
}

/// Results of one kind of computation after another, for rows of `weight.len()` channels from position `first` on. The
/// first two are sums, whose order differs from the CPU's.
fn run_all<B: Backend>(
    backend: &B,
    x: &[f32],
    y: &[f32],
    weight: &[f32],
    dim: usize,
    first: usize,
) -> Vec<Vec<f32>> {
    let cols = weight.len();
    let rows = x.len() / cols;
    let head_weight = backend.load_vector("head norm", &weight[..dim]).unwrap();
    let weight = backend.load_vector("norm", weight).unwrap();
    let y = tensor_of(backend, y, cols);
    // One row more than is computed: it has to stay.
    let in_place = |change: &dyn Fn(&mut B::Tensor)| {
        let mut tensor = backend.tensor(rows + 1, cols).unwrap();
        backend.write(&mut tensor, &[x, &vec![7.5; cols]].concat()).unwrap();
        change(&mut tensor);
        let mut all = values(backend, &tensor, rows + 1, cols);
        assert!(all.split_off(rows * cols).iter().all(|value| *value == 7.5));
        all
    };
    let table = backend.rope_table(10_000.0, dim, first + rows + 1).unwrap();
    let positions: Vec<u32> = (first as u32..).take(rows).collect();
    let [halves, adjacent] = [RopePairing::Halves, RopePairing::Adjacent]
        .map(|pairing| in_place(&|x| backend.rope(x, cols / dim, dim, &table, pairing, &positions).unwrap()));
    let norm = in_place(&|out| {
        backend.rms_norm(&tensor_of(backend, x, cols), &weight, 1e-5, out, rows).unwrap();
    });
    let by_head = in_place(&|x| backend.head_norm(x, cols / dim, &head_weight, 1e-5, rows).unwrap());
    vec![
        norm,
        by_head,
        in_place(&|x| backend.add(x, &y, rows).unwrap()),
        in_place(&|x| backend.swiglu(x, &y, rows).unwrap()),
        in_place(&|x| backend.geglu(x, &y, rows).unwrap()),
        in_place(&|x| backend.scale(x, 1.7, rows).unwrap()),
        in_place(&|x| backend.scale_channels(x, &weight, rows).unwrap()),
        halves,
        adjacent,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn i1_rows_are_right_and_the_same_in_any_company_and_order(
        heads in 1usize..5, half in 1usize..90, rows in 1usize..12, first in 0usize..3000, seed: u64,
    ) {
        let dim = 2 * half;
        let cols = heads * dim;
        let mut random = Random::new(seed);
        let (x, y) = (floats(&mut random, rows * cols, 9.0), floats(&mut random, rows * cols, 2.0));
        let weight = floats(&mut random, cols, 1.5);
        let backend = shim::backend();
        let got = run_all(&backend, &x, &y, &weight, dim, first);
        for order in [1, 2 + seed as u32 % 1000] {
            let other = run_all(&shim::recorded(order).0, &x, &y, &weight, dim, first);
            for (got, other) in got.iter().zip(&other) {
                prop_assert_eq!(bits(got), bits(other));
            }
        }
        let row = rows / 2;
        let [x_row, y_row] = [&x, &y].map(|all| &all[row * cols..][..cols]);
        let alone = run_all(&backend, x_row, y_row, &weight, dim, first + row);
        for (got, alone) in got.iter().zip(&alone) {
            prop_assert_eq!(bits(&got[row * cols..][..cols]), bits(alone));
        }
        // What has no sum has the CPU's very bits.
        let cpu = run_all(&sample::backend(1, best_isa()), &x, &y, &weight, dim, first);
        for (i, (got, cpu)) in got.iter().zip(&cpu).enumerate().skip(2) {
            prop_assert_eq!(bits(got), bits(cpu), "{}", i);
        }
        close(&got[0], &reference::rms_norm(&x, &weight, 1e-5), 2e-6);
        close(&got[1], &reference::head_norm(&x, &weight[..dim], 1e-5), 2e-6);
        close(&got[3], &reference::swiglu(&x, &y), 1e-6);
        close(&got[4], &reference::geglu(&x, &y), 1e-6);
        close(&got[5], &reference::scale(&x, 1.7), 1e-7);
        close(&got[6], &reference::scale_channels(&x, &weight), 1e-7);
        for (turned, pairing) in [(&got[7], RopePairing::Halves), (&got[8], RopePairing::Adjacent)] {
            let want: Vec<f64> = x.chunks_exact(cols).zip(first as u32..)
                .flat_map(|(row, position)| reference::rope(row, dim, 10_000.0, pairing, position)).collect();
            close(turned, &want, 1e-5);
        }
    }
}

#[test]
fn gates_saturate_without_overflow_and_tell_of_nan() {
    let backend = shim::backend();
    let up = tensor_of(&backend, &[1.0; 7], 7);
    let gate = |act: &dyn Fn(&mut <CudaBackend as Backend>::Tensor)| {
        let mut gate = tensor_of(&backend, &[-1e30, -200.0, -88.5, 0.0, 200.0, 1e30, f32::NAN], 7);
        act(&mut gate);
        values(&backend, &gate, 1, 7)
    };
    for got in [
        gate(&|gate| backend.swiglu(gate, &up, 1).unwrap()),
        gate(&|gate| backend.geglu(gate, &up, 1).unwrap()),
    ] {
        assert!(got[..3].iter().all(|value| *value <= 0.0 && value.abs() < 1e-7), "{got:?}");
        assert_eq!(&got[3..6], &[0.0, 200.0, 1e30]);
        assert!(got[6].is_nan());
    }
}

#[test]
fn embed_and_dequantise_give_the_values_of_the_format() {
    let backend = shim::backend();
    let mut random = Random::new(1);
    for format in TensorType::ALL {
        for (rows, blocks) in [(1, 1), (5, 3), (33, 2)] {
            // Rows of floats may end anywhere.
            let cols =
                if format.is_quantised() { blocks * format.block_size() } else { blocks * 8 + rows % 8 };
            let bytes = weights(&mut random, format, rows, cols);
            let spec = MatrixSpec { name: "t".to_string(), format, rows, cols };
            let matrix = backend.load_matrix(&spec, &bytes).unwrap();
            let want = reference::dequantise("t", format, &bytes).unwrap();
            let mut out = backend.tensor(rows, cols).unwrap();
            backend.dequantise(&matrix, &mut out).unwrap();
            assert_eq!(bits(&values(&backend, &out, rows, cols)), bits(&want), "{format}");
            let ids: Vec<u32> = (0..rows as u32).rev().collect();
            backend.embed(&matrix, &ids, &mut out).unwrap();
            let reversed: Vec<f32> = want.chunks_exact(cols).rev().flatten().copied().collect();
            assert_eq!(bits(&values(&backend, &out, rows, cols)), bits(&reversed), "{format}");
        }
    }
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
            1 => blocks * 200 + odd,
            32 => 32 * (blocks * 8 - odd),
            size => blocks * size,
        };
        let mut random = Random::new(seed);
        let bytes = weights(&mut random, format, outputs, cols);
        let x = floats(&mut random, rows * cols, 1.0);
        let spec = MatrixSpec { name: "blk.0.test.weight".to_string(), format, rows: outputs, cols };
        Self { spec, bytes, bias: floats(&mut random, outputs, 1.0), x }
    }

    /// The product of rows `first..first + rows`, with the bias or without.
    fn run<B: Backend>(&self, backend: &B, first: usize, rows: usize, with_bias: bool) -> Vec<f32> {
        let (cols, outputs) = (self.spec.cols, self.spec.rows);
        let matrix = backend.load_matrix(&self.spec, &self.bytes).unwrap();
        let bias = backend.load_vector("bias", &self.bias).unwrap();
        let x = tensor_of(backend, &self.x[first * cols..][..rows * cols], cols);
        // A row more than is computed, full of NaN.
        let mut out = backend.tensor(rows + 1, outputs).unwrap();
        backend.write(&mut out, &vec![f32::NAN; (rows + 1) * outputs]).unwrap();
        backend.linear(&matrix, with_bias.then_some(&bias), &x, &mut out, rows).unwrap();
        let mut all = values(backend, &out, rows + 1, outputs);
        assert!(all.split_off(rows * outputs).iter().all(|value| value.is_nan()));
        all
    }
}

/// Rows for the matrix-vector kernels and for the matrix-matrix kernel.
fn some_rows() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..6, 14usize..19, 60usize..70]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 25, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn i1_linear_is_right_and_gives_a_row_the_same_bits_in_any_company_and_order(
        format in proptest::sample::select(TensorType::ALL.to_vec()), outputs in 1usize..70, blocks in 1usize..5,
        rows in some_rows(), cut in 1usize..40, with_bias: bool, seed: u64,
    ) {
        let case = Case::new(format, outputs, blocks, rows, seed);
        let backend = shim::backend();
        let got = case.run(&backend, 0, rows, with_bias);
        let mut pieces = Vec::new();
        for first in (0..rows).step_by(cut) {
            pieces.extend(case.run(&backend, first, cut.min(rows - first), with_bias));
        }
        prop_assert_eq!(bits(&pieces), bits(&got));
        let other = case.run(&shim::recorded(1 + seed as u32 % 9).0, 0, rows, with_bias);
        prop_assert_eq!(bits(&other), bits(&got));
        let cols = case.spec.cols;
        let weights = reference::dequantise("t", format, &case.bytes).unwrap();
        let want = reference::linear(&case.x, &weights, with_bias.then_some(&case.bias), cols);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let (row, output) = (i / outputs, i % outputs);
            let (x, w) = (&case.x[row * cols..][..cols], &weights[output * cols..][..cols]);
            let size: f64 = x.iter().zip(w).map(|(x, w)| f64::from((x * w).abs())).sum();
            let bound = 2e-6 * (size + f64::from(case.bias[output].abs())) + 1e-30;
            prop_assert!((f64::from(*got) - want).abs() <= bound, "{format} [{row}][{output}]: {got} {want} {bound}");
        }
    }
}

#[test]
fn linear_with_unit_inputs_picks_columns() {
    let backend = shim::backend();
    for format in TensorType::ALL {
        for rows in [1, 20] {
            let mut case = Case::new(format, 7, 2, rows, 3);
            let cols = case.spec.cols;
            let places: Vec<usize> = (0..rows).map(|row| (row * 37 + 5) % cols).collect();
            case.x.fill(0.0);
            places.iter().enumerate().for_each(|(row, place)| case.x[row * cols + place] = 1.0);
            let weights = reference::dequantise("t", format, &case.bytes).unwrap();
            let got = case.run(&backend, 0, rows, false);
            for (place, got) in places.iter().zip(got.chunks(7)) {
                for (output, got) in got.iter().enumerate() {
                    assert_eq!(*got, weights[output * cols + place], "{format} [{output}][{place}]");
                }
            }
        }
    }
}

#[test]
fn activations_that_are_not_finite_poison_their_row_alone() {
    let backend = shim::backend();
    for rows in [7, 24] {
        let mut case = Case::new(TensorType::Q4_K, 9, 2, rows, 5);
        let clean = case.run(&backend, 0, rows, true);
        let cols = case.spec.cols;
        case.x[3 * cols + 1] = f32::INFINITY;
        case.x[4 * cols + 5] = f32::NAN;
        let got = case.run(&backend, 0, rows, true);
        for (row, (got, clean)) in got.chunks(9).zip(clean.chunks(9)).enumerate() {
            match row {
                3 | 4 => assert!(got.iter().all(|v| !v.is_finite()), "{got:?}"),
                _ => assert_eq!(bits(got), bits(clean)),
            }
        }
    }
}

#[test]
fn rows_are_gathered_written_and_read() {
    let backend = shim::backend();
    let x = tensor_of(&backend, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
    let mut out = tensor_of(&backend, &[9.0; 6], 2);
    backend.gather_rows(&x, &[2, 0], &mut out).unwrap();
    assert_eq!(values(&backend, &out, 3, 2), [5.0, 6.0, 1.0, 2.0, 9.0, 9.0]);
    // More than one piece of the way to the device and back.
    let many: Vec<f32> = (0..3_000_000).map(|i| i as f32).collect();
    let large = tensor_of(&backend, &many, 1000);
    assert_eq!(values(&backend, &large, 3000, 1000), many);
}

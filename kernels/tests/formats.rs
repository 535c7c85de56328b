//! Weight formats against values that the GGUF format's own library computed (`fixtures/generate.py`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod sample;

use kernels::backend::{Backend, MatrixSpec};
use kernels::cpu::best_isa;
use kernels::formats::TensorType;
use kernels::reference;
use sample::{Random, backend, bits, weights};

const ROWS: usize = 2;
const COLS: usize = 512;

fn fixture(format: TensorType, what: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/{format}.{what}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn expected(format: TensorType) -> Vec<u32> {
    fixture(format, "values").as_chunks().0.iter().map(|raw| u32::from_le_bytes(*raw)).collect()
}

#[test]
fn reference_dequantise_gives_the_values_of_the_format() {
    for format in TensorType::ALL {
        let got = reference::dequantise("fixture", format, &fixture(format, "blocks")).unwrap();
        assert_eq!(got.len(), ROWS * COLS);
        assert_eq!(bits(&got), expected(format), "{format}");
    }
}

#[test]
fn embed_gives_the_values_of_the_format() {
    let backend = backend(2, best_isa());
    for format in TensorType::ALL {
        let spec = MatrixSpec { name: "fixture".to_string(), format, rows: ROWS, cols: COLS };
        let table = backend.load_matrix(&spec, &fixture(format, "blocks")).unwrap();
        let mut out = backend.tensor(ROWS, COLS).unwrap();
        backend.embed(&table, &[0, 1], &mut out).unwrap();
        let mut got = vec![0.0; ROWS * COLS];
        backend.read(&out, ROWS, &mut got).unwrap();
        assert_eq!(bits(&got), expected(format), "{format}");
    }
}

#[test]
fn linear_with_unit_inputs_picks_columns_of_the_fixture() {
    // An input that is 1 in one place quantises to exactly 127 steps of 1/127, so the product is the weight, up
    // to the rounding of 127 * (1 / 127).
    let backend = backend(1, best_isa());
    for format in TensorType::ALL {
        let values: Vec<f32> = expected(format).into_iter().map(f32::from_bits).collect();
        let spec = MatrixSpec { name: "fixture".to_string(), format, rows: ROWS, cols: COLS };
        let matrix = backend.load_matrix(&spec, &fixture(format, "blocks")).unwrap();
        let mut x = backend.tensor(COLS, COLS).unwrap();
        let mut unit = vec![0.0; COLS * COLS];
        (0..COLS).for_each(|i| unit[i * COLS + i] = 1.0);
        backend.write(&mut x, &unit).unwrap();
        let mut out = backend.tensor(COLS, ROWS).unwrap();
        backend.linear(&matrix, None, &x, &mut out, COLS).unwrap();
        let mut got = vec![0.0; COLS * ROWS];
        backend.read(&out, COLS, &mut got).unwrap();
        for (i, got) in got.iter().enumerate() {
            let (col, row) = (i / ROWS, i % ROWS);
            let want = values[row * COLS + col];
            // Scale and minimum are multiplied apart and may cancel: the bound follows the larger one.
            let block = &values[row * COLS + col / 32 * 32..][..32];
            let largest = block.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            assert!(
                (got - want).abs() <= 4e-7 * largest.max(want.abs()) * 4.0,
                "{format} [{row}][{col}] {got} {want}"
            );
        }
    }
}

#[test]
fn packed_weights_take_no_more_than_the_file() {
    let backend = backend(1, best_isa());
    for format in TensorType::ALL {
        let mut random = Random::new(4);
        let spec = MatrixSpec { name: "t".to_string(), format, rows: 16, cols: 1024 };
        let bytes = weights(&mut random, format, 16, 1024);
        let matrix = backend.load_matrix(&spec, &bytes).unwrap();
        let resident = backend.matrix_bytes(&matrix);
        assert!(resident >= bytes.len() && resident * 100 <= bytes.len() * 103, "{format}: {resident}");
    }
}

#[test]
fn a_broken_block_is_refused() {
    assert!(reference::dequantise("fixture", TensorType::Q4_K, &[0; 143]).is_err());
}

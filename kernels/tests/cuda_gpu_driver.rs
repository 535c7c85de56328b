//! The driver for real devices against a library that answers as a GPU's driver does and computes on the CPU: every call
//! and every argument on the way to it, and each refusal. The library is looked for once in a process, so each case has a
//! process of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]
#![cfg(target_os = "linux")]

mod sample;
mod shim;

use std::process::Command;
use std::sync::Arc;

use kernels::backend::{AttentionShape, Backend, KvType, MatrixSpec, PageId, PoolSpec, RowGroup};
use kernels::cuda::{Cache, CudaBackend, GpuDriver};
use kernels::error::KernelError;
use kernels::formats::TensorType;
use sample::{Random, bits, floats, tensor_of, weights};

/// Set where this is the process of a case.
const CHILD: &str = "SESSION_RUNTIME_FAKE_CUDA_CHILD";
const SHAPE: AttentionShape =
    AttentionShape { heads: 2, kv_heads: 1, head_dim: 32, scale: 0.2, window: None };

/// A product, appended as K and V, attended to, and out as a cell and back again.
fn compute(backend: &impl Backend) -> Result<(Vec<f32>, Vec<u8>), KernelError> {
    let mut random = Random::new(9);
    let spec = MatrixSpec { name: "w".to_string(), format: TensorType::Q5_K, rows: 64, cols: 256 };
    let matrix = backend.load_matrix(&spec, &weights(&mut random, spec.format, 64, 256))?;
    let bias = backend.load_vector("bias", &floats(&mut random, 64, 1.0))?;
    let x = tensor_of(backend, &floats(&mut random, 20 * 256, 1.0), 256);
    let kv = tensor_of(backend, &floats(&mut random, 20 * 32, 1.0), 32);
    let (mut q, mut out) = (backend.tensor(20, 64)?, backend.tensor(20, 64)?);
    backend.linear(&matrix, Some(&bias), &x, &mut q, 20)?;
    backend.scale(&mut q, 0.37, 20)?;
    let pool_spec = PoolSpec { pages: 4, head_dim: 32, kv_type: KvType::F16 };
    let mut pool = backend.pool(pool_spec)?;
    let (first, second): (&[PageId], &[PageId]) = (&[PageId(3), PageId(0)], &[PageId(1), PageId(2)]);
    let group = |tables| RowGroup { tables, first_row: 0, rows: 20, start: 0 };
    let (tables, others) = ([first], [second]);
    backend.append(&mut pool, SHAPE, &[group(&tables)], &kv, &kv)?;
    let mut cell = vec![0; pool_spec.cell_bytes(1, 20)];
    backend.gather_cell(&pool, &tables, 20, &mut cell)?;
    backend.scatter_cell(&mut pool, &others, 20, &cell)?;
    backend.copy_page(&mut pool, PageId(0), PageId(2))?;
    let mut lse = vec![0.0; 40];
    backend.attention(&pool, SHAPE, &[group(&others)], &q, &mut out, Some(&mut lse))?;
    let mut values = vec![0.0; 20 * 64];
    backend.read(&out, 20, &mut values)?;
    Ok(([values, lse].concat(), cell))
}

/// What is done in the process of a case: prints the outcome.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let opened = GpuDriver::open(0).map_err(KernelError::from);
    let cache = Cache::new(None, Box::new(shim::NoCompiler));
    let backend = opened.and_then(|driver| CudaBackend::with_driver(Arc::new(driver), cache));
    let outcome = backend.and_then(|backend| {
        let (values, cell) = compute(&backend)?;
        // From another thread, which has no context of its own.
        let other = std::thread::scope(|scope| scope.spawn(|| compute(&backend)).join().unwrap())?;
        assert_eq!((bits(&other.0), &other.1), (bits(&values), &cell));
        let (want, want_cell) = compute(&shim::on_cpu())?;
        assert_eq!(bits(&values), bits(&want));
        assert_eq!(cell, want_cell);
        let devices = GpuDriver::devices()?;
        Ok(format!("{} of {}", backend.describe(), devices.len()))
    });
    // The first line is the test harness's.
    println!("\noutcome: {}", outcome.unwrap_or_else(|error| error.to_string()));
}

/// The outcome with a driver that was told `faults`.
fn outcome(faults: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(shim::library::path(), folder.path().join("libcuda.so")).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child", "--nocapture"]);
    child.env(CHILD, "1").env("LD_LIBRARY_PATH", folder.path()).env("FAKE_CUDA", faults);
    let done = child.output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    let found = said.lines().find_map(|line| line.strip_prefix("outcome: "));
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said} {error}");
    found.unwrap_or_else(|| panic!("{said} {error}")).to_string()
}

#[test]
fn i1_a_device_gives_the_bits_of_the_shim() {
    assert_eq!(outcome("devices=3"), "CUDA, fake, compute capability 9.0, 1024 MiB of 3");
}

#[test]
fn every_refusal_is_one_sentence_with_a_way_out() {
    let cases = [
        ("version=11080", "the CUDA driver is too old (CUDA 11.8): it has to support CUDA 12.0 or later"),
        ("devices=0", "no CUDA device 0: the driver shows 0"),
        ("capability=75", "the device fake has compute capability 7.5"),
        (
            "old-ptx",
            "the CUDA driver is too old (CUDA_ERROR_UNSUPPORTED_PTX_VERSION): it has to support the code",
        ),
        ("memory=300000", "activations on the device: no memory for 5120 bytes"),
        ("lost=1", "the device was lost in cu"),
        ("lost=4", "the device was lost in cu"),
    ];
    for (faults, want) in cases {
        let got = outcome(faults);
        assert!(got.starts_with(want), "{faults}: {got}");
        assert!(["CPU", "smaller"].iter().any(|way| got.contains(way)), "{got}");
    }
}

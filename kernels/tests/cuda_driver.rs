//! The launch code of the CUDA backend against its driver: order, lifetimes, refusals and a device that is lost; and the
//! recorder itself, which has to find what it is there to find.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod sample;
mod shim;

use std::sync::Arc;

use kernels::backend::{
    AttentionShape, Backend, KvType, MatrixSpec, PageId, PoolSpec, RopePairing, RowGroup,
};
use kernels::codec::{CellShape, Codec};
use kernels::cuda::{
    Cache, Compiler, CudaBackend, CudaOptions, CudaPool, CudaTensor, DeviceError, Driver, GpuDriver,
    LazyNvrtc, Nvrtc, SOURCES, Span,
};
use kernels::error::KernelError;
use kernels::formats::TensorType;
use sample::{Random, tensor_of, weights};
use shim::{Deaf, NoCompiler, Recorder, ShimDriver};

const SHAPE: AttentionShape =
    AttentionShape { heads: 4, kv_heads: 2, head_dim: 16, scale: 0.25, window: None };

/// A little of everything: two steps of a layer with loads and saves between them. How many calls were left at its end.
fn a_life(backend: &CudaBackend, recorder: &Recorder) -> Result<usize, KernelError> {
    let mut random = Random::new(2);
    let spec = MatrixSpec { name: "t".to_string(), format: TensorType::Q8_0, rows: 64, cols: 64 };
    let matrix = backend.load_matrix(&spec, &weights(&mut random, spec.format, 64, 64))?;
    let norm = backend.load_vector("norm", &[1.0; 64])?;
    let rope = backend.rope_table(1e4, 16, 64)?;
    let mut pool = backend.pool(PoolSpec { pages: 8, head_dim: 16, kv_type: KvType::Int8 })?;
    let mut cell = vec![0; PoolSpec { pages: 8, head_dim: 16, kv_type: KvType::Int8 }.cell_bytes(2, 16)];
    let mut halves = backend.pool(PoolSpec { pages: 8, head_dim: 16, kv_type: KvType::F16 })?;
    let first: [&[PageId]; 2] = [&[PageId(0), PageId(3)], &[PageId(5), PageId(1)]];
    let second: [&[PageId]; 2] = [&[PageId(2), PageId(6)], &[PageId(4), PageId(7)]];
    let (mut x, mut y) = (backend.tensor(9, 64)?, backend.tensor(9, 64)?);
    let (mut kv, mut lse) = (backend.tensor(9, 32)?, [0.0; 36]);
    let ids: Vec<u32> = (0..9).collect();
    for start in [0, 9] {
        backend.embed(&matrix, &ids, &mut x)?;
        backend.rms_norm(&x, &norm, 1e-5, &mut y, 9)?;
        backend.linear(&matrix, Some(&norm), &y, &mut x, 9)?;
        backend.rope(&mut x, 4, 16, &rope, RopePairing::Halves, &ids)?;
        backend.write(&mut kv, &[0.5; 9 * 32])?;
        let group = |tables| RowGroup { tables, first_row: 0, rows: 9, start };
        backend.append(&mut pool, SHAPE, &[group(&first)], &kv, &kv)?;
        backend.scatter_cell(&mut pool, &second.map(|table| &table[..1]), 16, &cell)?;
        backend.attention(&pool, SHAPE, &[group(&first)], &x, &mut y, Some(&mut lse))?;
        backend.gather_cell(&pool, &first.map(|table| &table[..1]), 16, &mut cell)?;
        backend.scatter_cell(&mut pool, &second.map(|table| &table[1..]), 16, &cell)?;
        backend.scatter_cell(&mut pool, &second.map(|table| &table[..1]), 16, &cell)?;
        backend.gather_cell(&pool, &second.map(|table| &table[1..]), 16, &mut cell)?;
        backend.copy_page(&mut pool, PageId(0), PageId(2))?;
        backend.append(&mut pool, SHAPE, &[group(&second)], &kv, &kv)?;
        packed_traffic(backend, &mut halves, &group(&first), &kv)?;
        backend.gather_rows(&x, &[8, 1], &mut y)?;
        backend.read(&y, 9, &mut [0.0; 9 * 64])?;
        backend.finish()?;
    }
    Ok(recorder.calls_left())
}

/// Rows are appended to f16 pages while packed cells of the same pages leave and come.
fn packed_traffic(
    backend: &CudaBackend,
    pool: &mut CudaPool,
    group: &RowGroup<'_>,
    kv: &CudaTensor,
) -> Result<(), KernelError> {
    let (rope_base, rope_pairing) = (1e4, RopePairing::Halves);
    let shape = CellShape { kv_heads: 2, tokens: 16, head_dim: 16, start: 0, rope_base, rope_pairing };
    let pages: Vec<&[PageId]> = group.tables.iter().map(|table| &table[..1]).collect();
    for codec in [Codec::Int8, Codec::Int4] {
        let mut packed = vec![0; shape.packed_bytes(codec)];
        backend.append(pool, SHAPE, std::slice::from_ref(group), kv, kv)?;
        backend.gather_packed(pool, &pages, codec, &shape, &mut packed)?;
        backend.scatter_packed(pool, &pages, codec, &shape, &packed)?;
        backend.scatter_packed(pool, &pages, codec, &shape, &packed)?;
        // Into what is on its way in, and out again.
        let moved = CellShape { start: 7, tokens: 9, ..shape };
        backend.relocate(pool, KvType::F16, &pages, &moved, 2)?;
        backend.gather_packed(pool, &pages, codec, &shape, &mut packed)?;
        backend.scatter_packed(pool, &pages, codec, &shape, &packed)?;
        backend.append(pool, SHAPE, std::slice::from_ref(group), kv, kv)?;
    }
    Ok(())
}

#[test]
fn nothing_races_and_everything_is_given_back() {
    let (backend, recorder) = shim::recorded(0);
    a_life(&backend, &recorder).unwrap();
    let launches = recorder.launches();
    for name in [
        "gemv_4_q8_0",
        "append_int8",
        "scatter_cell_int8",
        "attention_prefill_int8",
        "unpack_cell_int4",
        "relocate_f16",
    ] {
        assert!(launches.iter().any(|launched| launched == name), "{name}");
    }
    drop(backend);
    assert!(recorder.is_empty());
}

#[test]
fn computing_and_saving_at_once_both_come_after_what_was_loaded() {
    let backend = shim::backend();
    let spec = PoolSpec { pages: 2, head_dim: 16, kv_type: KvType::F16 };
    let shape = AttentionShape { heads: 2, kv_heads: 1, ..SHAPE };
    let mut pool = backend.pool(spec).unwrap();
    let (q, table) = (tensor_of(&backend, &[0.5; 32], 32), [PageId(1)]);
    for round in 0..40 {
        let cell = vec![round; spec.cell_bytes(1, 16)];
        backend.scatter_cell(&mut pool, &[&table], 16, &cell).unwrap();
        std::thread::scope(|scope| {
            let saver = scope.spawn(|| {
                let mut back = vec![0; cell.len()];
                backend.gather_cell(&pool, &[&table], 16, &mut back).unwrap();
                back
            });
            let mut out = backend.tensor(1, 32).unwrap();
            let group = RowGroup { tables: &[&table], first_row: 0, rows: 1, start: 15 };
            backend.attention(&pool, shape, &[group], &q, &mut out, None).unwrap();
            assert_eq!(saver.join().unwrap(), cell);
        });
    }
}

/// Streams are made in the order compute, load, save.
#[test]
fn waiting_is_missed_where_it_is_left_out() {
    let cases = [
        (Deaf::Stream(0), "races scatter_cell_int8"),
        (Deaf::Stream(1), "scatter_cell_int8 races"),
        (Deaf::Stream(2), "gather_cell_int8 races"),
        (Deaf::Stream(2), "gather_cell_f16 races"),
        (Deaf::Host, "the host's write races a copy to the device"),
    ];
    for (deaf, what) in cases {
        let recorder = Arc::new(Recorder::deaf(ShimDriver::new(0), deaf));
        let cache = Cache::new(None, Box::new(NoCompiler));
        let backend = CudaBackend::with_driver(recorder.clone(), cache).unwrap();
        a_life(&backend, &recorder).unwrap();
        let broken = recorder.broken();
        assert!(broken.iter().any(|broken| broken.contains(what)), "{deaf:?}: {broken:?}");
    }
}

#[test]
fn a_device_that_is_lost_gives_errors_and_nothing_else() {
    let calls = {
        // How many calls there are.
        let (backend, recorder) = shim::recorded(0);
        recorder.lose_after(1_000_000);
        1_000_000 - a_life(&backend, &recorder).unwrap()
    };
    assert!(calls > 100);
    for lost in (0..calls).step_by(3) {
        let (backend, recorder) = shim::recorded(0);
        recorder.lose_after(lost);
        match a_life(&backend, &recorder) {
            Err(KernelError::Device(DeviceError::Lost { .. })) => {}
            other => panic!("after {lost} calls: {other:?}"),
        }
        // It stays lost.
        assert!(matches!(backend.tensor(1, 1), Err(KernelError::Device(DeviceError::Lost { .. }))));
        drop(backend);
        assert!(recorder.is_empty(), "after {lost} calls");
    }
}

#[test]
fn a_full_device_is_told_with_what_there_was_no_room_for() {
    let driver = Arc::new(Recorder::new(ShimDriver::with_memory(0, 1 << 20)));
    let backend = CudaBackend::with_driver(driver.clone(), Cache::new(None, Box::new(NoCompiler))).unwrap();
    let spec = PoolSpec { pages: 1 << 20, head_dim: 64, kv_type: KvType::F16 };
    let error = backend.pool(spec).err().unwrap();
    assert!(
        error
            .to_string()
            .starts_with("page pool on the device: no memory for 4294967296 bytes; use a smaller"),
        "{error}"
    );
    // What fits goes on as before.
    let mut x = tensor_of(&backend, &[1.0; 8], 8);
    backend.scale(&mut x, 2.0, 1).unwrap();
    drop((x, backend));
    assert!(driver.is_empty());
}

/// A copy from the host, on a stream of its own, while a kernel's stream may read: the worst of all mistakes.
#[test]
fn the_recorder_finds_races_bad_places_and_bad_lifetimes() {
    let recorder = Recorder::noting(ShimDriver::new(0));
    let broken = |what: &str| recorder.broken().last().is_some_and(|last| last.contains(what));
    let (a, b, event) = (recorder.stream().unwrap(), recorder.stream().unwrap(), recorder.event().unwrap());
    let (memory, pinned) = (recorder.alloc(1024).unwrap(), recorder.pin(1024).unwrap());
    let [low, high] = [0, 512].map(|at| Span { memory, at, bytes: 512 });
    let host = Span { memory: pinned, at: 0, bytes: 512 };
    recorder.zero(a, low).unwrap();
    recorder.upload(b, host, high).unwrap();
    assert!(recorder.broken().is_empty(), "other bytes do not matter");
    recorder.upload(b, host, low).unwrap();
    assert!(broken("a copy to the device races filling with zeros"));
    recorder.finish(b).unwrap();
    // Waiting for an event of before is not enough.
    recorder.record(event, a).unwrap();
    recorder.copy(a, low, high).unwrap();
    recorder.wait(b, event).unwrap();
    let before = recorder.broken().len();
    recorder.zero(b, high).unwrap();
    assert!(recorder.broken().len() == before + 1 && broken("filling with zeros races a copy on the device"));
    recorder.finish(a).unwrap();
    // Nor is it for the host.
    recorder.finish(b).unwrap();
    recorder.record(event, a).unwrap();
    recorder.wait(b, event).unwrap();
    recorder.download(b, low, host).unwrap();
    assert_eq!(recorder.broken().len(), before + 1);
    recorder.write_pinned(pinned, 0, &[1; 8]).unwrap();
    assert!(broken("the host's write races a copy to the host"));
    recorder.finish(b).unwrap();
    let before = recorder.broken().len();
    recorder.write_pinned(pinned, 0, &[1; 8]).unwrap();
    assert_eq!(recorder.broken().len(), before);
    recorder.zero(a, low).unwrap();
    recorder.free(memory);
    assert!(broken("memory is freed while filling with zeros may use it"));
    assert!(!recorder.is_empty());
    recorder.unpin(pinned);
    recorder.end_event(event);
    recorder.end_stream(a);
    recorder.end_stream(b);
    assert!(recorder.is_empty());
    // Places are looked at before anything is done, so these are not done by the shim.
    let strict = Recorder::new(ShimDriver::new(0));
    let (stream, memory) = (strict.stream().unwrap(), strict.alloc(64).unwrap());
    for span in
        [Span { memory, at: 32, bytes: 33 }, Span { memory: kernels::cuda::DeviceMemory(1), at: 0, bytes: 4 }]
    {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| strict.zero(stream, span)));
        assert!(done.is_err(), "{span:?}");
    }
}

#[test]
fn arguments_are_refused_as_on_the_cpu() {
    let backend = shim::backend();
    let name = |rows, cols, format| MatrixSpec { name: "blk.0.w".to_string(), format, rows, cols };
    let mut bytes = weights(&mut Random::new(3), TensorType::Q6_K, 5, 512);
    let spec = name(5, 512, TensorType::Q6_K);
    assert!(backend.load_matrix(&spec, &bytes).is_ok());
    let short = backend.load_matrix(&spec, &bytes[1..]).err().unwrap();
    assert!(matches!(short, KernelError::ByteCount { .. }), "{short}");
    let odd = backend.load_matrix(&name(5, 500, TensorType::Q6_K), &bytes).err().unwrap();
    assert!(matches!(odd, KernelError::BlockSize { block: 256, .. }), "{odd}");
    // The scale of the second block of row 3.
    bytes[3 * 420 + 210 + 208..][..2].copy_from_slice(&0x7c00u16.to_le_bytes());
    let refused = KernelError::NotFinite { tensor: "blk.0.w".to_string(), row: 3 };
    assert_eq!(backend.load_matrix(&spec, &bytes).err(), Some(refused));
    assert!(backend.load_matrix(&name(0, 8, TensorType::F32), &[]).is_err());
    assert!(backend.load_vector("norm", &[1.0, f32::NAN]).is_err());
    let (mut x, narrow) = (backend.tensor(2, 8).unwrap(), backend.tensor(2, 4).unwrap());
    assert!(backend.add(&mut x, &narrow, 1).is_err());
    assert!(backend.scale(&mut x, 2.0, 3).is_err());
    assert!(backend.read(&x, 2, &mut [0.0; 15]).is_err());
    for (rows, cols) in [(0, 1), (1, 0), (usize::MAX, 2)] {
        assert!(matches!(backend.tensor(rows, cols), Err(KernelError::Size { .. })));
    }
    for (pages, head_dim) in [(0, 8), (1, 0), (1, 12), (1, 264), (usize::MAX, 8)] {
        assert!(backend.pool(PoolSpec { pages, head_dim, kv_type: KvType::F16 }).is_err());
    }
    let mut pool = backend.pool(PoolSpec { pages: 2, head_dim: 8, kv_type: KvType::F16 }).unwrap();
    let mut cell = [0; 2 * 2 * 8];
    assert!(matches!(
        backend.gather_cell(&pool, &[&[PageId(2)]], 1, &mut cell),
        Err(KernelError::OutOfRange { what: "page", index: 2, .. })
    ));
    assert!(backend.scatter_cell(&mut pool, &[&[PageId(0)]], 2, &cell).is_err());
    assert!(backend.copy_page(&mut pool, PageId(0), PageId(2)).is_err());
    // Nothing to do is not an error.
    backend.scale(&mut x, 2.0, 0).unwrap();
    let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 8, scale: 1.0, window: None };
    let group = RowGroup { tables: &[&[]], first_row: 0, rows: 0, start: 0 };
    backend.append(&mut pool, shape, std::slice::from_ref(&group), &x, &x).unwrap();
    let mut out = backend.tensor(2, 8).unwrap();
    backend.attention(&pool, shape, &[group], &x, &mut out, Some(&mut [])).unwrap();
    assert_eq!((backend.name(), backend.numerics_class()), ("cuda", "cuda-1-f32"));
}

/// On a machine without a GPU, which is where tests run.
#[test]
fn a_machine_without_a_driver_says_so() {
    match CudaBackend::new(CudaOptions::default()) {
        Ok(backend) => assert!(backend.describe().starts_with("CUDA, ")),
        Err(KernelError::Device(error)) => {
            let text = error.to_string();
            assert!(text.contains("CPU") && !text.contains('\n'), "{text}");
        }
        Err(other) => panic!("{other}"),
    }
    let far = GpuDriver::open(4096).err().unwrap();
    assert!(
        matches!(far, DeviceError::NoDriver | DeviceError::NoDevice { index: 4096, .. })
            || far.to_string().contains("CUDA")
    );
}

#[test]
fn a_missing_compiler_is_told_when_a_kernel_is_needed() {
    let path = std::path::PathBuf::from("/nowhere/libnvrtc.so");
    assert!(matches!(Nvrtc::open(Some(&path)), Err(DeviceError::NoCompiler { .. })));
    let cache = Cache::new(None, Box::new(LazyNvrtc::new(Some(path))));
    let backend = CudaBackend::with_driver(Arc::new(Recorder::new(ShimDriver::new(0))), cache).unwrap();
    let mut x = backend.tensor(1, 8).unwrap();
    let error = backend.scale(&mut x, 2.0, 1).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("no run-time compiler: /nowhere/libnvrtc.so could not be loaded; install"),
        "{error}"
    );
}

/// With the library that the developer's environment has, where it has one.
#[test]
fn a_source_that_does_not_compile_is_told_with_the_place() {
    let Some(path) = std::env::var_os("SESSION_RUNTIME_TEST_NVRTC") else {
        return;
    };
    let nvrtc = Nvrtc::open(Some(path.as_ref())).unwrap();
    assert!(nvrtc.compile(&SOURCES[0], (9, 0)).unwrap().contains(".visible .entry add("));
    let mut bad = SOURCES[0];
    bad.text = "#include \"device.cuh\"\nKERNEL(add)() { nothing; }";
    match nvrtc.compile(&bad, (9, 0)) {
        Err(DeviceError::Compile { file, problem }) => {
            assert_eq!(file, "add.cu");
            assert!(problem.contains("add.cu(2)") && problem.contains("nothing"), "{problem}");
        }
        other => panic!("{other:?}"),
    }
}

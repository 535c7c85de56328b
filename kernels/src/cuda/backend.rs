//! [`CudaBackend`]: the kernels behind the [`Backend`] trait. Checks every argument as the CPU does, then launches.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::attention::Launcher;
use super::cache::Cache;
use super::cells::{Loads, Saves};
use super::driver::{Arg, DeviceMemory, Driver, Span};
use super::gpu::GpuDriver;
use super::linear;
use super::matrix::CudaMatrix;
use super::memory::{Buffer, Device, bytes_of, bytes_of_mut};
use super::nvrtc::LazyNvrtc;
use super::pool::{self, CudaPool};
use super::programs::{Programs, THREADS, number};
use super::relocate::relocate;
use super::staging::{Landing, Scratch, Staging};
use crate::backend::{
    AttentionShape, Backend, KvType, MatrixSpec, Output, PAGE_TOKENS, PageId, PoolSpec, RopePairing, RowGroup,
};
use crate::check;
use crate::codec::{CellShape, Codec, relocation};
use crate::cpu::CpuRope;
use crate::error::KernelError;

/// Threads of `rms_norm`, `NORM_THREADS` in `norm.cu`.
const NORM_THREADS: u32 = 256;
/// Threads of a warp.
const LANES: usize = 32;

/// Row-major f32 activations on the device.
pub struct CudaTensor {
    rows: usize,
    cols: usize,
    data: Buffer,
}

impl CudaTensor {
    /// The first `rows` rows, which are there.
    pub(super) fn head(&self, rows: usize) -> Span<DeviceMemory> {
        self.data.part(0, rows * self.cols * size_of::<f32>())
    }

    /// The first `rows` rows.
    fn checked(&self, kernel: &'static str, rows: usize) -> Result<Span<DeviceMemory>, KernelError> {
        check::rows(kernel, rows, self.rows)?;
        Ok(self.head(rows))
    }
}

/// A vector of f32 on the device.
pub struct CudaVector {
    len: usize,
    pub(super) data: Buffer,
}

/// Rotary cosines and sines on the device.
pub struct CudaRope {
    dims: usize,
    positions: usize,
    table: Buffer,
}

/// How to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which of the driver's devices.
    pub device: usize,
    /// Where compiled kernels are kept; without it they are compiled at every start.
    pub cache: Option<PathBuf>,
    /// The library of the run-time compiler; `None` for the one that the system finds.
    pub nvrtc: Option<PathBuf>,
}

/// Calls with small arguments, and pieces of something large, under way before the host waits for the oldest. A layer has
/// a handful of the former.
const CALLS: usize = 64;
const PIECES: usize = 2;

/// What calls on the compute stream share.
struct Calls {
    /// Ids, positions, tables.
    staging: Staging,
    /// Weights and activations from the host.
    uploads: Staging,
    landing: Landing,
    /// Partitions of attention that wait to be merged.
    partial: Scratch,
    /// Largest scores and sums, where they are asked for.
    softmax: Scratch,
}

/// The backend that runs on a GPU. Calls from several threads take turns.
///
/// Calls return when their work is queued; those that give something to the host wait for it. A call that fails may be
/// told of by a later one, as a device reports when it comes to it.
pub struct CudaBackend {
    device: Arc<Device>,
    programs: Programs,
    calls: Mutex<Calls>,
    saves: Mutex<Saves>,
    loads: Mutex<Loads>,
}

impl CudaBackend {
    /// Opens a GPU of this machine.
    ///
    /// # Errors
    /// No driver, too old a driver, no such device, too old a device, no memory; all in one sentence. A missing run-time
    /// compiler is found out by [`CudaBackend::prepare`], or when a kernel is first used and not in the cache.
    pub fn new(options: CudaOptions) -> Result<Self, KernelError> {
        let driver = GpuDriver::open(options.device)?;
        let cache = Cache::new(options.cache, Box::new(LazyNvrtc::new(options.nvrtc)));
        Self::with_driver(Arc::new(driver), cache)
    }

    /// A backend over any driver.
    ///
    /// # Errors
    /// Streams or memory that cannot be had.
    pub fn with_driver(driver: Arc<dyn Driver>, cache: Cache) -> Result<Self, KernelError> {
        let device = Device::new(driver)?;
        let calls = Calls {
            staging: Staging::new(&device, device.compute, CALLS)?,
            uploads: Staging::new(&device, device.compute, PIECES)?,
            landing: Landing::new(&device, device.compute),
            partial: Scratch::new(&device, "partitions of attention"),
            softmax: Scratch::new(&device, "sums of attention"),
        };
        Ok(Self {
            programs: Programs::new(&device, cache),
            calls: Mutex::new(calls),
            saves: Mutex::new(Saves::new(&device)?),
            loads: Mutex::new(Loads::new(&device)?),
            device,
        })
    }

    /// Compiles and loads all kernels: some seconds where they are not in the cache. Without it, each is when it is first
    /// used, which is a bad time to find out that there is no compiler.
    ///
    /// # Errors
    /// No run-time compiler, a driver too old for its code, a device that is lost.
    pub fn prepare(&self) -> Result<(), KernelError> {
        self.programs.prepare()
    }

    /// Refuses a model whose heads the kernels have no attention for, before anything of it is loaded.
    ///
    /// # Errors
    /// [`super::DeviceError::HeadSize`].
    pub fn check_head_dim(head_dim: usize) -> Result<(), KernelError> {
        Ok(pool::check_head_dim(head_dim)?)
    }

    /// All of a matrix as f32: `out` has its shape.
    ///
    /// # Errors
    /// Another shape, or the device.
    pub fn dequantise(&self, matrix: &CudaMatrix, out: &mut CudaTensor) -> Result<(), KernelError> {
        check::equal("dequantise", "columns of out", matrix.cols, out.cols)?;
        out.checked("dequantise", matrix.rows)?;
        linear::dequantise(&self.programs, matrix, out)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        lock(&self.calls)
    }

    /// Memory with these values.
    fn upload(&self, what: &str, values: &[f32]) -> Result<Buffer, KernelError> {
        let buffer = Buffer::new(&self.device, what, size_of_val(values))?;
        self.calls().uploads.send(bytes_of(values), buffer.part(0, size_of_val(values)))?;
        Ok(buffer)
    }

    /// `gate = act(gate) * up` for `rows` rows.
    fn gated(
        &self,
        kernel: &'static str,
        gate: &mut CudaTensor,
        up: &CudaTensor,
        rows: usize,
    ) -> Result<(), KernelError> {
        check::equal(kernel, "columns of up", gate.cols, up.cols)?;
        let (up, gate_rows) = (up.checked(kernel, rows)?, gate.checked(kernel, rows)?);
        let count = rows * gate.cols;
        self.programs.each(kernel, count, &[Arg::Change(gate_rows), Arg::Read(up), Arg::U64(count as u64)])
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backend for CudaBackend {
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Tensor = CudaTensor;
    type Pool = CudaPool;
    type Rope = CudaRope;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn numerics_class(&self) -> &'static str {
        "cuda-1-f32"
    }

    fn describe(&self) -> String {
        let info = self.device.driver.info();
        let (major, minor) = info.capability;
        format!("CUDA, {}, compute capability {major}.{minor}, {} MiB", info.name, info.memory >> 20)
    }

    fn free_memory(&self) -> Result<Option<u64>, KernelError> {
        Ok(Some(self.device.driver.free_memory()?))
    }

    fn load_matrix(&self, spec: &MatrixSpec, bytes: &[u8]) -> Result<CudaMatrix, KernelError> {
        CudaMatrix::load(&self.device, &mut self.calls().uploads, spec, bytes)
    }

    fn load_vector(&self, name: &str, values: &[f32]) -> Result<CudaVector, KernelError> {
        match values.iter().position(|value| !value.is_finite()) {
            Some(row) => Err(KernelError::NotFinite { tensor: name.to_string(), row }),
            None => Ok(CudaVector { len: values.len(), data: self.upload(name, values)? }),
        }
    }

    fn tensor(&self, rows: usize, cols: usize) -> Result<CudaTensor, KernelError> {
        let refused = || KernelError::Size { what: "activations".to_string(), rows, cols };
        let values = rows.checked_mul(cols).filter(|values| *values > 0).ok_or_else(refused)?;
        number("columns", cols)?;
        let bytes = values.checked_mul(size_of::<f32>()).ok_or_else(refused)?;
        Ok(CudaTensor { rows, cols, data: Buffer::zeroed(&self.device, "activations", bytes)? })
    }

    fn pool(&self, spec: PoolSpec) -> Result<CudaPool, KernelError> {
        CudaPool::new(&self.device, spec)
    }

    fn rope_table(&self, base: f32, dims: usize, positions: usize) -> Result<CudaRope, KernelError> {
        let values = CpuRope::values_of(base, dims, positions)?;
        Ok(CudaRope { dims, positions, table: self.upload("rope table", &values)? })
    }

    fn matrix_bytes(&self, matrix: &CudaMatrix) -> usize {
        matrix.data.bytes()
    }

    fn embed(&self, table: &CudaMatrix, ids: &[u32], out: &mut CudaTensor) -> Result<(), KernelError> {
        check::equal("embed", "columns of out", table.cols, out.cols)?;
        ids.iter().try_for_each(|&id| check::below("embed", "id", id as usize, table.rows))?;
        out.checked("embed", ids.len())?;
        if ids.is_empty() {
            return Ok(());
        }
        let mut calls = self.calls();
        let staged = calls.staging.stage([bytes_of(ids)])?;
        linear::embed(&self.programs, table, Arg::Read(staged.parts[0]), ids.len(), out)?;
        calls.staging.done(&staged)
    }

    fn linear(
        &self,
        weights: &CudaMatrix,
        bias: Option<&CudaVector>,
        x: &CudaTensor,
        out: &mut CudaTensor,
        rows: usize,
    ) -> Result<(), KernelError> {
        self.linears(&mut [Output { weights, bias, out }], x, rows)
    }

    fn linears(
        &self,
        products: &mut [Output<'_, Self>],
        x: &CudaTensor,
        rows: usize,
    ) -> Result<(), KernelError> {
        x.checked("linear", rows)?;
        for Output { weights, bias, out } in products.iter() {
            check::equal("linear", "columns of x", weights.cols, x.cols)?;
            check::equal("linear", "columns of out", weights.rows, out.cols)?;
            if let Some(bias) = bias {
                check::equal("linear", "length of bias", weights.rows, bias.len)?;
            }
            out.checked("linear", rows)?;
        }
        products.iter_mut().try_for_each(|Output { weights, bias, out }| {
            linear::linear(&self.device, &self.programs, weights, *bias, x, out, rows)
        })
    }

    fn rms_norm(
        &self,
        x: &CudaTensor,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaTensor,
        rows: usize,
    ) -> Result<(), KernelError> {
        check::equal("rms_norm", "length of weight", x.cols, weight.len)?;
        check::equal("rms_norm", "columns of out", x.cols, out.cols)?;
        let (from, to) = (x.checked("rms_norm", rows)?, out.checked("rms_norm", rows)?);
        if rows == 0 {
            return Ok(());
        }
        let weight = Arg::Read(weight.data.all());
        let args = [Arg::Read(from), weight, Arg::F32(eps), Arg::Write(to), Arg::U32(x.cols as u32)];
        self.programs.launch(self.device.compute, "rms_norm", [rows, 1, 1], NORM_THREADS, &args)
    }

    fn head_norm(
        &self,
        x: &mut CudaTensor,
        heads: usize,
        weight: &CudaVector,
        eps: f32,
        rows: usize,
    ) -> Result<(), KernelError> {
        check::equal("head_norm", "columns of x", heads.saturating_mul(weight.len), x.cols)?;
        let all = x.checked("head_norm", rows)?;
        if rows == 0 {
            return Ok(());
        }
        let count = rows * heads;
        let (weight, dim) = (Arg::Read(weight.data.all()), Arg::U32(number("head_dim", weight.len)?));
        let args = [Arg::Change(all), Arg::U64(count as u64), weight, Arg::F32(eps), dim];
        let blocks = count.div_ceil(THREADS as usize / LANES);
        self.programs.launch(self.device.compute, "head_norm", [blocks, 1, 1], THREADS, &args)
    }

    fn scale(&self, x: &mut CudaTensor, factor: f32, rows: usize) -> Result<(), KernelError> {
        let (all, count) = (x.checked("scale", rows)?, rows * x.cols);
        self.programs.each("scale", count, &[Arg::Change(all), Arg::F32(factor), Arg::U64(count as u64)])
    }

    fn scale_channels(
        &self,
        x: &mut CudaTensor,
        factors: &CudaVector,
        rows: usize,
    ) -> Result<(), KernelError> {
        check::equal("scale_channels", "factors", x.cols, factors.len)?;
        let (all, count) = (x.checked("scale_channels", rows)?, rows * x.cols);
        let factors = Arg::Read(factors.data.all());
        let args = [Arg::Change(all), factors, Arg::U64(count as u64), Arg::U32(x.cols as u32)];
        self.programs.each("scale_channels", count, &args)
    }

    fn add(&self, x: &mut CudaTensor, y: &CudaTensor, rows: usize) -> Result<(), KernelError> {
        check::equal("add", "columns of y", x.cols, y.cols)?;
        let (y, to, count) = (y.checked("add", rows)?, x.checked("add", rows)?, rows * x.cols);
        self.programs.each("add", count, &[Arg::Change(to), Arg::Read(y), Arg::U64(count as u64)])
    }

    fn swiglu(&self, gate: &mut CudaTensor, up: &CudaTensor, rows: usize) -> Result<(), KernelError> {
        self.gated("swiglu", gate, up, rows)
    }

    fn geglu(&self, gate: &mut CudaTensor, up: &CudaTensor, rows: usize) -> Result<(), KernelError> {
        self.gated("geglu", gate, up, rows)
    }

    fn rope(
        &self,
        x: &mut CudaTensor,
        heads: usize,
        head_dim: usize,
        rope: &CudaRope,
        pairing: RopePairing,
        positions: &[u32],
    ) -> Result<(), KernelError> {
        check::equal("rope", "columns of x", heads.saturating_mul(head_dim), x.cols)?;
        check::equal("rope", "head_dim", rope.dims, head_dim)?;
        positions.iter().try_for_each(|&p| check::below("rope", "position", p as usize, rope.positions))?;
        let rows = positions.len();
        let all = x.checked("rope", rows)?;
        if rows == 0 {
            return Ok(());
        }
        let mut calls = self.calls();
        let staged = calls.staging.stage([bytes_of(positions)])?;
        let args = [
            Arg::Change(all),
            Arg::U32(number("heads", heads)?),
            Arg::U32(number("head_dim", head_dim)?),
            Arg::Read(rope.table.all()),
            Arg::U32(u32::from(pairing == RopePairing::Adjacent)),
            Arg::Read(staged.parts[0]),
            Arg::U32(number("rows", rows)?),
        ];
        self.programs.each("rope", rows * heads * head_dim / 2, &args)?;
        calls.staging.done(&staged)
    }

    fn append(
        &self,
        pool: &mut CudaPool,
        shape: AttentionShape,
        groups: &[RowGroup<'_>],
        k: &CudaTensor,
        v: &CudaTensor,
    ) -> Result<(), KernelError> {
        check::tables("append", &pool.spec, shape, groups)?;
        let width = shape.kv_heads.saturating_mul(shape.head_dim);
        check::equal("append", "columns of k", width, k.cols)?;
        check::equal("append", "columns of v", width, v.cols)?;
        check::disjoint("append", groups, k.rows.min(v.rows))?;
        let (device, programs, staging) = (&self.device, &self.programs, &mut self.calls().staging);
        let mut launcher = Launcher { device, programs, staging };
        launcher.append(pool, shape, groups, &|rows| k.head(rows), &|rows| v.head(rows))
    }

    fn attention(
        &self,
        pool: &CudaPool,
        shape: AttentionShape,
        groups: &[RowGroup<'_>],
        q: &CudaTensor,
        out: &mut CudaTensor,
        lse: Option<&mut [f32]>,
    ) -> Result<(), KernelError> {
        check::tables("attention", &pool.spec, shape, groups)?;
        check::equal("attention", "columns of q", shape.heads * shape.head_dim, q.cols)?;
        check::equal("attention", "columns of out", shape.heads * shape.head_dim, out.cols)?;
        check::disjoint("attention", groups, q.rows.min(out.rows))?;
        if let Some(lse) = &lse {
            check::disjoint("attention: lse", groups, lse.len() / shape.heads)?;
        }
        let mut calls = self.calls();
        let Calls { staging, landing, partial, softmax, .. } = &mut *calls;
        let mut launcher = Launcher { device: &self.device, programs: &self.programs, staging };
        let rows: [&dyn Fn(usize) -> Span<DeviceMemory>; 2] = [&|rows| q.head(rows), &|rows| out.head(rows)];
        let wanted = lse.as_ref().map(|_| softmax);
        let found = launcher.attention(pool, shape, groups, (rows[0], rows[1]), partial, wanted)?;
        if let (Some(from), Some(lse)) = (found, lse) {
            let mut pairs = vec![0.0f32; from.bytes / size_of::<f32>()];
            landing.fetch(from, bytes_of_mut(&mut pairs))?;
            for row in groups.iter().flat_map(|group| group.first_row..group.first_row + group.rows) {
                for at in row * shape.heads..(row + 1) * shape.heads {
                    // The logarithm is the host's, so that it is the same everywhere.
                    let value = f64::from(pairs[2 * at]) + libm::log(f64::from(pairs[2 * at + 1]));
                    lse[at] = value as f32;
                }
            }
        }
        Ok(())
    }

    fn gather_rows(&self, x: &CudaTensor, rows: &[usize], out: &mut CudaTensor) -> Result<(), KernelError> {
        check::equal("gather_rows", "columns of out", x.cols, out.cols)?;
        rows.iter().try_for_each(|&row| check::below("gather_rows", "row", row, x.rows))?;
        let to = out.checked("gather_rows", rows.len())?;
        if rows.is_empty() {
            return Ok(());
        }
        let ids = rows.iter().map(|&row| number("rows", row)).collect::<Result<Vec<u32>, _>>()?;
        let mut calls = self.calls();
        let staged = calls.staging.stage([bytes_of(&ids)])?;
        let (from, ids) = (Arg::Read(x.data.all()), Arg::Read(staged.parts[0]));
        let (count, cols) = (Arg::U32(number("rows", rows.len())?), Arg::U32(x.cols as u32));
        self.programs.each("gather_rows", rows.len() * x.cols, &[from, ids, Arg::Write(to), count, cols])?;
        calls.staging.done(&staged)
    }

    fn finish(&self) -> Result<(), KernelError> {
        let Device { driver, compute, load, save } = &*self.device;
        [compute, load, save].into_iter().try_for_each(|stream| Ok(driver.finish(*stream)?))
    }

    fn read(&self, x: &CudaTensor, rows: usize, out: &mut [f32]) -> Result<(), KernelError> {
        let from = x.checked("read", rows)?;
        check::equal("read", "length of out", rows * x.cols, out.len())?;
        self.calls().landing.fetch(from, bytes_of_mut(out))
    }

    fn write(&self, x: &mut CudaTensor, values: &[f32]) -> Result<(), KernelError> {
        check::equal("write", "length of values (remainder of a row)", 0, values.len() % x.cols)?;
        let to = x.checked("write", values.len() / x.cols)?;
        self.calls().uploads.send(bytes_of(values), to)
    }

    fn copy_page(&self, pool: &mut CudaPool, source: PageId, target: PageId) -> Result<(), KernelError> {
        check::page("copy_page", &pool.spec, source)?;
        check::page("copy_page", &pool.spec, target)?;
        pool.copy_page(source, target)
    }

    fn gather_cell(
        &self,
        pool: &CudaPool,
        tables: &[&[PageId]],
        tokens: usize,
        cell: &mut [u8],
    ) -> Result<(), KernelError> {
        check::cell("gather_cell", &pool.spec, tables, tokens, cell.len())?;
        lock(&self.saves).gather(&self.programs, pool, tables, tokens, cell)
    }

    fn scatter_cell(
        &self,
        pool: &mut CudaPool,
        tables: &[&[PageId]],
        tokens: usize,
        cell: &[u8],
    ) -> Result<(), KernelError> {
        check::cell("scatter_cell", &pool.spec, tables, tokens, cell.len())?;
        lock(&self.loads).scatter(&self.programs, pool, tables, tokens, cell)
    }

    fn relocate(
        &self,
        pool: &mut CudaPool,
        kv_type: KvType,
        tables: &[&[PageId]],
        shape: &CellShape,
        to: usize,
    ) -> Result<(), KernelError> {
        relocation::check(kv_type, tables, shape, to)?;
        check::equal(
            "relocate",
            "bytes of an element",
            pool.spec.kv_type.head_bytes(1),
            kv_type.head_bytes(1),
        )?;
        check::equal("relocate", "head_dim", pool.spec.head_dim, shape.head_dim)?;
        let places = to / PAGE_TOKENS..(shape.start + shape.tokens).div_ceil(PAGE_TOKENS);
        let mut pages = tables.iter().flat_map(|table| &table[places.clone()]);
        pages.try_for_each(|page| check::page("relocate", &pool.spec, *page))?;
        if shape.tokens == 0 {
            return Ok(());
        }
        relocate((&self.device, &self.programs, &mut self.calls().staging), pool, tables, shape, to)
    }

    fn gather_packed(
        &self,
        pool: &CudaPool,
        tables: &[&[PageId]],
        codec: Codec,
        shape: &CellShape,
        packed: &mut [u8],
    ) -> Result<(), KernelError> {
        check_packed("gather_packed", pool, tables, (codec, shape), packed.len())?;
        lock(&self.saves).gather_packed(&self.programs, pool, tables, (codec, shape), packed)
    }

    fn scatter_packed(
        &self,
        pool: &mut CudaPool,
        tables: &[&[PageId]],
        codec: Codec,
        shape: &CellShape,
        packed: &[u8],
    ) -> Result<(), KernelError> {
        check_packed("scatter_packed", pool, tables, (codec, shape), packed.len())?;
        lock(&self.loads).scatter_packed(&self.programs, pool, tables, (codec, shape), packed)
    }
}

/// Refuses what is no packed cell of these pages.
fn check_packed(
    kernel: &'static str,
    pool: &CudaPool,
    tables: &[&[PageId]],
    (codec, shape): (Codec, &CellShape),
    bytes: usize,
) -> Result<(), KernelError> {
    check::equal(kernel, "KV heads", tables.len(), shape.kv_heads)?;
    check::equal(kernel, "head_dim", pool.spec.head_dim, shape.head_dim)?;
    // Pages of another type than f16 have cells of other sizes.
    check::cell(kernel, &pool.spec, tables, shape.tokens, shape.bytes())?;
    shape.check("bytes of the packed cell", bytes, shape.packed_bytes(codec))
}

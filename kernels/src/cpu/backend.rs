//! [`CpuBackend`]: the kernels behind the [`Backend`] trait. Checks every argument, then cuts the work.

use std::sync::{Mutex, PoisonError};

use super::add::Add;
use super::attention::{Attention, attention};
use super::buffer::Buffer;
use super::gate::{Activation, Gated};
use super::geglu::Gelu;
use super::lanes::dispatch;
use super::linear::{Product, Scratch, linears};
use super::norm::{HeadNorm, RmsNorm};
use super::pages::Pages;
use super::rope::Rotate;
use super::scale::{Scale, ScaleChannels};
use super::swiglu::Silu;
use super::workers::{Disjoint, MAX_THREADS, Workers};
use super::{CpuMatrix, CpuOptions, CpuPool, CpuRope, CpuVector, Isa, Rounding, best_isa, embed};
use crate::backend::{AttentionShape, Backend, MatrixSpec, Output, PageId, PoolSpec, RopePairing, RowGroup};
use crate::check;
use crate::error::KernelError;

/// Values that one item of an element-wise kernel covers, about.
const ITEM_VALUES: usize = 16 << 10;

/// Row-major f32 activations on the host.
pub struct CpuTensor {
    rows: usize,
    cols: usize,
    data: Buffer<f32>,
}

impl CpuTensor {
    /// The first `rows` rows.
    fn head(&self, kernel: &'static str, rows: usize) -> Result<&[f32], KernelError> {
        check::rows(kernel, rows, self.rows)?;
        Ok(&self.data[..rows * self.cols])
    }

    fn head_mut(&mut self, kernel: &'static str, rows: usize) -> Result<&mut [f32], KernelError> {
        check::rows(kernel, rows, self.rows)?;
        Ok(&mut self.data[..rows * self.cols])
    }
}

/// The backend that runs on the host's processor. Calls from several threads take turns.
pub struct CpuBackend {
    isa: Isa,
    rounding: Rounding,
    workers: Workers,
    scratch: Mutex<Scratch>,
}

impl CpuBackend {
    /// Starts the worker threads.
    ///
    /// # Errors
    /// An instruction set this processor lacks, or threads that cannot be started.
    pub fn new(options: CpuOptions) -> Result<Self, KernelError> {
        let isa = options.isa.unwrap_or_else(best_isa);
        if !isa.is_available() {
            return Err(KernelError::MissingIsa { isa: isa.name() });
        }
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS)),
            threads => threads,
        };
        Ok(Self {
            isa,
            rounding: options.rounding,
            workers: Workers::new(threads)?,
            scratch: Mutex::default(),
        })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that share the work.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }

    /// Runs `part(first row, rows)` over pieces of `rows` rows of `width` values.
    fn by_rows(&self, rows: usize, width: usize, part: impl Fn(usize, usize) + Sync) {
        let step = (ITEM_VALUES / width.max(1)).max(1);
        self.workers.run(rows.div_ceil(step), &|item| part(item * step, step.min(rows - item * step)));
    }

    fn gated<A: Activation>(
        &self,
        kernel: &'static str,
        gate: &mut CpuTensor,
        up: &CpuTensor,
        rows: usize,
    ) -> Result<(), KernelError> {
        check::equal(kernel, "columns of up", gate.cols, up.cols)?;
        let cols = gate.cols;
        let up = up.head(kernel, rows)?;
        let gate = Disjoint::new(gate.head_mut(kernel, rows)?);
        self.by_rows(rows, cols, |first, rows| {
            // SAFETY: rows belong to one item.
            let gate = unsafe { gate.slice(first * cols, rows * cols) };
            dispatch(self.isa, Gated::<A>::new(gate, &up[first * cols..][..rows * cols]));
        });
        Ok(())
    }
}

impl Backend for CpuBackend {
    type Matrix = CpuMatrix;
    type Vector = CpuVector;
    type Tensor = CpuTensor;
    type Pool = CpuPool;
    type Rope = CpuRope;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn numerics_class(&self) -> &'static str {
        match self.rounding {
            Rounding::Fast => "cpu-2-fast",
            Rounding::Fine => "cpu-2-fine",
        }
    }

    fn describe(&self) -> String {
        format!("CPU, {}, {} threads", self.isa.name(), self.threads())
    }

    fn load_matrix(&self, spec: &MatrixSpec, bytes: &[u8]) -> Result<CpuMatrix, KernelError> {
        CpuMatrix::load(&self.workers, spec, bytes)
    }

    fn load_vector(&self, name: &str, values: &[f32]) -> Result<CpuVector, KernelError> {
        CpuVector::load(name, values)
    }

    fn tensor(&self, rows: usize, cols: usize) -> Result<CpuTensor, KernelError> {
        let refused = || KernelError::Size { what: "activations".to_string(), rows, cols };
        let len = rows.checked_mul(cols).filter(|len| *len > 0).ok_or_else(refused)?;
        Ok(CpuTensor { rows, cols, data: Buffer::zeroed("activations", len)? })
    }

    fn pool(&self, spec: PoolSpec) -> Result<CpuPool, KernelError> {
        CpuPool::new(spec)
    }

    fn rope_table(&self, base: f32, dims: usize, positions: usize) -> Result<CpuRope, KernelError> {
        CpuRope::new(&self.workers, base, dims, positions)
    }

    fn matrix_bytes(&self, matrix: &CpuMatrix) -> usize {
        matrix.bytes()
    }

    fn embed(&self, table: &CpuMatrix, ids: &[u32], out: &mut CpuTensor) -> Result<(), KernelError> {
        check::equal("embed", "columns of out", table.cols, out.cols)?;
        ids.iter().try_for_each(|&id| check::below("embed", "id", id as usize, table.rows))?;
        let cols = table.cols;
        let out = Disjoint::new(out.head_mut("embed", ids.len())?);
        self.by_rows(ids.len(), cols, |first, rows| {
            for (row, &id) in (first..).zip(&ids[first..first + rows]) {
                // SAFETY: a row belongs to one item.
                embed::embed(table, id as usize, unsafe { out.slice(row * cols, cols) });
            }
        });
        Ok(())
    }

    fn linear(
        &self,
        weights: &CpuMatrix,
        bias: Option<&CpuVector>,
        x: &CpuTensor,
        out: &mut CpuTensor,
        rows: usize,
    ) -> Result<(), KernelError> {
        self.linears(&mut [Output { weights, bias, out }], x, rows)
    }

    fn linears(
        &self,
        products: &mut [Output<'_, Self>],
        x: &CpuTensor,
        rows: usize,
    ) -> Result<(), KernelError> {
        let cols = x.cols;
        let x = x.head("linear", rows)?;
        let (mut jobs, mut outs) = (Vec::new(), Vec::new());
        for Output { weights, bias, out } in products {
            check::equal("linear", "columns of x", weights.cols, cols)?;
            check::equal("linear", "columns of out", weights.rows, out.cols)?;
            if let Some(bias) = bias {
                check::equal("linear", "length of bias", weights.rows, bias.values.len())?;
            }
            let bias = bias.map(|bias| bias.values.as_slice());
            jobs.push(Product { matrix: weights, bias, x, rows });
            outs.push(Disjoint::new(out.head_mut("linear", rows)?));
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        linears(self.isa, self.rounding, &self.workers, &mut scratch, &jobs, &outs);
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &CpuTensor,
        weight: &CpuVector,
        eps: f32,
        out: &mut CpuTensor,
        rows: usize,
    ) -> Result<(), KernelError> {
        let cols = x.cols;
        check::equal("rms_norm", "length of weight", cols, weight.values.len())?;
        check::equal("rms_norm", "columns of out", cols, out.cols)?;
        let x = x.head("rms_norm", rows)?;
        let out = Disjoint::new(out.head_mut("rms_norm", rows)?);
        self.by_rows(rows, cols, |first, rows| {
            // SAFETY: rows belong to one item.
            let out = unsafe { out.slice(first * cols, rows * cols) };
            dispatch(
                self.isa,
                RmsNorm { x: &x[first * cols..][..rows * cols], weight: &weight.values, eps, out },
            );
        });
        Ok(())
    }

    fn head_norm(
        &self,
        x: &mut CpuTensor,
        heads: usize,
        weight: &CpuVector,
        eps: f32,
        rows: usize,
    ) -> Result<(), KernelError> {
        let cols = x.cols;
        check::equal("head_norm", "columns of x", heads.saturating_mul(weight.values.len()), cols)?;
        let x = Disjoint::new(x.head_mut("head_norm", rows)?);
        self.by_rows(rows, cols, |first, rows| {
            // SAFETY: rows belong to one item.
            let x = unsafe { x.slice(first * cols, rows * cols) };
            dispatch(self.isa, HeadNorm { x, weight: &weight.values, eps });
        });
        Ok(())
    }

    fn scale(&self, x: &mut CpuTensor, factor: f32, rows: usize) -> Result<(), KernelError> {
        let cols = x.cols;
        let x = Disjoint::new(x.head_mut("scale", rows)?);
        self.by_rows(rows, cols, |first, rows| {
            // SAFETY: rows belong to one item.
            let x = unsafe { x.slice(first * cols, rows * cols) };
            dispatch(self.isa, Scale { x, factor });
        });
        Ok(())
    }

    fn scale_channels(&self, x: &mut CpuTensor, factors: &CpuVector, rows: usize) -> Result<(), KernelError> {
        let (cols, factors) = (x.cols, &factors.values[..]);
        check::equal("scale_channels", "factors", cols, factors.len())?;
        let x = Disjoint::new(x.head_mut("scale_channels", rows)?);
        self.by_rows(rows, cols, |first, rows| {
            // SAFETY: rows belong to one item.
            let x = unsafe { x.slice(first * cols, rows * cols) };
            dispatch(self.isa, ScaleChannels { x, factors });
        });
        Ok(())
    }

    fn add(&self, x: &mut CpuTensor, y: &CpuTensor, rows: usize) -> Result<(), KernelError> {
        check::equal("add", "columns of y", x.cols, y.cols)?;
        let cols = x.cols;
        let y = y.head("add", rows)?;
        let x = Disjoint::new(x.head_mut("add", rows)?);
        self.by_rows(rows, cols, |first, rows| {
            // SAFETY: rows belong to one item.
            let x = unsafe { x.slice(first * cols, rows * cols) };
            dispatch(self.isa, Add { x, y: &y[first * cols..][..rows * cols] });
        });
        Ok(())
    }

    fn swiglu(&self, gate: &mut CpuTensor, up: &CpuTensor, rows: usize) -> Result<(), KernelError> {
        self.gated::<Silu>("swiglu", gate, up, rows)
    }

    fn geglu(&self, gate: &mut CpuTensor, up: &CpuTensor, rows: usize) -> Result<(), KernelError> {
        self.gated::<Gelu>("geglu", gate, up, rows)
    }

    fn rope(
        &self,
        x: &mut CpuTensor,
        heads: usize,
        head_dim: usize,
        rope: &CpuRope,
        pairing: RopePairing,
        positions: &[u32],
    ) -> Result<(), KernelError> {
        check::equal("rope", "columns of x", heads.saturating_mul(head_dim), x.cols)?;
        check::equal("rope", "head_dim", rope.dims, head_dim)?;
        positions.iter().try_for_each(|&p| check::below("rope", "position", p as usize, rope.positions))?;
        let cols = x.cols;
        let x = Disjoint::new(x.head_mut("rope", positions.len())?);
        self.by_rows(positions.len(), cols, |first, rows| {
            // SAFETY: rows belong to one item.
            let x = unsafe { x.slice(first * cols, rows * cols) };
            dispatch(self.isa, Rotate { x, rope, pairing, positions: &positions[first..first + rows] });
        });
        Ok(())
    }

    fn append(
        &self,
        pool: &mut CpuPool,
        shape: AttentionShape,
        groups: &[RowGroup<'_>],
        k: &CpuTensor,
        v: &CpuTensor,
    ) -> Result<(), KernelError> {
        check::tables("append", &pool.spec, shape, groups)?;
        let width = shape.kv_heads.saturating_mul(shape.head_dim);
        check::equal("append", "columns of k", width, k.cols)?;
        check::equal("append", "columns of v", width, v.cols)?;
        check::disjoint("append", groups, k.rows.min(v.rows))?;
        groups.iter().for_each(|group| pool.append(shape, group, &k.data, &v.data));
        Ok(())
    }

    fn attention(
        &self,
        pool: &CpuPool,
        shape: AttentionShape,
        groups: &[RowGroup<'_>],
        q: &CpuTensor,
        out: &mut CpuTensor,
        lse: Option<&mut [f32]>,
    ) -> Result<(), KernelError> {
        check::tables("attention", &pool.spec, shape, groups)?;
        check::equal("attention", "columns of q", shape.heads * shape.head_dim, q.cols)?;
        check::equal("attention", "columns of out", shape.heads * shape.head_dim, out.cols)?;
        check::disjoint("attention", groups, q.rows.min(out.rows))?;
        if let Some(lse) = &lse {
            check::disjoint("attention: lse", groups, lse.len() / shape.heads)?;
        }
        let (isa, workers, q, out) = (self.isa, &self.workers, &q.data[..], &mut out.data);
        match &pool.pages {
            Pages::F16(pages) => attention(isa, workers, &Attention { pages, shape, groups, q }, out, lse),
            Pages::F32(pages) => attention(isa, workers, &Attention { pages, shape, groups, q }, out, lse),
            Pages::Int8(pages) => attention(isa, workers, &Attention { pages, shape, groups, q }, out, lse),
        }
        Ok(())
    }

    fn gather_rows(&self, x: &CpuTensor, rows: &[usize], out: &mut CpuTensor) -> Result<(), KernelError> {
        check::equal("gather_rows", "columns of out", x.cols, out.cols)?;
        rows.iter().try_for_each(|&row| check::below("gather_rows", "row", row, x.rows))?;
        let out = out.head_mut("gather_rows", rows.len())?;
        for (out, &row) in out.chunks_exact_mut(x.cols).zip(rows) {
            out.copy_from_slice(&x.data[row * x.cols..][..x.cols]);
        }
        Ok(())
    }

    fn read(&self, x: &CpuTensor, rows: usize, out: &mut [f32]) -> Result<(), KernelError> {
        let values = x.head("read", rows)?;
        check::equal("read", "length of out", values.len(), out.len())?;
        out.copy_from_slice(values);
        Ok(())
    }

    fn write(&self, x: &mut CpuTensor, values: &[f32]) -> Result<(), KernelError> {
        check::equal("write", "length of values (remainder of a row)", 0, values.len() % x.cols)?;
        x.head_mut("write", values.len() / x.cols)?.copy_from_slice(values);
        Ok(())
    }

    fn copy_page(&self, pool: &mut CpuPool, source: PageId, target: PageId) -> Result<(), KernelError> {
        check::page("copy_page", &pool.spec, source)?;
        check::page("copy_page", &pool.spec, target)?;
        pool.copy_page(source, target);
        Ok(())
    }

    fn gather_cell(
        &self,
        pool: &CpuPool,
        tables: &[&[PageId]],
        tokens: usize,
        cell: &mut [u8],
    ) -> Result<(), KernelError> {
        check::cell("gather_cell", &pool.spec, tables, tokens, cell.len())?;
        pool.gather(tables, tokens, cell);
        Ok(())
    }

    fn scatter_cell(
        &self,
        pool: &mut CpuPool,
        tables: &[&[PageId]],
        tokens: usize,
        cell: &[u8],
    ) -> Result<(), KernelError> {
        check::cell("scatter_cell", &pool.spec, tables, tokens, cell.len())?;
        pool.scatter(tables, tokens, cell);
        Ok(())
    }
}

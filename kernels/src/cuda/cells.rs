//! `gather_cell` and `scatter_cell`: cells leave on the save stream and come on the load stream, packed by a codec on the device
//! where that is asked for, so that the bus has less to carry.

use std::sync::Arc;

use super::driver::{Arg, DeviceMemory, Span};
use super::memory::{Device, Mark, bytes_of};
use super::pool::{CudaPool, suffix};
use super::programs::{Programs, number};
use super::staging::{Landing, Scratch, Staging};
use crate::backend::{PAGE_TOKENS, PageId, RopePairing};
use crate::codec::{CellShape, Codec, GROUP, Rotation};
use crate::error::KernelError;

/// Threads of a block of the kernels, `CELL_THREADS` in `cells.cu`.
const THREADS: u32 = 128;

/// Cells under way before the host waits for the oldest.
const LOADS: usize = 8;

/// Page ids of a chunk as the kernels take them: `[head][page]`.
fn table_of(tables: &[&[PageId]], tokens: usize) -> Vec<u32> {
    let pages = tokens.div_ceil(PAGE_TOKENS);
    tables.iter().flat_map(|table| table[..pages].iter().map(|page| page.0)).collect()
}

/// Threads of a block of the codec's kernels, `CODEC_THREADS` in `codec.cu`.
const CODEC_THREADS: u32 = 128;

/// Arguments that packing and unpacking have in common, between the two byte arrays.
fn codec_args(shape: &CellShape, factors: Span<DeviceMemory>) -> Result<[Arg; 4], KernelError> {
    Ok([
        Arg::Read(factors),
        Arg::U32(number("head_dim", shape.head_dim)?),
        Arg::U32(number("tokens", shape.tokens)?),
        Arg::U32(u32::from(shape.rope_pairing == RopePairing::Adjacent)),
    ])
}

/// The way out.
pub(super) struct Saves {
    device: Arc<Device>,
    tables: Staging,
    /// The cell on the device, and packed.
    cell: Scratch,
    packed: Scratch,
    landing: Landing,
    mark: Mark,
}

impl Saves {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, KernelError> {
        Ok(Self {
            device: device.clone(),
            tables: Staging::new(device, device.save, 1)?,
            cell: Scratch::new(device, "a cell"),
            packed: Scratch::new(device, "a packed cell"),
            landing: Landing::new(device, device.save),
            mark: Mark::new(device)?,
        })
    }

    /// Pages to `cell`. Everything is checked.
    pub(super) fn gather(
        &mut self,
        programs: &Programs,
        pool: &CudaPool,
        tables: &[&[PageId]],
        tokens: usize,
        cell: &mut [u8],
    ) -> Result<(), KernelError> {
        let staged = self.tables.stage([bytes_of(&table_of(tables, tokens))])?;
        let to = self.gather_to(programs, pool, (tables, staged.parts[0]), tokens, cell.len())?;
        self.tables.done(&staged)?;
        self.landing.fetch(to, cell)
    }

    /// Pages to a packed cell. Everything is checked.
    pub(super) fn gather_packed(
        &mut self,
        programs: &Programs,
        pool: &CudaPool,
        tables: &[&[PageId]],
        (codec, shape): (Codec, &CellShape),
        packed: &mut [u8],
    ) -> Result<(), KernelError> {
        let rotation = Rotation::new(shape);
        let factors = rotation.factors().as_flattened();
        let staged = self.tables.stage([bytes_of(&table_of(tables, shape.tokens)), bytes_of(factors)])?;
        let [ids, factors] = staged.parts;
        let cell = self.gather_to(programs, pool, (tables, ids), shape.tokens, shape.bytes())?;
        let to = self.packed.of(packed.len())?;
        let [factors, head_dim, tokens, adjacent] = codec_args(shape, factors)?;
        let args = [Arg::Read(cell), factors, head_dim, tokens, adjacent, Arg::Write(to)];
        let grid = [shape.tokens.div_ceil(GROUP), shape.kv_heads, 2];
        let name = format!("pack_cell_{}", codec.name());
        programs.launch(self.device.save, &name, grid, CODEC_THREADS, &args)?;
        self.tables.done(&staged)?;
        self.landing.fetch(to, packed)
    }

    /// Pages to a cell of `bytes` bytes on the device; `ids` is where the tables are there.
    fn gather_to(
        &mut self,
        programs: &Programs,
        pool: &CudaPool,
        (tables, ids): (&[&[PageId]], Span<DeviceMemory>),
        tokens: usize,
        bytes: usize,
    ) -> Result<Span<DeviceMemory>, KernelError> {
        let save = self.device.save;
        pool.after_loads(save)?;
        self.mark.order(self.device.compute, save)?;
        let to = self.cell.of(bytes)?;
        let [values, scales] = pool.args(Arg::Read);
        let pages = tokens.div_ceil(PAGE_TOKENS);
        programs.launch(
            save,
            &format!("gather_cell_{}", suffix(pool.spec.kv_type)),
            [pages, tables.len(), 1],
            THREADS,
            &[
                values,
                scales,
                Arg::U32(number("head_dim", pool.spec.head_dim)?),
                Arg::Read(ids),
                Arg::U32(number("pages", pages)?),
                Arg::U32(number("tokens", tokens)?),
                Arg::Write(to),
            ],
        )?;
        Ok(to)
    }
}

/// The way in.
pub(super) struct Loads {
    device: Arc<Device>,
    /// Tables and cells.
    staging: Staging,
    /// A cell that was unpacked.
    cell: Scratch,
    mark: Mark,
}

impl Loads {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, KernelError> {
        let staging = Staging::new(device, device.load, LOADS)?;
        let cell = Scratch::new(device, "an unpacked cell");
        Ok(Self { device: device.clone(), staging, cell, mark: Mark::new(device)? })
    }

    /// `cell` to pages. Everything is checked.
    pub(super) fn scatter(
        &mut self,
        programs: &Programs,
        pool: &mut CudaPool,
        tables: &[&[PageId]],
        tokens: usize,
        cell: &[u8],
    ) -> Result<(), KernelError> {
        let staged = self.staging.stage([cell, bytes_of(&table_of(tables, tokens))])?;
        let [from, ids] = staged.parts;
        self.scatter_from(programs, pool, (tables, ids), tokens, from)?;
        self.staging.done(&staged)
    }

    /// A packed cell to pages. Everything is checked.
    pub(super) fn scatter_packed(
        &mut self,
        programs: &Programs,
        pool: &mut CudaPool,
        tables: &[&[PageId]],
        (codec, shape): (Codec, &CellShape),
        packed: &[u8],
    ) -> Result<(), KernelError> {
        let rotation = Rotation::new(shape);
        let factors = rotation.factors().as_flattened();
        let ids = table_of(tables, shape.tokens);
        let staged = self.staging.stage([packed, bytes_of(&ids), bytes_of(factors)])?;
        let [from, ids, factors] = staged.parts;
        let cell = self.cell.of(shape.bytes())?;
        let [factors, head_dim, tokens, adjacent] = codec_args(shape, factors)?;
        let args = [Arg::Read(from), factors, head_dim, tokens, adjacent, Arg::Write(cell)];
        let pairs = shape.tokens * shape.head_dim / 2;
        let grid = [pairs.div_ceil(CODEC_THREADS as usize), shape.kv_heads, 2];
        let name = format!("unpack_cell_{}", codec.name());
        programs.launch(self.device.load, &name, grid, CODEC_THREADS, &args)?;
        self.scatter_from(programs, pool, (tables, ids), shape.tokens, cell)?;
        self.staging.done(&staged)
    }

    /// A cell on the device to pages; `ids` is where the tables are there.
    fn scatter_from(
        &self,
        programs: &Programs,
        pool: &mut CudaPool,
        (tables, ids): (&[&[PageId]], Span<DeviceMemory>),
        tokens: usize,
        cell: Span<DeviceMemory>,
    ) -> Result<(), KernelError> {
        let load = self.device.load;
        // The bytes cross the bus meanwhile; only what changes pages waits for compute, which may be reading them.
        self.mark.order(self.device.compute, load)?;
        let [values, scales] = pool.args(Arg::Change);
        let pages = tokens.div_ceil(PAGE_TOKENS);
        programs.launch(
            load,
            &format!("scatter_cell_{}", suffix(pool.spec.kv_type)),
            [pages, tables.len(), 1],
            THREADS,
            &[
                values,
                scales,
                Arg::U32(number("head_dim", pool.spec.head_dim)?),
                Arg::Read(ids),
                Arg::U32(number("pages", pages)?),
                Arg::U32(number("tokens", tokens)?),
                Arg::Read(cell),
            ],
        )?;
        pool.mark_load()
    }
}

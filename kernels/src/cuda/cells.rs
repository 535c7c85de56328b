//! `gather_cell` and `scatter_cell`: cells leave on the save stream and come on the load stream.

use std::sync::Arc;

use super::driver::Arg;
use super::memory::{Device, Mark, bytes_of};
use super::pool::{CudaPool, suffix};
use super::programs::{Programs, number};
use super::staging::{Landing, Scratch, Staging};
use crate::backend::{PAGE_TOKENS, PageId};
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

/// The way out.
pub(super) struct Saves {
    device: Arc<Device>,
    tables: Staging,
    /// The cell on the device.
    cell: Scratch,
    landing: Landing,
    mark: Mark,
}

impl Saves {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, KernelError> {
        Ok(Self {
            device: device.clone(),
            tables: Staging::new(device, device.save, 1)?,
            cell: Scratch::new(device, "a cell"),
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
        let save = self.device.save;
        pool.after_loads(save)?;
        self.mark.order(self.device.compute, save)?;
        let to = self.cell.of(cell.len())?;
        let staged = self.tables.stage([bytes_of(&table_of(tables, tokens))])?;
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
                Arg::Read(staged.parts[0]),
                Arg::U32(number("pages", pages)?),
                Arg::U32(number("tokens", tokens)?),
                Arg::Write(to),
            ],
        )?;
        self.tables.done(&staged)?;
        self.landing.fetch(to, cell)
    }
}

/// The way in.
pub(super) struct Loads {
    device: Arc<Device>,
    /// Tables and cells.
    staging: Staging,
    mark: Mark,
}

impl Loads {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, KernelError> {
        let staging = Staging::new(device, device.load, LOADS)?;
        Ok(Self { device: device.clone(), staging, mark: Mark::new(device)? })
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
        let load = self.device.load;
        let staged = self.staging.stage([cell, bytes_of(&table_of(tables, tokens))])?;
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
                Arg::Read(staged.parts[1]),
                Arg::U32(number("pages", pages)?),
                Arg::U32(number("tokens", tokens)?),
                Arg::Read(staged.parts[0]),
            ],
        )?;
        pool.mark_load()?;
        self.staging.done(&staged)
    }
}

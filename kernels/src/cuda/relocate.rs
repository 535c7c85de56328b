//! `relocate`: KV goes to an earlier place of its sequence, on the compute stream.

use super::driver::Arg;
use super::memory::{Device, bytes_of};
use super::pool::{CudaPool, suffix};
use super::programs::{Programs, number};
use super::staging::Staging;
use crate::backend::{PAGE_TOKENS, PageId, RopePairing};
use crate::codec::{CellShape, Rotation};
use crate::error::KernelError;

/// Threads of a block of the kernel, `RELOCATE_THREADS` in `relocate.cu`.
const THREADS: u32 = 256;

/// Moves the tokens of `shape` to `to`. Everything is checked.
pub(super) fn relocate(
    (device, programs, staging): (&Device, &Programs, &mut Staging),
    pool: &CudaPool,
    tables: &[&[PageId]],
    shape: &CellShape,
    to: usize,
) -> Result<(), KernelError> {
    // Pages before those that are written are none of the kernel's.
    let base = to / PAGE_TOKENS;
    let end = (shape.start + shape.tokens).div_ceil(PAGE_TOKENS);
    let ids: Vec<u32> = tables.iter().flat_map(|table| table[base..end].iter().map(|page| page.0)).collect();
    let rotation = Rotation::new(&CellShape { start: shape.start - to, tokens: 1, ..*shape });
    let staged = staging.stage([bytes_of(&ids), bytes_of(rotation.factors().as_flattened())])?;
    let [ids, factors] = staged.parts;
    pool.after_loads(device.compute)?;
    let [values, _] = pool.args(Arg::Change);
    let place = |token: usize| number("token", token - base * PAGE_TOKENS).map(Arg::U32);
    programs.launch(
        device.compute,
        &format!("relocate_{}", suffix(pool.spec.kv_type)),
        [1, tables.len(), 2],
        THREADS,
        &[
            values,
            Arg::U32(number("head_dim", shape.head_dim)?),
            Arg::Read(ids),
            Arg::U32(number("pages", end - base)?),
            place(shape.start)?,
            place(to)?,
            Arg::U32(number("tokens", shape.tokens)?),
            Arg::Read(factors),
            Arg::U32(u32::from(shape.rope_pairing == RopePairing::Adjacent)),
        ],
    )?;
    staging.done(&staged)
}

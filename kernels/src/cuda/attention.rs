//! `append` and `attention`: groups of rows as lists of work items, and the launches.

use super::driver::{Arg, DeviceMemory, Span};
use super::memory::{Device, bytes_of};
use super::pool::{CudaPool, suffix};
use super::programs::{Programs, number};
use super::staging::{Scratch, Staging};
use crate::backend::{AttentionShape, PAGE_TOKENS, RowGroup};
use crate::error::KernelError;

/// Tokens of a partition, threads of a block and most pairs of an item, as in `attention.cuh` and `attention.cu`.
const PART_TOKENS: usize = 256;
const THREADS: u32 = 128;
const DECODE_PAIRS: usize = 8;
const PREFILL_PAIRS: usize = 16;
/// Threads of a block of `append` and of `attention_merge`.
const SMALL_THREADS: u32 = 64;
/// Groups of fewer rows have the partitions of each row computed apart. It changes no bits.
const PREFILL_ROWS: usize = 8;
/// Bytes of a softmax: the largest score and the sum.
const SOFTMAX_BYTES: usize = 8;

/// What the kernels are told about the rows of a call.
#[derive(Default)]
struct Plan {
    /// Page ids of all groups, `[group][KV head][page]`.
    tables: Vec<u32>,
    /// `append`: for each row its place, the index of its token, the start of its tables, pages of each.
    rows: Vec<[u32; 4]>,
    /// A partition of a row each: place, index of the token, partition, start of the tables, pages of each.
    decode: Vec<[u32; 5]>,
    /// A row each: place, first item in `decode`, items.
    merge: Vec<[u32; 3]>,
    /// A tile of rows each: place, index of the first token, rows, start of the tables, pages of each.
    prefill: Vec<[u32; 5]>,
    /// One past the last row.
    end: usize,
}

/// Puts tables and rows of all groups in lists.
fn plan(shape: AttentionShape, groups: &[RowGroup<'_>]) -> Result<Plan, KernelError> {
    let mut plan = Plan::default();
    let tile = (PREFILL_PAIRS / (shape.heads / shape.kv_heads)).max(1);
    for group in groups.iter().filter(|group| group.rows > 0) {
        let tokens = group.start + group.rows;
        let pages = tokens.div_ceil(PAGE_TOKENS);
        let tables = number("pages of all tables", plan.tables.len())?;
        for table in group.tables {
            plan.tables.extend(table[..pages].iter().map(|page| page.0));
        }
        number("tokens", tokens)?;
        let (start, pages) = (number("tokens", group.start)?, number("pages", pages)?);
        plan.end = plan.end.max(group.first_row + group.rows);
        let first_row = number("rows", group.first_row)?;
        number("rows", plan.end)?;
        for row in 0..group.rows as u32 {
            plan.rows.push([first_row + row, start + row, tables, pages]);
        }
        if group.rows >= PREFILL_ROWS {
            for row in (0..group.rows).step_by(tile) {
                let rows = tile.min(group.rows - row) as u32;
                plan.prefill.push([first_row + row as u32, start + row as u32, rows, tables, pages]);
            }
            continue;
        }
        for row in 0..group.rows {
            let token = group.start + row;
            let parts = shape.first_seen(token) / PART_TOKENS..(token + 1).div_ceil(PART_TOKENS);
            let first = number("partitions", plan.decode.len())?;
            plan.merge.push([first_row + row as u32, first, parts.len() as u32]);
            for part in parts {
                let (row, part) = (row as u32, number("partitions", part)?);
                plan.decode.push([first_row + row, start + row, part, tables, pages]);
            }
        }
    }
    Ok(plan)
}

/// What `append` and `attention` need besides their arguments.
pub(super) struct Launcher<'a> {
    pub(super) device: &'a Device,
    pub(super) programs: &'a Programs,
    pub(super) staging: &'a mut Staging,
}

/// Rows of activations: the first `rows` of them, of `width` values.
pub(super) type Rows<'a> = &'a dyn Fn(usize) -> Span<DeviceMemory>;

impl Launcher<'_> {
    /// Writes K and V of all groups to their pages. Everything is checked.
    pub(super) fn append(
        &mut self,
        pool: &CudaPool,
        shape: AttentionShape,
        groups: &[RowGroup<'_>],
        k: Rows<'_>,
        v: Rows<'_>,
    ) -> Result<(), KernelError> {
        let plan = plan(shape, groups)?;
        if plan.rows.is_empty() {
            return Ok(());
        }
        pool.after_loads(self.device.compute)?;
        let staged = self.staging.stage([bytes_of(plan.rows.as_flattened()), bytes_of(&plan.tables)])?;
        let [values, scales] = pool.args(Arg::Change);
        self.programs.launch(
            self.device.compute,
            &format!("append_{}", suffix(pool.spec.kv_type)),
            [plan.rows.len(), shape.kv_heads, 1],
            SMALL_THREADS,
            &[
                values,
                scales,
                Arg::U32(number("KV heads", shape.kv_heads)?),
                Arg::U32(number("head_dim", shape.head_dim)?),
                Arg::Read(staged.parts[0]),
                Arg::Read(staged.parts[1]),
                Arg::Read(k(plan.end)),
                Arg::Read(v(plan.end)),
            ],
        )?;
        self.staging.done(&staged)
    }

    /// Attention of all groups; where `softmax` is given, its part for the rows that there are. `partial` holds
    /// partitions that wait to be merged. Everything is checked. One past the last row.
    pub(super) fn attention(
        &mut self,
        pool: &CudaPool,
        shape: AttentionShape,
        groups: &[RowGroup<'_>],
        (q, out): (Rows<'_>, Rows<'_>),
        partial: &mut Scratch,
        softmax: Option<&mut Scratch>,
    ) -> Result<Option<Span<DeviceMemory>>, KernelError> {
        let plan = plan(shape, groups)?;
        if plan.rows.is_empty() {
            return Ok(None);
        }
        pool.after_loads(self.device.compute)?;
        let softmax = softmax.map(|all| all.of(plan.end * shape.heads * SOFTMAX_BYTES)).transpose()?;
        let staged = self.staging.stage([
            bytes_of(&plan.tables),
            bytes_of(plan.decode.as_flattened()),
            bytes_of(plan.merge.as_flattened()),
            bytes_of(plan.prefill.as_flattened()),
        ])?;
        let [tables, decode, merge, prefill] = staged.parts.map(Arg::Read);
        let [values, scales] = pool.args(Arg::Read);
        let per_kv = shape.heads / shape.kv_heads;
        let (heads, head_dim) = (number("heads", shape.heads)?, number("head_dim", shape.head_dim)?);
        let window = shape.window.map_or(0, |window| u32::try_from(window).unwrap_or(u32::MAX));
        let context = |items: Arg, to: Arg| {
            let [heads, kv_heads, dim] = [heads, shape.kv_heads as u32, head_dim].map(Arg::U32);
            let [scale, window] = [Arg::F32(shape.scale), Arg::U32(window)];
            [values, scales, heads, kv_heads, dim, scale, window, items, tables, Arg::Read(q(plan.end)), to]
        };
        let kv = suffix(pool.spec.kv_type);
        let (compute, softmax_arg) = (self.device.compute, softmax.map_or(Arg::Null, Arg::Write));
        if !plan.decode.is_empty() {
            let bytes = plan.decode.len() * shape.heads * (shape.head_dim + 2) * size_of::<f32>();
            let partial = partial.of(bytes)?;
            let grid = [plan.decode.len(), shape.kv_heads, per_kv.div_ceil(DECODE_PAIRS)];
            let name = format!("attention_decode_{kv}");
            self.programs.launch(compute, &name, grid, THREADS, &context(decode, Arg::Write(partial)))?;
            self.programs.launch(
                compute,
                "attention_merge",
                [plan.merge.len(), shape.heads, 1],
                SMALL_THREADS,
                &[
                    merge,
                    Arg::Read(partial),
                    Arg::U32(heads),
                    Arg::U32(head_dim),
                    Arg::Write(out(plan.end)),
                    softmax_arg,
                ],
            )?;
        }
        if !plan.prefill.is_empty() {
            let grid = [plan.prefill.len(), shape.kv_heads, per_kv.div_ceil(PREFILL_PAIRS)];
            let args = [&context(prefill, Arg::Change(out(plan.end)))[..], &[softmax_arg]].concat();
            self.programs.launch(compute, &format!("attention_prefill_{kv}"), grid, THREADS, &args)?;
        }
        self.staging.done(&staged)?;
        Ok(softmax)
    }
}

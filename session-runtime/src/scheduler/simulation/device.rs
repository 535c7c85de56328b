//! A device that computes nothing: every operation takes the time that was measured of a real one, on a clock that moves
//! only so, and every logit is zero. As a GPU does, it answers before it is done: time passes when something waits for it, so
//! that whoever measures unfinished work measures nothing. The forward pass, and everything above it, is the real one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kernels::backend::{
    AttentionShape, Backend, MatrixSpec, Output, PageId, PoolSpec, RopePairing, RowGroup,
};
use kernels::codec::lossless::CellLayout;
use kernels::error::KernelError;
use serde::{Deserialize, Serialize};
use store::ManualClock;

/// Seconds that steps take, and copies between pages and cells.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceCost {
    /// Of a step, whatever its rows: reading the weights.
    pub step: f64,
    /// Of a row.
    pub row: f64,
    /// Of a row, for each token before it.
    pub context: f64,
    /// Of a row's logits.
    pub logits: f64,
    /// Bytes a second that are copied between pages and cells.
    pub copy_bytes_per_s: f64,
}

impl DeviceCost {
    /// The same device, its steps so many times as slow.
    #[must_use]
    pub fn scaled(self, times: f64) -> Self {
        Self {
            step: self.step * times,
            row: self.row * times,
            context: self.context * times,
            logits: self.logits * times,
            ..self
        }
    }
}

/// The device.
#[derive(Debug)]
pub(in crate::scheduler) struct SimulatedDevice {
    pub clock: Arc<ManualClock>,
    pub cost: DeviceCost,
    pub layers: usize,
    /// Seconds of work that nobody has waited for.
    pub queued: Mutex<f64>,
    /// What its cells take, packed without loss.
    pub packed: PackedLengths,
}

/// What cells without bytes take when they are packed without loss: what a trace says they took, or a usual part of the whole.
#[derive(Debug, Default)]
pub(in crate::scheduler) struct PackedLengths(Mutex<Option<Fed>>);

#[derive(Debug, Default)]
struct Fed {
    lengths: VecDeque<u32>,
    missing: bool,
}

impl PackedLengths {
    fn fed(&self) -> MutexGuard<'_, Option<Fed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A record of a trace, and the cells that were packed in it.
    pub(in crate::scheduler) fn begin(&self, lengths: &[u32]) {
        *self.fed() = Some(Fed { lengths: lengths.iter().copied().collect(), missing: false });
    }

    /// What did not fit since the record began.
    pub(in crate::scheduler) fn amiss(&self) -> Option<&'static str> {
        match self.fed().as_ref()? {
            Fed { missing: true, .. } => Some("the scheduler packs a cell that the trace has not"),
            fed if !fed.lengths.is_empty() => Some("the trace has a cell that the scheduler does not pack"),
            _ => None,
        }
    }

    fn next(&self, raw: usize) -> usize {
        let mut fed = self.fed();
        let told = fed.as_mut().map(|fed| fed.lengths.pop_front().ok_or(&mut fed.missing));
        match told {
            // A packed cell is never much longer than the cell.
            Some(Ok(length)) => (length as usize).min(2 * raw + 1024),
            Some(Err(missing)) => {
                *missing = true;
                raw
            }
            None => raw * 7 / 8,
        }
    }
}

impl SimulatedDevice {
    fn queue(&self, seconds: f64) {
        *self.queued.lock().unwrap_or_else(PoisonError::into_inner) += seconds;
    }

    fn pass_queued(&self) {
        let seconds = std::mem::take(&mut *self.queued.lock().unwrap_or_else(PoisonError::into_inner));
        self.clock.pass(Duration::try_from_secs_f64(seconds).unwrap_or_default());
    }
}

type Done = Result<(), KernelError>;

impl Backend for SimulatedDevice {
    type Matrix = ();
    type Vector = ();
    type Tensor = ();
    type Pool = ();
    type Rope = ();

    fn name(&self) -> &'static str {
        "simulated"
    }

    fn numerics_class(&self) -> &'static str {
        "simulated"
    }

    fn describe(&self) -> String {
        "a device that computes nothing, on simulated time".to_owned()
    }

    fn load_matrix(&self, _: &MatrixSpec, _: &[u8]) -> Done {
        Ok(())
    }

    fn load_vector(&self, _: &str, _: &[f32]) -> Done {
        Ok(())
    }

    fn tensor(&self, _: usize, _: usize) -> Done {
        Ok(())
    }

    fn pool(&self, _: PoolSpec) -> Done {
        Ok(())
    }

    fn rope_table(&self, _: f32, _: usize, _: usize) -> Done {
        Ok(())
    }

    fn matrix_bytes(&self, (): &()) -> usize {
        0
    }

    fn embed(&self, (): &(), _: &[u32], (): &mut ()) -> Done {
        Ok(())
    }

    fn linear(&self, (): &(), _: Option<&()>, (): &(), (): &mut (), _: usize) -> Done {
        Ok(())
    }

    fn linears(&self, _: &mut [Output<'_, Self>], (): &(), _: usize) -> Done {
        Ok(())
    }

    fn rms_norm(&self, (): &(), (): &(), _: f32, (): &mut (), _: usize) -> Done {
        Ok(())
    }

    fn head_norm(&self, (): &mut (), _: usize, (): &(), _: f32, _: usize) -> Done {
        Ok(())
    }

    fn scale(&self, (): &mut (), _: f32, _: usize) -> Done {
        Ok(())
    }

    fn scale_channels(&self, (): &mut (), (): &(), _: usize) -> Done {
        Ok(())
    }

    fn add(&self, (): &mut (), (): &(), _: usize) -> Done {
        Ok(())
    }

    fn swiglu(&self, (): &mut (), (): &(), _: usize) -> Done {
        Ok(())
    }

    fn geglu(&self, (): &mut (), (): &(), _: usize) -> Done {
        Ok(())
    }

    fn rope(&self, (): &mut (), _: usize, _: usize, (): &(), _: RopePairing, _: &[u32]) -> Done {
        Ok(())
    }

    /// Called once for each layer of a step, so that the layer's time passes here.
    fn append(&self, (): &mut (), _: AttentionShape, groups: &[RowGroup<'_>], (): &(), (): &()) -> Done {
        let rows: usize = groups.iter().map(|group| group.rows).sum();
        let context: f64 = groups
            .iter()
            .map(|group| group.rows as f64 * (group.start as f64 + group.rows as f64 / 2.0))
            .sum();
        let whole = self.cost.step + self.cost.row * rows as f64 + self.cost.context * context;
        self.queue(whole / self.layers as f64);
        Ok(())
    }

    fn attention(
        &self,
        (): &(),
        _: AttentionShape,
        _: &[RowGroup<'_>],
        (): &(),
        (): &mut (),
        _: Option<&mut [f32]>,
    ) -> Done {
        Ok(())
    }

    fn gather_rows(&self, (): &(), rows: &[usize], (): &mut ()) -> Done {
        self.queue(self.cost.logits * rows.len() as f64);
        Ok(())
    }

    fn finish(&self) -> Done {
        self.pass_queued();
        Ok(())
    }

    fn read(&self, (): &(), _: usize, out: &mut [f32]) -> Done {
        self.pass_queued();
        out.fill(0.0);
        Ok(())
    }

    fn write(&self, (): &mut (), _: &[f32]) -> Done {
        Ok(())
    }

    fn copy_page(&self, (): &mut (), _: PageId, _: PageId) -> Done {
        Ok(())
    }

    fn gather_cell(&self, (): &(), _: &[&[PageId]], _: usize, cell: &mut [u8]) -> Done {
        self.queue(cell.len() as f64 / self.cost.copy_bytes_per_s);
        self.pass_queued();
        Ok(())
    }

    fn scatter_cell(&self, (): &mut (), _: &[&[PageId]], _: usize, cell: &[u8]) -> Done {
        self.queue(cell.len() as f64 / self.cost.copy_bytes_per_s);
        Ok(())
    }

    fn gather_lossless(
        &self,
        (): &(),
        tables: &[&[PageId]],
        layout: &CellLayout,
    ) -> Result<Vec<u8>, KernelError> {
        let mut cell = vec![0; layout.bytes()];
        self.gather_cell(&(), tables, layout.tokens, &mut cell)?;
        Ok(vec![0; self.packed.next(cell.len())])
    }

    fn scatter_lossless(&self, (): &mut (), tables: &[&[PageId]], layout: &CellLayout, _: &[u8]) -> Done {
        self.scatter_cell(&mut (), tables, layout.tokens, &vec![0; layout.bytes()])
    }
}

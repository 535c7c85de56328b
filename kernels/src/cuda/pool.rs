//! The pool of KV pages on the device, and the order between compute and loads on it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Arg, DeviceMemory, Span, Stream};
use super::error::DeviceError;
use super::memory::{Buffer, Device, Mark};
use crate::backend::{KvType, PAGE_TOKENS, PageId, PoolSpec, SCALE_BLOCK};
use crate::error::KernelError;

/// Most channels of a head that the attention kernels have room for.
const MAX_HEAD_DIM: usize = 256;

/// Refuses heads that the kernels have no attention for.
///
/// # Errors
/// [`DeviceError::HeadSize`].
pub(super) fn check_head_dim(head_dim: usize) -> Result<(), DeviceError> {
    if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM {
        return Err(DeviceError::HeadSize { head_dim, most: MAX_HEAD_DIM });
    }
    Ok(())
}

/// Pages on the device, laid out as on the CPU.
pub struct CudaPool {
    device: Arc<Device>,
    pub(super) spec: PoolSpec,
    pages: Buffer,
    /// Scales of all pages, where values have some.
    scales: Option<Buffer>,
    /// Behind the last kernel that put a cell into pages, on the load stream.
    loaded: Mark,
    /// Whether compute has not waited for that yet.
    loading: Mutex<bool>,
}

impl CudaPool {
    pub(super) fn new(device: &Arc<Device>, spec: PoolSpec) -> Result<Self, KernelError> {
        let PoolSpec { pages, head_dim, .. } = spec;
        let refused = || KernelError::Size { what: "page pool".to_string(), rows: pages, cols: head_dim };
        if pages == 0 || u32::try_from(pages).is_err() {
            return Err(refused());
        }
        check_head_dim(head_dim)?;
        pages.checked_mul(spec.page_bytes()).ok_or_else(refused)?;
        let scales = match scales_bytes(&spec) {
            0 => None,
            bytes => Some(Buffer::zeroed(device, "scales of the page pool", pages * bytes)?),
        };
        Ok(Self {
            device: device.clone(),
            spec,
            pages: Buffer::zeroed(device, "page pool", pages * values_bytes(&spec))?,
            scales,
            loaded: Mark::new(device)?,
            loading: Mutex::new(false),
        })
    }

    /// Values and scales, as the first two arguments of a kernel that reads or changes them.
    pub(super) fn args(&self, access: fn(Span<DeviceMemory>) -> Arg) -> [Arg; 2] {
        [access(self.pages.all()), self.scales.as_ref().map_or(Arg::Null, |scales| access(scales.all()))]
    }

    /// What comes on `stream` comes after the cells that were put into pages.
    pub(super) fn after_loads(&self, stream: Stream) -> Result<(), KernelError> {
        // Held over the wait: who finds that compute waits must find that wait queued.
        let mut loading = self.loading();
        if *loading {
            self.device.driver.wait(stream, self.loaded.event)?;
            // Once compute has waited, whoever waits for compute has as well.
            *loading = stream != self.device.compute;
        }
        Ok(())
    }

    /// A kernel that puts a cell into pages is on the load stream.
    pub(super) fn mark_load(&self) -> Result<(), KernelError> {
        let mut loading = self.loading();
        self.device.driver.record(self.loaded.event, self.device.load)?;
        *loading = true;
        Ok(())
    }

    fn loading(&self) -> MutexGuard<'_, bool> {
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies a page over another, on the compute stream.
    pub(super) fn copy_page(&self, source: PageId, target: PageId) -> Result<(), KernelError> {
        if source == target {
            return Ok(());
        }
        self.after_loads(self.device.compute)?;
        let values = Some((&self.pages, values_bytes(&self.spec)));
        let scales = self.scales.as_ref().map(|scales| (scales, scales_bytes(&self.spec)));
        for (buffer, bytes) in values.into_iter().chain(scales) {
            let [from, to] = [source, target].map(|page| buffer.part(page.0 as usize * bytes, bytes));
            self.device.driver.copy(self.device.compute, from, to)?;
        }
        Ok(())
    }
}

/// End of a kernel's name.
pub(super) fn suffix(kv_type: KvType) -> &'static str {
    kv_type.name()
}

/// Bytes of the values of a page.
fn values_bytes(spec: &PoolSpec) -> usize {
    let value = match spec.kv_type {
        KvType::F16 => 2,
        KvType::F32 => 4,
        KvType::Int8 => 1,
    };
    2 * PAGE_TOKENS * spec.head_dim * value
}

/// Bytes of the scales of a page.
fn scales_bytes(spec: &PoolSpec) -> usize {
    match spec.kv_type {
        KvType::F16 | KvType::F32 => 0,
        KvType::Int8 => 2 * PAGE_TOKENS * spec.head_dim.div_ceil(SCALE_BLOCK) * size_of::<f32>(),
    }
}

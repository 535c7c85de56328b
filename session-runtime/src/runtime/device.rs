//! Which device runs the model: chosen once, when a runtime is opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernels::cpu::{CpuBackend, CpuOptions};
use kernels::cuda::{CudaBackend, CudaOptions};
use kernels::error::KernelError;

use crate::config::{Config, Device};
use crate::error::{DEVICE_UNAVAILABLE, Error};
use crate::models::ModelConfig;

/// How sentences about a GPU end that name the CPU as the way out.
const WAYS_OUT: [&str; 3] = [", or use the CPU", ", use the CPU", "; use the CPU"];
/// Folder of compiled kernels in a data directory.
const KERNELS: &str = "compiled-kernels";

/// A device that is ready.
pub enum ChosenDevice {
    /// The processor; and why not a GPU, where one would have been taken.
    Cpu(Arc<CpuBackend>, Option<String>),
    /// A GPU, its kernels compiled and loaded.
    Cuda(Arc<CudaBackend>),
}

/// Opens the device that a configuration asks for. The kernels of a GPU are compiled here where the data directory does not
/// have them, which takes some seconds.
///
/// # Errors
/// `device_unavailable` or `kernels_not_compiled` where a GPU is demanded and cannot be used, with the reason and the fix;
/// `out_of_memory`, `device_lost`.
pub fn choose(config: &Config, model: &ModelConfig) -> Result<ChosenDevice, Error> {
    match config.device {
        Device::Cpu => cpu(config, None),
        Device::Cuda(number) => gpu(config, model, number).map(cuda).map_err(demanded),
        Device::Auto => match gpu(config, model, 0) {
            Ok(gpu) => Ok(cuda(gpu)),
            Err(error) => {
                let sentence = error.to_string();
                // The way out is taken already.
                let without = |way: &&str| sentence.strip_suffix(*way);
                let reason = WAYS_OUT.iter().find_map(without).unwrap_or(&sentence);
                cpu(config, Some(format!("the CPU runs the model: {reason}")))
            }
        },
    }
}

fn cuda(backend: CudaBackend) -> ChosenDevice {
    ChosenDevice::Cuda(Arc::new(backend))
}

/// The error of a GPU that was asked for. Those whose way out is the CPU say how that is chosen.
fn demanded(error: KernelError) -> Error {
    let mut error = Error::from(error);
    if [DEVICE_UNAVAILABLE, "kernels_not_compiled"].contains(&&*error.code) {
        error.message.push_str(" with --device cpu");
    }
    error
}

/// Where a data directory keeps compiled kernels.
pub fn kernel_folder(data_dir: &Path) -> PathBuf {
    data_dir.join(KERNELS)
}

fn cpu(config: &Config, note: Option<String>) -> Result<ChosenDevice, Error> {
    let (threads, rounding) = (config.thread_count(), config.rounding);
    let backend = CpuBackend::new(CpuOptions { threads, rounding, ..CpuOptions::default() })?;
    Ok(ChosenDevice::Cpu(Arc::new(backend), note))
}

/// A GPU that can run the model, as far as is known before the weights are there.
fn gpu(config: &Config, model: &ModelConfig, number: usize) -> Result<CudaBackend, KernelError> {
    CudaBackend::check_head_dim(model.head_dim)?;
    let cache = Some(kernel_folder(&config.data_dir));
    let backend = CudaBackend::new(CudaOptions { device: number, cache, nvrtc: config.nvrtc.clone() })?;
    backend.prepare()?;
    Ok(backend)
}

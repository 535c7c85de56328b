//! What this machine has for running models on a GPU, without using any of it.

use std::path::{Path, PathBuf};

use super::driver::DeviceInfo;
use super::error::DeviceError;
use super::gpu::GpuDriver;
use super::nvrtc::{Compiler, Nvrtc};

/// What was found, part by part; each that is missing says why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The newest CUDA version that the driver supports, such as `(12, 8)`.
    pub driver: Result<(u32, u32), DeviceError>,
    /// Its devices, in its order.
    pub devices: Result<Vec<DeviceInfo>, DeviceError>,
    /// Where the run-time compiler is, and its version.
    pub compiler: Result<(PathBuf, (u32, u32)), DeviceError>,
}

impl Survey {
    /// Looks for a driver, its devices and a run-time compiler: the library at `nvrtc`, or the one that is found.
    pub fn take(nvrtc: Option<&Path>) -> Self {
        let compiler = Nvrtc::open(nvrtc).and_then(|found| Ok((found.place(), found.version()?)));
        Self { driver: GpuDriver::version(), devices: GpuDriver::devices(), compiler }
    }
}

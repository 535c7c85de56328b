//! Checks of GPUs: the driver, its devices, the compiler of their kernels, and which device would run the model.

use kernels::cuda::{CudaBackend, CudaOptions, DeviceError, DeviceInfo, Survey};

use super::Check;
use crate::cli::bytes::Bytes;
use crate::cli::failure::Outcome;
use crate::cli::options::Options;
use crate::config::Device;
use crate::runtime::device::kernel_folder;

/// What was found, and what that means for the device that was asked for.
pub(super) fn checks(options: &Options) -> Outcome<Vec<Check>> {
    let config = options.config()?;
    let survey = Survey::take(config.nvrtc.as_deref());
    let mut checks = vec![driver(&survey)];
    // Without a driver there is nothing to compile for.
    if survey.driver.is_ok() {
        checks.push(compiler(&survey));
    }
    let number = match config.device {
        Device::Cpu => {
            checks.push(Check::ok("device", "the CPU runs the model, as was asked for"));
            return Ok(checks);
        }
        Device::Auto => 0,
        Device::Cuda(number) => number,
    };
    let cache = Some(kernel_folder(&config.data_dir));
    let opened = CudaBackend::new(CudaOptions { device: number, cache, nvrtc: config.nvrtc.clone() });
    // Where nothing can be compiled, all kernels have to be there already.
    let opened = opened.and_then(|gpu| if survey.compiler.is_err() { gpu.prepare() } else { Ok(()) });
    checks.push(match (opened, config.device) {
        (Ok(_), _) => Check::ok("device", format!("GPU {number} runs the model")),
        (Err(reason), Device::Cuda(_)) => {
            Check::problem("device", reason.to_string(), "use another device: --device auto or --device cpu")
        }
        (Err(_), _) => Check::ok("device", "the CPU runs the model"),
    });
    Ok(checks)
}

fn driver(survey: &Survey) -> Check {
    let (major, minor) = match &survey.driver {
        Ok(version) => version,
        Err(reason) => return Check::ok("gpu", reason.to_string()),
    };
    let devices = match &survey.devices {
        Ok(devices) if devices.is_empty() => "no devices".to_owned(),
        Ok(devices) => devices.iter().enumerate().map(device).collect::<Vec<_>>().join("; "),
        Err(reason) => reason.to_string(),
    };
    Check::ok("gpu", format!("driver for CUDA {major}.{minor}; {devices}"))
}

fn device((number, device): (usize, &DeviceInfo)) -> String {
    let (major, minor) = device.capability;
    format!("{number}: {}, {}, compute capability {major}.{minor}", device.name, Bytes(device.memory))
}

fn compiler(survey: &Survey) -> Check {
    match &survey.compiler {
        Ok((place, (major, minor))) => {
            Check::ok("gpu compiler", format!("NVRTC {major}.{minor}, {}", place.display()))
        }
        Err(reason @ DeviceError::NoCompiler { .. }) => {
            let fix = "install it, or name its library with --nvrtc; kernels that were compiled before are still used";
            Check::warning("gpu compiler", reason.to_string(), fix)
        }
        Err(reason) => Check::warning("gpu compiler", reason.to_string(), "use another version of NVRTC"),
    }
}

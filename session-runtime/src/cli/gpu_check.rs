//! `session-runtime gpu-check`: what `cargo xtask gpu-check` builds, packs and runs.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kernels::cuda::GpuDriver;
use tokio::runtime::Handle;

use super::failure::{Failure, Outcome};
use super::options::Options;
use super::terminal::print_line;
use crate::bench::gpu;
use crate::bench::gpu::report::{Part, Verdict};
use crate::config::{Config, Device};
use crate::error::DEVICE_UNAVAILABLE;

/// Folders of a packed check, beside the program.
const TESTS: &str = "tests";
const KERNELS: &str = "kernels";

/// Options of `gpu-check`.
#[derive(Args, Debug)]
pub(super) struct GpuCheck {
    /// Folder for the two files of the report
    #[arg(long, value_name = "DIR", default_value = "gpu-check")]
    out: PathBuf,
    /// Folder with the kernels' test programs [default: tests beside the program]
    #[arg(long, value_name = "DIR")]
    tests: Option<PathBuf>,
    /// Folder with compiled kernels; what is missing is compiled into it [default: kernels beside the program]
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
    /// Seconds it may take; what no time is left for is left out
    #[arg(long, value_name = "N", default_value_t = 450)]
    limit: u64,
    /// Only look whether there is a GPU
    #[arg(long)]
    probe: bool,
}

impl GpuCheck {
    pub(super) fn run(&self, options: &Options, handle: &Handle) -> Outcome {
        let config = options.config()?;
        let device = match config.device {
            Device::Auto => 0,
            Device::Cuda(number) => number,
            Device::Cpu => return Err(Failure::usage("gpu-check needs a GPU: leave --device cpu out")),
        };
        if self.probe {
            return match GpuDriver::open(device) {
                Ok(_) => Ok(()),
                Err(none) => Err(Failure::usage(none.to_string())),
            };
        }
        let beside = |name: &str| Some(std::env::current_exe().ok()?.parent()?.join(name));
        let tests = self.tests.clone().or_else(|| beside(TESTS).filter(|folder| folder.is_dir()));
        let kernels = self.kernels.clone().or_else(|| beside(KERNELS));
        let kernels = kernels.unwrap_or_else(|| std::env::temp_dir().join("session-runtime-kernels"));
        // Sessions of the check are its own, and know no guest.
        let config = Config { guests: Vec::new(), components: Vec::new(), ..config };
        let check = gpu::GpuCheck { device, config, tests, kernels, limit: Duration::from_secs(self.limit) };
        let mut unprinted = Ok(());
        let mut tell = |part: &Part| {
            if unprinted.is_ok() {
                unprinted = show(part);
            }
        };
        // Without a GPU nothing was checked, which is neither passed nor failed.
        let report = handle.block_on(check.run(&mut tell)).map_err(|error| match &*error.code {
            DEVICE_UNAVAILABLE => Failure::usage(error.message),
            _ => Failure::from(error),
        })?;
        unprinted?;
        let [json, markdown] = report.write(&self.out)?;
        print_line(format_args!("report: {} and {}", json.display(), markdown.display()))?;
        if report.passed() { Ok(()) } else { Err(Failure::new("the GPU check failed: see the report")) }
    }
}

fn show(part: &Part) -> Outcome {
    let verdict = match part.verdict {
        Verdict::Passed => "passed",
        Verdict::Failed => "FAILED",
        Verdict::LeftOut => "left out",
    };
    print_line(format_args!("{verdict:<9}{:>6.1} s  {}: {}", part.seconds, part.name, part.found))
}

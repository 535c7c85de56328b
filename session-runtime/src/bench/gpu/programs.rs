//! The kernels' own tests as programs that were built before, run on the GPU; and one of them once more under NVIDIA's checker
//! of memory accesses, where that is installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::Error;

/// The test programs, as cargo names them.
pub(super) const PROGRAMS: [&str; 3] = ["cuda_kernels", "cuda_attention", "cuda_model"];
/// The kernels for the CPU, whose bits a GPU has to give.
const SHIM: &str = "kernels-on-cpu.so";
/// What checks memory accesses, and what it ends with where it found something.
const CHECKER: &str = "compute-sanitizer";
const CHECKER_FOUND: &str = "9";

/// Where the programs are, and what they are told.
pub(super) struct Programs<'a> {
    pub folder: &'a Path,
    /// Compiled kernels.
    pub kernels: &'a Path,
    pub nvrtc: Option<&'a Path>,
}

impl Programs<'_> {
    /// Runs one to its end; what it said last.
    ///
    /// # Errors
    /// A test failed, or it was not done by the deadline.
    pub(super) fn run(&self, name: &str, deadline: Instant) -> Result<String, Error> {
        self.finish(Command::new(self.program(name)?), deadline)
    }

    /// Runs the test of a small model under the checker; `None` where that is not installed.
    ///
    /// # Errors
    /// As `run`, or an access that is wrong.
    pub(super) fn run_checked(&self, deadline: Instant) -> Result<Option<String>, Error> {
        let Some(checker) = find_checker() else { return Ok(None) };
        let mut command = Command::new(checker);
        command.args(["--tool", "memcheck", "--error-exitcode", CHECKER_FOUND]);
        command.arg(self.program("cuda_model")?);
        self.finish(command, deadline).map(Some)
    }

    fn program(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.folder.join(name);
        if path.is_file() {
            return Ok(path);
        }
        let missing = format!("{} is missing: `cargo xtask gpu-check` builds and packs it", path.display());
        Err(Error::not_found("test_program_missing", missing))
    }

    fn finish(&self, mut command: Command, deadline: Instant) -> Result<String, Error> {
        command.env("SESSION_RUNTIME_TEST_DEVICE", "cuda").env("SESSION_RUNTIME_TEST_KERNELS", self.kernels);
        if let Some(nvrtc) = self.nvrtc {
            command.env("SESSION_RUNTIME_TEST_NVRTC", nvrtc);
        }
        let shim = self.folder.join(SHIM);
        if shim.is_file() {
            command.env("SESSION_RUNTIME_TEST_SHIM", shim);
        }
        let log = tempfile_in(self.kernels)?;
        let file = std::fs::File::create(&log).map_err(Error::internal)?;
        let copy = file.try_clone().map_err(Error::internal)?;
        let mut child =
            command.stdin(Stdio::null()).stdout(file).stderr(copy).spawn().map_err(Error::internal)?;
        let ended = loop {
            if let Some(status) = child.try_wait().map_err(Error::internal)? {
                break Some(status);
            }
            if Instant::now() > deadline {
                // It holds nothing that a signal could harm.
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let said = std::fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let said = said.unwrap_or_default();
        let _ = std::fs::remove_file(&log);
        match ended {
            Some(status) if status.success() => Ok(summary(&said)),
            Some(status) => Err(Error::internal(format!("{status}: {}", failures(&said)))),
            None => Err(Error::internal(format!("not done in time: {}", summary(&said)))),
        }
    }
}

/// A name for a file that nobody else has.
fn tempfile_in(folder: &Path) -> Result<PathBuf, Error> {
    std::fs::create_dir_all(folder).map_err(Error::internal)?;
    Ok(folder.join(crate::ids::fresh("log")))
}

/// The harness's own last word, such as `ok. 9 passed; 0 failed`.
fn summary(said: &str) -> String {
    let result = said.lines().rev().find_map(|line| line.strip_prefix("test result: "));
    result.or_else(|| said.lines().last()).unwrap_or("it said nothing").trim().to_owned()
}

/// What failed: the lines of panics, as far as a table has room for them.
fn failures(said: &str) -> String {
    const MOST: usize = 600;
    let lines: Vec<&str> = said.lines().collect();
    let at =
        lines.iter().position(|line| line.contains("panicked at")).unwrap_or(lines.len().saturating_sub(4));
    let text: String = lines[at..].iter().take(4).copied().collect::<Vec<_>>().join(" ");
    text.chars().take(MOST).collect()
}

/// The checker on the path, or where toolkits put it.
fn find_checker() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkits = toolkits.chain([PathBuf::from("/usr/local/cuda")]).map(|toolkit| toolkit.join("bin"));
    std::env::split_paths(&path)
        .chain(toolkits)
        .map(|folder| folder.join(CHECKER))
        .find(|file| file.is_file())
}

#[cfg(test)]
mod tests;

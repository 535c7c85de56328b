//! Small Python environments of our own, beside the models in this user's cache: one with the stock OpenAI client, for
//! the test that speaks to the server through it, and one with NVIDIA's compilers, for the check of the CUDA kernels.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::process::{Failure, succeeds};

const CHECK_LIMIT: Duration = Duration::from_secs(60);
const MAKE_LIMIT: Duration = Duration::from_secs(120);
const INSTALL_LIMIT: Duration = Duration::from_secs(600);

/// An environment.
pub(crate) struct Environment {
    /// Its folder's name.
    folder: &'static str,
    /// What is in it, for people.
    what: &'static str,
    /// What is installed.
    packages: &'static [&'static str],
    /// Python that succeeds where it is complete.
    check: &'static str,
}

/// The stock client; any recent version is that.
const CLIENT: Environment = Environment {
    folder: "python",
    what: "the OpenAI client",
    packages: &["openai>=1.50,<3"],
    check: "import openai",
};

/// NVRTC and ptxas, about 130 MB to fetch. Their version is pinned: another one gives out registers differently, and the
/// committed table would not fit.
pub(crate) const COMPILERS: Environment = Environment {
    folder: "cuda-compilers",
    what: "NVRTC and ptxas 12.8 (130 MB)",
    packages: &["nvidia-cuda-nvrtc-cu12==12.8.93", "nvidia-cuda-nvcc-cu12==12.8.93"],
    check: "import importlib.metadata as m; \
            assert all(m.version('nvidia-cuda-%s-cu12' % n) == '12.8.93' for n in ('nvrtc', 'nvcc'))",
};

/// Makes the environment with the client where it is missing; its interpreter. `None`, and a line that says why, where
/// Python or the network is missing.
pub(crate) fn prepare() -> Option<PathBuf> {
    match CLIENT.make() {
        Ok(python) => Some(python),
        Err(why) => {
            println!("setup: no Python environment with the OpenAI client, so its test is left out: {why}");
            None
        }
    }
}

impl Environment {
    /// Makes it where it is missing; its interpreter.
    pub(crate) fn make(&self) -> Result<PathBuf, Failure> {
        let home =
            self.home().ok_or_else(|| Failure::Other("neither XDG_CACHE_HOME nor HOME is set".to_owned()))?;
        let python = home.join("bin/python");
        if self.is_complete(&python) {
            println!("setup: Python environment with {} is here ({})", self.what, home.display());
            return Ok(python);
        }
        println!("setup: python3 -m venv {}", home.display());
        // What an earlier attempt left half made is made again.
        if !succeeds(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home), MAKE_LIMIT) {
            return Err(Failure::Other("python3 with its module venv is missing".to_owned()));
        }
        println!("setup: pip install '{}'", self.packages.join("' '"));
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(self.packages);
        if succeeds(&mut pip, INSTALL_LIMIT) && self.is_complete(&python) {
            return Ok(python);
        }
        let packages = self.packages.join(" and ");
        Err(Failure::Other(format!("pip could not install {packages}; is there a network?")))
    }

    fn is_complete(&self, python: &Path) -> bool {
        succeeds(Command::new(python).args(["-c", self.check]), CHECK_LIMIT)
    }

    fn home(&self) -> Option<PathBuf> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
        Some(cache.join("session-runtime").join(self.folder))
    }
}

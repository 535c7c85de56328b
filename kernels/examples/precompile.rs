//! Compiles every kernel for some architectures into a folder as a start of the runtime does, so that a machine with a GPU and
//! without a compiler finds them: `precompile NVRTC_LIBRARY FOLDER 80 90 100`. `cargo xtask gpu-check --pack` runs it.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use kernels::cuda::{Cache, Nvrtc, SOURCES};

fn compile(library: &str, folder: &str, architectures: &[String]) -> Result<usize, Box<dyn Error>> {
    let nvrtc = Nvrtc::open(Some(Path::new(library)))?;
    let cache = Cache::new(Some(PathBuf::from(folder)), Box::new(nvrtc));
    for architecture in architectures {
        let number: u32 = architecture.parse()?;
        for source in &SOURCES {
            cache.code(source, (number / 10, number % 10))?;
        }
    }
    Ok(std::fs::read_dir(folder)?.count())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [library, folder, architectures @ ..] = arguments.as_slice() else {
        eprintln!("usage: precompile NVRTC_LIBRARY FOLDER ARCHITECTURE...");
        return ExitCode::FAILURE;
    };
    match compile(library, folder, architectures) {
        Ok(files) => {
            println!("{files} files of compiled kernels");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

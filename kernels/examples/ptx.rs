//! Compiles every kernel for some architectures, as the product does, and writes the code into a folder:
//! `ptx NVRTC_LIBRARY FOLDER 80 90 100` writes `FOLDER/gemv.compute_80.ptx` and so on. `cargo xtask kernels` runs it.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use kernels::cuda::{Compiler, Nvrtc, SOURCES};

fn compile(library: &str, folder: &Path, architectures: &[String]) -> Result<usize, Box<dyn Error>> {
    let nvrtc = Nvrtc::open(Some(Path::new(library)))?;
    let mut written = 0;
    for architecture in architectures {
        let number: u32 = architecture.parse()?;
        for source in &SOURCES {
            let code = nvrtc.compile(source, (number / 10, number % 10))?;
            let stem = source.file.trim_end_matches(".cu");
            std::fs::write(folder.join(format!("{stem}.compute_{architecture}.ptx")), code)?;
            written += 1;
        }
    }
    Ok(written)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [library, folder, architectures @ ..] = arguments.as_slice() else {
        eprintln!("usage: ptx NVRTC_LIBRARY FOLDER ARCHITECTURE...");
        return ExitCode::FAILURE;
    };
    match compile(library, Path::new(folder), architectures) {
        Ok(written) => {
            println!("{written} files compiled");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

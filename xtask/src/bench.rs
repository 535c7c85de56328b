//! Running benchmarks. They are commands of the program itself, built in the profile of the tests, so nothing is
//! built twice.

use std::path::PathBuf;
use std::process::Command;

use clap::Args;

use crate::process::{Failure, build_programs, cargo, program, root, run as run_process, target_dir};

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Which one; left out, they are listed
    name: Option<String>,
    /// Another engine to measure beside ours: `llama-cpp`. It is built from source, which takes minutes and needs cmake,
    /// clang and libclang
    #[arg(long, value_name = "NAME")]
    peer: Option<String>,
    /// Write results as JSON lines
    #[arg(long)]
    json: bool,
    /// Passed on, such as `--model smollm2-135m`
    #[arg(last = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    build_programs()?;
    let mut bench = Command::new(program());
    bench.arg("bench").current_dir(root());
    match &options.name {
        Some(name) => bench.arg(name),
        None => bench.arg("--help"),
    };
    if let Some(peer) = &options.peer {
        bench.arg("--peer").arg(build_peer(peer)?);
    }
    if options.json {
        bench.arg("--json");
    }
    bench.args(&options.arguments);
    run_process(&mut bench, "the benchmark")
}

/// Builds a peer's program, in a workspace of its own.
fn build_peer(name: &str) -> Result<PathBuf, Failure> {
    let workspace = root().join("session-runtime/benches/peers").join(name);
    if !workspace.join("Cargo.toml").is_file() {
        return Err(Failure::Other(format!("there is no peer '{name}': choose llama-cpp")));
    }
    println!("bench: building {name} from source, which needs cmake, clang and libclang and takes minutes");
    let target = target_dir().join("peers");
    let mut build = cargo();
    build.args(["build", "--release", "--locked"]).current_dir(&workspace).env("CARGO_TARGET_DIR", &target);
    // The peer's build asks the compiler for what the processor has. AMX is left out: processors announce it that
    // then refuse it.
    let mut features = vec!["+avx", "+avx2", "+fma", "+f16c", "+bmi2", "+sse4.2"];
    if has_vnni() {
        features.extend(["+avx512f", "+avx512bw", "+avx512vl", "+avx512dq", "+avx512cd", "+avx512vnni"]);
        build.env("GGML_AVX512", "ON");
    }
    build.env("RUSTFLAGS", format!("-Ctarget-feature={}", features.join(",")));
    run_process(&mut build, "the build of the peer")?;
    Ok(target.join("release").join(format!("{name}-peer")))
}

/// Whether the processor has AVX-512 with VNNI.
fn has_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

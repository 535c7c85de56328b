//! The kernels' sources as a shared library for the CPU, which also answers as a driver's and as a run-time compiler's. The
//! tests of the runtime use this file as well.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Warnings are for people. Products and sums are fused only where the sources say so, as on the GPU; loads through
/// misaligned pointers and indices outside of arrays stop the program. Jumps from stack to stack are what fibers are made of,
/// so they are not to be checked.
const FLAGS: [&str; 10] = [
    "-std=c++17",
    "-U_FORTIFY_SOURCE",
    "-O2",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
];

/// The compiler: the one that `CXX` names, else the first that answers.
fn compiler() -> String {
    let named = std::env::var("CXX").ok().filter(|name| !name.is_empty());
    let mut names = named.into_iter().chain(["g++", "clang++", "c++"].map(str::to_string));
    let answers =
        |name: &String| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
    names.find(answers).unwrap_or_else(|| {
        panic!("the kernels' sources are tested on the CPU, which needs a C++ compiler: install g++ or clang++, or set CXX")
    })
}

/// Where this names a file, that is the library: it was built before, from these very sources, or is built there.
const FILE: &str = "SESSION_RUNTIME_TEST_SHIM";

/// The library's file, built once by whichever test comes first.
pub(crate) fn path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| match std::env::var_os(FILE).map(PathBuf::from) {
        Some(built) if built.is_file() => built,
        file => build(file),
    })
}

/// Builds the library as `file`, or in the build folder, where there is none for these very sources.
fn build(file: Option<PathBuf>) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/cuda");
    let mut flags = FLAGS.map(str::to_string).to_vec();
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("fma") {
        // Without it a fused multiply-add is a call.
        flags.push("-mfma".to_string());
    }
    let compiler = compiler();
    let mut hasher = blake3::Hasher::new();
    for text in flags.iter().chain([&compiler]) {
        hasher.update(text.as_bytes()).update(&[0]);
    }
    for name in sources(&folder).iter().chain(&sources(&folder.join("shim"))) {
        hasher.update(&std::fs::read(name).unwrap()).update(&[0]);
    }
    let digest = hasher.finalize().to_hex();
    let library = file.unwrap_or_else(|| {
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-on-cpu-{}.so", &digest[..16]))
    });
    if !library.is_file() {
        let beside = library.with_extension(format!("{}.part", std::process::id()));
        let mut command = Command::new(&compiler);
        command.args(flags).arg("-o").arg(&beside);
        command.args(["shim/shim.cpp", "shim/driver.cpp", "shim/nvrtc.cpp"].map(|file| folder.join(file)));
        let status = command.status().unwrap();
        assert!(status.success(), "{compiler} cannot compile the kernels for the CPU");
        std::fs::rename(&beside, &library).unwrap();
    }
    library
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    files
}

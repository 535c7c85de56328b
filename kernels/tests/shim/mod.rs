//! The kernels' sources on the CPU: compiled once into a shared library, and a driver that launches them.
#![allow(dead_code, unused_imports, reason = "each test file uses its part")]

mod device;
mod recorder;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use kernels::cuda::{Cache, Compiler, CudaBackend, DeviceError, GpuDriver, LazyNvrtc, Source};
use libloading::Library;

pub(crate) use device::ShimDriver;
pub(crate) use recorder::{Deaf, Recorder};

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

type LaunchFn = unsafe extern "C" fn(
    *const c_char,
    *const u32,
    u32,
    *mut *mut c_void,
    *const c_char,
    u32,
    *mut c_char,
    usize,
) -> c_int;

/// The library.
pub(crate) struct Shim {
    library: Library,
}

impl Shim {
    /// The one of this process.
    pub(crate) fn get() -> &'static Self {
        static SHIM: OnceLock<Shim> = OnceLock::new();
        SHIM.get_or_init(|| {
            let path = library();
            // SAFETY: the library was made from our own sources.
            let library = unsafe { Library::new(path) };
            Self { library: library.unwrap_or_else(|error| panic!("{}: {error}", path.display())) }
        })
    }

    /// Runs a kernel. `args` hold its arguments in the low bytes, `kinds` a letter for each.
    ///
    /// # Safety
    /// Pointers among the arguments have to be to what the kernel uses.
    pub(crate) unsafe fn launch(
        &self,
        name: &str,
        grid: [u32; 3],
        threads: u32,
        args: &mut [u64],
        kinds: &str,
        order: u32,
    ) -> Result<(), String> {
        let [name, kinds] = [name, kinds].map(|text| CString::new(text).unwrap());
        let mut pointers: Vec<*mut c_void> =
            args.iter_mut().map(|arg| std::ptr::from_mut(arg).cast()).collect();
        let mut problem = [0u8; 320];
        // SAFETY: the type is that of `shim_launch`.
        let launch = unsafe { self.library.get::<LaunchFn>(b"shim_launch\0") }.unwrap();
        // SAFETY: all pointers live during the call; the caller speaks for those of the arguments.
        let status = unsafe {
            launch(
                name.as_ptr(),
                grid.as_ptr(),
                threads,
                pointers.as_mut_ptr(),
                kinds.as_ptr(),
                order,
                problem.as_mut_ptr().cast(),
                problem.len(),
            )
        };
        if status == 0 {
            return Ok(());
        }
        Err(CStr::from_bytes_until_nul(&problem).unwrap().to_string_lossy().into_owned())
    }

    /// Names of all kernels.
    pub(crate) fn kernels(&self) -> Vec<String> {
        // SAFETY: the type is that of `shim_kernel`.
        let kernel =
            unsafe { self.library.get::<unsafe extern "C" fn(u32) -> *const c_char>(b"shim_kernel\0") }
                .unwrap();
        // SAFETY: a null pointer, or a name that is never freed.
        (0..)
            .map(|index| unsafe { kernel(index) })
            .take_while(|name| !name.is_null())
            // SAFETY: as above.
            .map(|name| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
            .collect()
    }
}

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

/// The library's file, built once by whichever test comes first.
pub(crate) fn library() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(build)
}

/// Builds the library where there is none for these very sources.
fn build() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
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
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-on-cpu-{}.so", &digest[..16]));
    if !library.is_file() {
        let beside = library.with_extension(format!("{}.part", std::process::id()));
        let mut command = Command::new(&compiler);
        command.args(flags).arg("-o").arg(&beside);
        command.args(["shim/shim.cpp", "shim/driver.cpp"].map(|file| folder.join(file)));
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

/// Stands for the run-time compiler: the code is compiled already.
pub(crate) struct NoCompiler;

impl Compiler for NoCompiler {
    fn compile(&self, source: &Source, _: (u32, u32)) -> Result<String, DeviceError> {
        Ok(source.file.to_string())
    }
}

/// Where this is `cuda`, tests that could run on the shim run on the first GPU instead.
const DEVICE: &str = "SESSION_RUNTIME_TEST_DEVICE";

/// A backend whose device is the shim, with threads in order `order`; or a GPU, see [`DEVICE`]. Every call is checked by a
/// [`Recorder`], which is given back as well.
pub(crate) fn recorded(order: u32) -> (CudaBackend, Arc<Recorder>) {
    if std::env::var(DEVICE).is_ok_and(|device| device == "cuda") {
        let nvrtc = std::env::var_os("SESSION_RUNTIME_TEST_NVRTC").map(PathBuf::from);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-code");
        let cache = Cache::new(Some(folder), Box::new(LazyNvrtc::new(nvrtc)));
        return with(Recorder::new(GpuDriver::open(0).unwrap()), cache);
    }
    with(Recorder::new(ShimDriver::new(order)), Cache::new(None, Box::new(NoCompiler)))
}

fn with(recorder: Recorder, cache: Cache) -> (CudaBackend, Arc<Recorder>) {
    let recorder = Arc::new(recorder);
    (CudaBackend::with_driver(recorder.clone(), cache).unwrap(), recorder)
}

/// As [`recorded`], in the usual order of threads.
pub(crate) fn backend() -> CudaBackend {
    recorded(0).0
}

/// A backend whose device is the shim in any case.
pub(crate) fn on_cpu() -> CudaBackend {
    with(Recorder::new(ShimDriver::new(0)), Cache::new(None, Box::new(NoCompiler))).0
}

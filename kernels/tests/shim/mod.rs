//! The kernels' sources on the CPU: compiled once into a shared library, and a driver that launches them.
#![allow(dead_code, unused_imports, reason = "each test file uses its part")]

mod device;
pub(crate) mod library;
mod recorder;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use kernels::cuda::{Cache, Compiler, CudaBackend, DeviceError, GpuDriver, LazyNvrtc, Source};
use libloading::Library;

pub(crate) use device::ShimDriver;
pub(crate) use recorder::{Deaf, Recorder};

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
            let path = library::path();
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

/// Stands for the run-time compiler: the code is compiled already.
pub(crate) struct NoCompiler;

impl Compiler for NoCompiler {
    fn compile(&self, source: &Source, _: (u32, u32)) -> Result<String, DeviceError> {
        Ok(source.file.to_string())
    }

    fn version(&self) -> Result<(u32, u32), DeviceError> {
        Ok((0, 0))
    }
}

/// Where this is `cuda`, tests that could run on the shim run on the first GPU instead.
const DEVICE: &str = "SESSION_RUNTIME_TEST_DEVICE";
/// The folder of kernels compiled for it, where another than the tests' own is wanted.
const KERNELS: &str = "SESSION_RUNTIME_TEST_KERNELS";

/// A backend whose device is the shim, with threads in order `order`; or a GPU, see [`DEVICE`]. Every call is checked by a
/// [`Recorder`], which is given back as well.
pub(crate) fn recorded(order: u32) -> (CudaBackend, Arc<Recorder>) {
    if std::env::var(DEVICE).is_ok_and(|device| device == "cuda") {
        let nvrtc = std::env::var_os("SESSION_RUNTIME_TEST_NVRTC").map(PathBuf::from);
        let folder = std::env::var_os(KERNELS)
            .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-code"), PathBuf::from);
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

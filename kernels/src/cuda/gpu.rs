//! [`GpuDriver`]: a real device, through the driver's library as it is found at run time.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};

use super::driver::{
    Arg, DeviceInfo, DeviceMemory, Driver, Event, Function, Launch, Module, PinnedMemory, Span, Stream,
};
use super::error::DeviceError;

/// The CUDA version that a driver has to support, as it tells it, and for people.
const NEEDED_VERSION: c_int = 12_000;
const NEEDED: &str = "CUDA 12.0 or later";
/// The same for code that it does not know.
const NEEDED_CODE: &str = "the code of this NVRTC, or NVRTC has to be an older one";
/// The first generation that the kernels are compiled for.
const NEEDED_CAPABILITY: u32 = 8;

/// A GPU. Its handles are numbers to the outside; those that come back are its own.
pub struct GpuDriver {
    info: DeviceInfo,
    device: sys::CUdevice,
    /// The device's primary context, as an address.
    context: usize,
    /// Pinned memory and its size: the host writes and reads it, so it has to be known.
    pinned: Mutex<HashMap<PinnedMemory, usize>>,
}

impl GpuDriver {
    /// All devices of this machine, in the driver's order.
    ///
    /// # Errors
    /// No driver, too old a driver, no device.
    pub fn devices() -> Result<Vec<DeviceInfo>, DeviceError> {
        (0..start(0)?).map(|index| info(handle(index)?)).collect()
    }

    /// The newest CUDA version that the driver supports, such as `(12, 8)`.
    ///
    /// # Errors
    /// No driver, or what it fails with.
    pub fn version() -> Result<(u32, u32), DeviceError> {
        // Without the library every other call would panic.
        // SAFETY: loads the driver's library and lets it go again.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoDriver);
        }
        let version = u32::try_from(raw_version()?).unwrap_or(0);
        Ok((version / 1000, version % 1000 / 10))
    }

    /// Opens device `index`.
    ///
    /// # Errors
    /// No driver, too old a driver, no such device, too old a device.
    pub fn open(index: usize) -> Result<Self, DeviceError> {
        let found = start(index)?;
        if index >= found {
            return Err(DeviceError::NoDevice { index, found });
        }
        let device = handle(index)?;
        let info = info(device)?;
        if info.capability.0 < NEEDED_CAPABILITY {
            let found = format!("{}.{}", info.capability.0, info.capability.1);
            return Err(DeviceError::OldDevice { name: info.name, found });
        }
        // SAFETY: the device was just found.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|error| problem("cuDevicePrimaryCtxRetain", &error))?;
        Ok(Self { info, device, context: context as usize, pinned: Mutex::default() })
    }

    /// Makes the device's context that of this thread: calls may come from any.
    fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is kept until this is dropped.
        unsafe { result::ctx::set_current(self.context as sys::CUcontext) }
            .map_err(|error| problem("cuCtxSetCurrent", &error))
    }

    /// Runs a call of the driver.
    fn call<T>(
        &self,
        name: &'static str,
        call: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        self.enter()?;
        call().map_err(|error| problem(name, &error))
    }

    /// The address of a part of pinned memory that is there.
    fn host(&self, memory: PinnedMemory, at: usize, bytes: usize) -> Result<*mut u8, DeviceError> {
        let known = self.pinned.lock().unwrap_or_else(PoisonError::into_inner).get(&memory).copied();
        match (known, at.checked_add(bytes)) {
            (Some(size), Some(end)) if end <= size => Ok((memory.0 as usize + at) as *mut u8),
            _ => Err(DeviceError::Call {
                call: "pinned memory",
                problem: format!("bytes {at} to {} are outside of it", at.saturating_add(bytes)),
            }),
        }
    }
}

/// Starts the driver, for device `index`; how many devices there are.
fn start(index: usize) -> Result<usize, DeviceError> {
    // Without the library every other call would panic.
    // SAFETY: loads the driver's library and lets it go again.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver);
    }
    result::init().map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_NO_DEVICE => DeviceError::NoDevice { index, found: 0 },
        CUresult::CUDA_ERROR_STUB_LIBRARY => DeviceError::NoDriver,
        _ => problem("cuInit", &error),
    })?;
    let version = raw_version()?;
    if version < NEEDED_VERSION {
        let found = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
        return Err(DeviceError::OldDriver { found, needed: NEEDED });
    }
    let found = result::device::get_count().map_err(|error| problem("cuDeviceGetCount", &error))?;
    Ok(usize::try_from(found).unwrap_or(0))
}

/// A thousand times the major version, and ten times the minor one.
fn raw_version() -> Result<c_int, DeviceError> {
    let mut version = 0;
    // SAFETY: writes a number.
    let told = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
    told.map_err(|error| problem("cuDriverGetVersion", &error))?;
    Ok(version)
}

/// The driver's name of a device that is there.
fn handle(index: usize) -> Result<sys::CUdevice, DeviceError> {
    let ordinal = c_int::try_from(index).map_err(|_| DeviceError::NoDevice { index, found: 0 })?;
    result::device::get(ordinal).map_err(|error| problem("cuDeviceGet", &error))
}

/// Name, capability and memory.
fn info(device: sys::CUdevice) -> Result<DeviceInfo, DeviceError> {
    let attribute = |attribute| {
        // SAFETY: the device was found.
        unsafe { result::device::get_attribute(device, attribute) }
            .map(|value| u32::try_from(value).unwrap_or(0))
            .map_err(|error| problem("cuDeviceGetAttribute", &error))
    };
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let name = result::device::get_name(device).map_err(|error| problem("cuDeviceGetName", &error))?;
    // SAFETY: the device was found.
    let memory = unsafe { result::device::total_mem(device) };
    let memory = memory.map_err(|error| problem("cuDeviceTotalMem", &error))? as u64;
    Ok(DeviceInfo { name, capability: (major, minor), memory })
}

/// What the driver calls its answer.
fn words(error: &DriverError) -> String {
    match error.error_name() {
        Ok(name) => name.to_string_lossy().into_owned(),
        Err(_) => format!("{:?}", error.0),
    }
}

/// The answer of a call as an error of ours.
fn problem(call: &'static str, error: &DriverError) -> DeviceError {
    use CUresult as R;
    let problem = words(error);
    match error.0 {
        R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            DeviceError::OldDriver { found: problem, needed: NEEDED_CODE }
        }
        R::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => DeviceError::OldDriver { found: problem, needed: NEEDED },
        R::CUDA_ERROR_ILLEGAL_ADDRESS
        | R::CUDA_ERROR_LAUNCH_FAILED
        | R::CUDA_ERROR_LAUNCH_TIMEOUT
        | R::CUDA_ERROR_MISALIGNED_ADDRESS
        | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | R::CUDA_ERROR_INVALID_PC
        | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | R::CUDA_ERROR_HARDWARE_STACK_ERROR
        | R::CUDA_ERROR_ECC_UNCORRECTABLE
        | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | R::CUDA_ERROR_ASSERT
        | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | R::CUDA_ERROR_DEINITIALIZED
        | R::CUDA_ERROR_UNKNOWN => DeviceError::Lost { call, problem },
        _ => DeviceError::Call { call, problem },
    }
}

/// Says for how many bytes there was no room.
fn room(place: &'static str, bytes: usize) -> impl FnOnce(DeviceError) -> DeviceError {
    move |error| match error {
        DeviceError::Call { problem, .. } if problem == "CUDA_ERROR_OUT_OF_MEMORY" => {
            DeviceError::OutOfMemory { place, bytes }
        }
        other => other,
    }
}

fn address(span: Span<DeviceMemory>) -> sys::CUdeviceptr {
    span.memory.0 + span.at as u64
}

fn stream_of(stream: Stream) -> sys::CUstream {
    stream.0 as usize as sys::CUstream
}

fn event_of(event: Event) -> sys::CUevent {
    event.0 as usize as sys::CUevent
}

impl Drop for GpuDriver {
    fn drop(&mut self) {
        // SAFETY: retained once, released once. The end of a process does as much, so an error is of no use.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

impl Driver for GpuDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_memory(&self) -> Result<u64, DeviceError> {
        Ok(self.call("cuMemGetInfo", result::mem_get_info)?.0 as u64)
    }

    fn alloc(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        // SAFETY: takes memory, which is reached only through the driver.
        self.call("cuMemAlloc", || unsafe { result::malloc_sync(bytes) })
            .map(DeviceMemory)
            .map_err(room("on the device", bytes))
    }

    fn free(&self, memory: DeviceMemory) {
        // SAFETY: given out by `alloc`; the caller has waited for what used it.
        let _ = self.call("cuMemFree", || unsafe { result::free_sync(memory.0) });
    }

    fn pin(&self, bytes: usize) -> Result<PinnedMemory, DeviceError> {
        // SAFETY: takes memory, which is reached only through `host`, which knows its size.
        let found = self.call("cuMemHostAlloc", || unsafe { result::malloc_host(bytes, 0) });
        let memory = PinnedMemory(found.map_err(room("of pinned host memory", bytes))? as usize as u64);
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).insert(memory, bytes);
        Ok(memory)
    }

    fn unpin(&self, memory: PinnedMemory) {
        if self.pinned.lock().unwrap_or_else(PoisonError::into_inner).remove(&memory).is_some() {
            let pointer = memory.0 as usize as *mut c_void;
            // SAFETY: given out by `pin` and just forgotten; the caller has waited for what used it.
            let _ = self.call("cuMemFreeHost", || unsafe { result::free_host(pointer) });
        }
    }

    fn write_pinned(&self, memory: PinnedMemory, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.host(memory, at, bytes.len())?;
        // SAFETY: inside of pinned memory, which no reference of ours points to.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn read_pinned(&self, memory: PinnedMemory, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        let from = self.host(memory, at, out.len())?;
        // SAFETY: inside of pinned memory, which no reference of ours points to.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn stream(&self) -> Result<Stream, DeviceError> {
        let make = || result::stream::create(result::stream::StreamKind::NonBlocking);
        Ok(Stream(self.call("cuStreamCreate", make)? as usize as u64))
    }

    fn end_stream(&self, stream: Stream) {
        // SAFETY: given out by `stream`, empty.
        let _ = self.call("cuStreamDestroy", || unsafe { result::stream::destroy(stream_of(stream)) });
    }

    fn event(&self) -> Result<Event, DeviceError> {
        // Without times, which would make it slower.
        let make = || result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        Ok(Event(self.call("cuEventCreate", make)? as usize as u64))
    }

    fn end_event(&self, event: Event) {
        // SAFETY: given out by `event`, waited for by no one.
        let _ = self.call("cuEventDestroy", || unsafe { result::event::destroy(event_of(event)) });
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), DeviceError> {
        // SAFETY: both are given out by this.
        self.call("cuEventRecord", || unsafe { result::event::record(event_of(event), stream_of(stream)) })
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are given out by this.
        self.call("cuStreamWaitEvent", || unsafe {
            result::stream::wait_event(stream_of(stream), event_of(event), flags)
        })
    }

    fn finish_event(&self, event: Event) -> Result<(), DeviceError> {
        // SAFETY: given out by `event`.
        self.call("cuEventSynchronize", || unsafe { result::event::synchronize(event_of(event)) })
    }

    fn finish(&self, stream: Stream) -> Result<(), DeviceError> {
        // SAFETY: given out by `stream`.
        self.call("cuStreamSynchronize", || unsafe { result::stream::synchronize(stream_of(stream)) })
    }

    fn upload(
        &self,
        stream: Stream,
        from: Span<PinnedMemory>,
        to: Span<DeviceMemory>,
    ) -> Result<(), DeviceError> {
        let host = self.host(from.memory, from.at, from.bytes)?.cast::<c_void>();
        // SAFETY: the host's part is there and pinned; the caller has checked the device's part.
        self.call("cuMemcpyHtoDAsync", || unsafe {
            sys::cuMemcpyHtoDAsync_v2(address(to), host, to.bytes.min(from.bytes), stream_of(stream)).result()
        })
    }

    fn download(
        &self,
        stream: Stream,
        from: Span<DeviceMemory>,
        to: Span<PinnedMemory>,
    ) -> Result<(), DeviceError> {
        let host = self.host(to.memory, to.at, to.bytes)?.cast::<c_void>();
        // SAFETY: as in `upload`.
        self.call("cuMemcpyDtoHAsync", || unsafe {
            sys::cuMemcpyDtoHAsync_v2(host, address(from), to.bytes.min(from.bytes), stream_of(stream))
                .result()
        })
    }

    fn copy(
        &self,
        stream: Stream,
        from: Span<DeviceMemory>,
        to: Span<DeviceMemory>,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller has checked both parts.
        self.call("cuMemcpyDtoDAsync", || unsafe {
            result::memcpy_dtod_async(address(to), address(from), to.bytes.min(from.bytes), stream_of(stream))
        })
    }

    fn zero(&self, stream: Stream, to: Span<DeviceMemory>) -> Result<(), DeviceError> {
        // SAFETY: the caller has checked the part.
        self.call("cuMemsetD8Async", || unsafe {
            result::memset_d8_async(address(to), 0, to.bytes, stream_of(stream))
        })
    }

    fn load(&self, code: &str) -> Result<Module, DeviceError> {
        let text = CString::new(code).map_err(|_| DeviceError::Call {
            call: "cuModuleLoadData",
            problem: "a zero byte in the code".to_string(),
        })?;
        // SAFETY: a text that ends with a zero byte.
        let module =
            self.call("cuModuleLoadData", || unsafe { result::module::load_data(text.as_ptr().cast()) })?;
        Ok(Module(module as usize as u64))
    }

    fn function(&self, module: Module, name: &str) -> Result<Function, DeviceError> {
        let missing = || DeviceError::NoKernel { name: name.to_string() };
        let text = CString::new(name).map_err(|_| missing())?;
        // SAFETY: given out by `load`, and never unloaded.
        let found = self.call("cuModuleGetFunction", || unsafe {
            result::module::get_function(module.0 as usize as sys::CUmodule, text)
        });
        match found {
            Ok(function) => Ok(Function(function as usize as u64)),
            Err(DeviceError::Call { .. }) => Err(missing()),
            Err(other) => Err(other),
        }
    }

    fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), DeviceError> {
        // Each argument in eight bytes: a number of four is in the first four, as hosts of GPUs are little-endian.
        let mut values: Vec<u64> = launch
            .args
            .iter()
            .map(|arg| match *arg {
                Arg::Read(span) | Arg::Write(span) | Arg::Change(span) => address(span),
                Arg::Null => 0,
                Arg::U32(value) => u64::from(value),
                Arg::U64(value) => value,
                Arg::F32(value) => u64::from(value.to_bits()),
            })
            .collect();
        let mut places: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let [x, y, z] = launch.grid;
        let function = launch.function.0 as usize as sys::CUfunction;
        // SAFETY: the arguments are those of the kernel in its order (tests compare them with the sources' own types), and
        // live during the call, which copies them.
        self.call("cuLaunchKernel", || unsafe {
            let threads = (launch.threads, 1, 1);
            result::launch_kernel(function, (x, y, z), threads, 0, stream_of(stream), &mut places)
        })
    }
}

//! Kernels by name: compiled and loaded when one of their file is first used.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::cache::Cache;
use super::driver::{Arg, Function, Launch, Module, Stream};
use super::error::DeviceError;
use super::memory::Device;
use super::sources::{SOURCES, Source, source_of};
use crate::error::KernelError;

/// Threads of a block of a kernel that has no wish of its own.
pub(super) const THREADS: u32 = 256;

/// Architectures that every kernel is checked for; code for one runs on all later ones.
const ARCHITECTURES: [(u32, u32); 3] = [(8, 0), (9, 0), (10, 0)];

/// The newest of them that a device of this capability runs.
fn architecture(capability: (u32, u32)) -> (u32, u32) {
    ARCHITECTURES.into_iter().rfind(|known| *known <= capability).unwrap_or(ARCHITECTURES[0])
}

/// What is loaded.
#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Module>,
    functions: HashMap<String, Function>,
}

/// The kernels of a device.
pub(super) struct Programs {
    device: Arc<Device>,
    cache: Cache,
    loaded: Mutex<Loaded>,
}

impl Programs {
    pub(super) fn new(device: &Arc<Device>, cache: Cache) -> Self {
        Self { device: device.clone(), cache, loaded: Mutex::default() }
    }

    fn function(&self, name: &str) -> Result<Function, DeviceError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = loaded.functions.get(name) {
            return Ok(function);
        }
        let source = source_of(name).ok_or_else(|| DeviceError::NoKernel { name: name.to_string() })?;
        let module = self.module(&mut loaded, source)?;
        let function = self.device.driver.function(module, name)?;
        loaded.functions.insert(name.to_string(), function);
        Ok(function)
    }

    fn module(&self, loaded: &mut Loaded, source: &Source) -> Result<Module, DeviceError> {
        if let Some(&module) = loaded.modules.get(source.file) {
            return Ok(module);
        }
        let driver = &self.device.driver;
        let module = driver.load(&self.cache.code(source, architecture(driver.info().capability))?)?;
        loaded.modules.insert(source.file, module);
        Ok(module)
    }

    /// Compiles and loads everything.
    pub(super) fn prepare(&self) -> Result<(), KernelError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        for source in &SOURCES {
            self.module(&mut loaded, source)?;
        }
        Ok(())
    }

    /// Starts a kernel.
    pub(super) fn launch(
        &self,
        stream: Stream,
        name: &str,
        grid: [usize; 3],
        threads: u32,
        args: &[Arg],
    ) -> Result<(), KernelError> {
        let mut blocks = [0; 3];
        for (blocks, count) in blocks.iter_mut().zip(grid) {
            *blocks = number("blocks of a kernel", count)?;
        }
        let launch = Launch { function: self.function(name)?, grid: blocks, threads, args };
        Ok(self.device.driver.launch(stream, &launch)?)
    }

    /// Starts a kernel on the compute stream with a thread for each of `count` values.
    pub(super) fn each(&self, name: &str, count: usize, args: &[Arg]) -> Result<(), KernelError> {
        if count == 0 {
            return Ok(());
        }
        let blocks = count.div_ceil(THREADS as usize);
        self.launch(self.device.compute, name, [blocks, 1, 1], THREADS, args)
    }
}

/// A count as kernels take it.
pub(super) fn number(what: &'static str, count: usize) -> Result<u32, KernelError> {
    let limit = u32::MAX as usize;
    u32::try_from(count).map_err(|_| KernelError::OutOfRange { kernel: "launch", what, index: count, limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_made_for_the_newest_architecture_that_is_checked_and_fits() {
        let of = [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0)].map(architecture);
        assert_eq!(of, [(8, 0), (8, 0), (9, 0), (10, 0), (10, 0)]);
    }
}

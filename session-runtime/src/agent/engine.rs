//! The one wasmtime engine of a process: its configuration, its epoch clock, and stores held to limits.
//! Knows nothing of tools, agents and sessions.

use std::thread;
use std::time::Duration;

use wasmtime::{
    Config, Engine, InstanceAllocationStrategy, OptLevel, PoolingAllocationConfig, Store, UpdateDeadline,
};

use super::limits::{GuestLimits, Meter, TICK_MS};
use crate::error::{Error, ErrorKind};

/// Stack of a guest, bytes; the rest of the fiber's stack is the host functions'.
const WASM_STACK: usize = 512 << 10;
const FIBER_STACK: usize = 2 << 20;
/// What a host call may carry besides the payload that `output_bytes` limits.
const CALL_OVERHEAD: u64 = 64 << 10;

/// Data of a store that can be held to limits.
pub(super) trait Metered: Send + 'static {
    fn meter(&mut self) -> &mut Meter;
    /// Whether the guest should come to an end.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Data of a store whose guest is only asked what it is.
pub(super) struct Bare {
    meter: Meter,
}

impl Bare {
    pub(super) fn new(limits: &GuestLimits) -> Self {
        Self { meter: Meter::new(limits) }
    }
}

impl Metered for Bare {
    fn meter(&mut self) -> &mut Meter {
        &mut self.meter
    }
}

/// Compiles and runs components; cheap to clone.
#[derive(Clone)]
pub(super) struct GuestEngine {
    engine: Engine,
    call_bytes: usize,
}

impl GuestEngine {
    /// Starts the engine and its epoch clock. Returns a warning when the pool of instances could not be
    /// reserved, which happens where address space is limited: instances are then made on demand.
    pub(super) fn start(limits: &GuestLimits) -> Result<(Self, Option<String>), Error> {
        let (engine, warning) = match Engine::new(&configuration(limits, true)) {
            Ok(engine) => (engine, None),
            Err(error) => {
                let engine = Engine::new(&configuration(limits, false)).map_err(|error| {
                    Error::new(
                        ErrorKind::Internal,
                        "guest_engine",
                        format!("the WebAssembly engine did not start: {error:#}"),
                    )
                })?;
                (engine, Some(format!("guests are instantiated on demand, without a pool: {error:#}")))
            }
        };
        let weak = engine.weak();
        thread::Builder::new()
            .name("guest-epoch".to_owned())
            .spawn(move || {
                while let Some(engine) = weak.upgrade() {
                    engine.increment_epoch();
                    drop(engine);
                    thread::sleep(Duration::from_millis(TICK_MS));
                }
            })
            .map_err(Error::internal)?;
        let call_bytes = limits.output_bytes.max(limits.input_bytes) + CALL_OVERHEAD;
        Ok((Self { engine, call_bytes: usize::try_from(call_bytes).unwrap_or(usize::MAX) }, warning))
    }

    pub(super) fn inner(&self) -> &Engine {
        &self.engine
    }

    /// A fresh store. Each epoch tick that finds the guest computing is one slice on its meter, after which
    /// it lets other tasks run.
    pub(super) fn store<T: Metered>(&self, data: T) -> Store<T> {
        let mut store = Store::new(&self.engine, data);
        store.limiter(|data| data.meter());
        store.set_hostcall_fuel(self.call_bytes);
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut store| {
            let data = store.data_mut();
            let cancelled = data.is_cancelled();
            data.meter().tick(cancelled).map_err(wasmtime::Error::new)?;
            Ok(UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now())))
        });
        store
    }
}

fn configuration(limits: &GuestLimits, pooled: bool) -> Config {
    let mut config = Config::new();
    config.epoch_interruption(true);
    // The same inputs give the same outputs on every machine: no NaN payloads, no threads, no relaxed
    // vector operations, no concurrency inside a component.
    config.cranelift_nan_canonicalization(true);
    config.wasm_relaxed_simd(false);
    config.concurrency_support(false);
    config.wasm_memory64(false);
    config.cranelift_opt_level(OptLevel::Speed);
    config.max_wasm_stack(WASM_STACK);
    config.async_stack_size(FIBER_STACK);
    // A memory never moves and never needs more than its limit, so a store costs little address space.
    let memory = limits.memory_bytes.next_multiple_of(64 << 10);
    config.memory_reservation(memory);
    config.memory_guard_size(64 << 10);
    config.memory_reservation_for_growth(0);
    if pooled {
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool(limits, memory)));
    }
    config
}

// A component made of one Rust module needs three core instances, one or two tables and one memory; other
// languages need more. Agents and tools each have `concurrency` places, and one is for `describe`.
fn pool(limits: &GuestLimits, memory: u64) -> PoolingAllocationConfig {
    let stores = 2 * limits.concurrency + 1;
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(stores)
        .total_stacks(stores)
        .total_core_instances(stores * 6)
        .total_tables(stores * 4)
        .total_memories(stores * 2)
        .max_core_instances_per_component(limits.instances)
        .max_tables_per_component(limits.instances * 2)
        .max_memories_per_component(limits.instances)
        .max_memory_size(usize::try_from(memory).unwrap_or(usize::MAX))
        .table_elements(usize::try_from(limits.table_elements).unwrap_or(usize::MAX))
        .linear_memory_keep_resident(64 << 10);
    pool
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_limits_give_a_pool() {
        let (engine, warning) = GuestEngine::start(&GuestLimits::default()).unwrap();
        assert_eq!(warning, None);
        assert!(engine.inner().get_epoch_interruption());
        assert!(!engine.inner().get_concurrency_support());
    }
}

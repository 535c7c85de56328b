//! What guests may use, and the meter that holds one store to it. Knows no session and no host function.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use wasmtime::ResourceLimiter;

use crate::error::{Error, ErrorKind};

/// Milliseconds between two ticks of the epoch clock: the grain of CPU limits.
pub(super) const TICK_MS: u64 = 10;
/// Ticks of its own CPU that an agent gets to wind up after its turn was cancelled.
const CANCEL_GRACE_TICKS: u64 = 10;
const WASM_PAGE: u64 = 64 * 1024;

/// Limits of every guest. Each field must be at least 1: zero never means "no limit".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GuestLimits {
    /// Linear memories and tables of one store together, bytes.
    pub memory_bytes: u64,
    /// Elements of all tables of one store.
    pub table_elements: u64,
    /// Core instances in one store.
    pub instances: u32,
    /// CPU time in milliseconds: of a whole tool call, or of an agent between two calls that wait for
    /// the model or a tool.
    pub deadline_ms: u64,
    /// Wall time of a whole tool call in milliseconds, sleeps and waiting for a place included.
    pub call_deadline_ms: u64,
    /// Bytes of a tool's input.
    pub input_bytes: u64,
    /// Bytes of a tool's result, and of everything a guest hands over in one call.
    pub output_bytes: u64,
    /// Bytes a guest may log in one call or turn; what is beyond is dropped.
    pub log_bytes: u64,
    /// Lines a guest may log in one call or turn.
    pub log_lines: u32,
    /// Bytes of one read of a file.
    pub read_bytes: u64,
    /// Entries of one listing of a directory.
    pub list_entries: u32,
    /// Host calls of one tool call or turn.
    pub host_calls: u64,
    /// Bytes of a component file.
    pub component_bytes: u64,
    /// Bytes of compiled components kept on disk.
    pub cache_bytes: u64,
    /// Agents that run at the same time, and, counted apart, tools.
    pub concurrency: u32,
}

impl Default for GuestLimits {
    fn default() -> Self {
        Self {
            memory_bytes: 64 << 20,
            table_elements: 64 << 10,
            instances: 16,
            deadline_ms: 2_000,
            call_deadline_ms: 120_000,
            input_bytes: 256 << 10,
            output_bytes: 1 << 20,
            log_bytes: 64 << 10,
            log_lines: 256,
            read_bytes: 1 << 20,
            list_entries: 4096,
            host_calls: 100_000,
            component_bytes: 64 << 20,
            cache_bytes: 512 << 20,
            concurrency: 32,
        }
    }
}

impl GuestLimits {
    /// Refuses limits that could not work.
    ///
    /// # Errors
    /// `guest_limit_invalid` naming the field: a zero, a memory under one WebAssembly page, or a value so
    /// large that the host could not honour it.
    pub fn validate(&self) -> Result<(), Error> {
        let fields = [
            ("memory_bytes", self.memory_bytes, WASM_PAGE, 4 << 30),
            ("table_elements", self.table_elements, 1, 10_000_000),
            ("instances", u64::from(self.instances), 1, 1_000),
            ("deadline_ms", self.deadline_ms, 1, 86_400_000),
            ("call_deadline_ms", self.call_deadline_ms, 1, 30 * 86_400_000),
            ("input_bytes", self.input_bytes, 1, 1 << 30),
            ("output_bytes", self.output_bytes, 1, 1 << 30),
            ("log_bytes", self.log_bytes, 1, 1 << 30),
            ("log_lines", u64::from(self.log_lines), 1, 1_000_000),
            ("read_bytes", self.read_bytes, 1, 1 << 30),
            ("list_entries", u64::from(self.list_entries), 1, 1_000_000),
            ("host_calls", self.host_calls, 1, 1 << 40),
            ("component_bytes", self.component_bytes, 8, 1 << 30),
            ("cache_bytes", self.cache_bytes, 1, 1 << 40),
            ("concurrency", u64::from(self.concurrency), 1, 1_000),
        ];
        for (field, value, least, most) in fields {
            if value < least || value > most {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "guest_limit_invalid",
                    format!("limits.{field} is {value}; it must be from {least} to {most}"),
                ));
            }
        }
        Ok(())
    }
}

/// Why the host stopped a guest.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Stop {
    /// Memories and tables together would pass the limit, bytes.
    #[error("it asked for more than its {0} bytes of memory")]
    Memory(u64),
    /// The tables would pass the limit, elements.
    #[error("it asked for more than its {0} table elements")]
    Tables(u64),
    /// CPU time, milliseconds.
    #[error("it computed for more than its {0} ms")]
    Cpu(u64),
    /// Number of host calls.
    #[error("it made more than its {0} host calls")]
    HostCalls(u64),
    /// The turn was cancelled and the guest went on.
    #[error("the turn was cancelled")]
    Cancelled,
    /// The host cannot go on.
    #[error("{0}")]
    Host(Error),
}

/// Holds one store to its limits: bytes of memory and tables, CPU ticks, host calls, log.
pub(super) struct Meter {
    memory_bytes: u64,
    table_elements: u64,
    instances: usize,
    deadline_ms: u64,
    host_calls: u64,
    used_memory: u64,
    used_elements: u64,
    used_time: Duration,
    /// Since when the guest computes, as far as is known.
    since: Instant,
    used_calls: u64,
    cancelled_ticks: u64,
    log_bytes_left: u64,
    log_lines_left: u32,
}

impl Meter {
    pub(super) fn new(limits: &GuestLimits) -> Self {
        Self {
            memory_bytes: limits.memory_bytes,
            table_elements: limits.table_elements,
            instances: limits.instances as usize,
            deadline_ms: limits.deadline_ms,
            host_calls: limits.host_calls,
            used_memory: 0,
            used_elements: 0,
            used_time: Duration::ZERO,
            since: Instant::now(),
            used_calls: 0,
            cancelled_ticks: 0,
            log_bytes_left: limits.log_bytes,
            log_lines_left: limits.log_lines,
        }
    }

    /// The epoch clock found the guest computing.
    pub(super) fn tick(&mut self, cancelled: bool) -> Result<(), Stop> {
        if cancelled {
            self.cancelled_ticks += 1;
            if self.cancelled_ticks > CANCEL_GRACE_TICKS {
                return Err(Stop::Cancelled);
            }
        }
        let elapsed = self.since.elapsed();
        self.returned();
        self.charge(elapsed)
    }

    /// The guest enters a host function.
    pub(super) fn host_call(&mut self) -> Result<(), Stop> {
        self.used_calls += 1;
        if self.used_calls > self.host_calls {
            return Err(Stop::HostCalls(self.host_calls));
        }
        let elapsed = self.since.elapsed();
        self.returned();
        self.charge(elapsed)
    }

    /// A host function that took its time returns: none of it was the guest's.
    pub(super) fn returned(&mut self) {
        self.since = Instant::now();
    }

    /// Adds time in which the guest computed. It computes for a tick at most before it lets others run, so
    /// what is beyond a tick was theirs.
    fn charge(&mut self, elapsed: Duration) -> Result<(), Stop> {
        self.used_time += elapsed.min(Duration::from_millis(TICK_MS));
        if self.used_time > Duration::from_millis(self.deadline_ms) {
            return Err(Stop::Cpu(self.deadline_ms));
        }
        Ok(())
    }

    /// A new stretch of CPU begins.
    pub(super) fn rest(&mut self) {
        self.used_time = Duration::ZERO;
        self.returned();
    }

    /// The part of a log line that may still be written; `None` when the guest has logged enough.
    pub(super) fn log_line(&mut self, message: &str) -> Option<String> {
        self.log_lines_left = self.log_lines_left.checked_sub(1)?;
        if self.log_bytes_left == 0 {
            return None;
        }
        let most = self.log_bytes_left.min(4096);
        let line = super::failure::scrub(message, usize::try_from(most).unwrap_or(4096));
        self.log_bytes_left -= (line.len() as u64).min(self.log_bytes_left);
        Some(line)
    }

    fn grow(&mut self, bytes: u64) -> Result<(), Stop> {
        let used = self.used_memory.saturating_add(bytes);
        if used > self.memory_bytes {
            return Err(Stop::Memory(self.memory_bytes));
        }
        self.used_memory = used;
        Ok(())
    }
}

// A refused growth ends the guest at once rather than returning -1: allocators answer -1 with an abort that
// says nothing, and the reason would be lost.
impl ResourceLimiter for Meter {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let bytes = desired.saturating_sub(current) as u64;
        if self.used_memory.saturating_add(bytes) <= self.memory_bytes
            && maximum.is_some_and(|most| desired > most)
        {
            return Ok(false);
        }
        self.grow(bytes).map(|()| true).map_err(wasmtime::Error::new)
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let elements = desired.saturating_sub(current) as u64;
        let used = self.used_elements.saturating_add(elements);
        if used > self.table_elements {
            return Err(wasmtime::Error::new(Stop::Tables(self.table_elements)));
        }
        if maximum.is_some_and(|most| desired > most) {
            return Ok(false);
        }
        self.grow(elements * size_of::<usize>() as u64).map_err(wasmtime::Error::new)?;
        self.used_elements = used;
        Ok(true)
    }

    fn instances(&self) -> usize {
        self.instances
    }

    fn tables(&self) -> usize {
        self.instances * 2
    }

    fn memories(&self) -> usize {
        self.instances
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_zero_never_is() {
        GuestLimits::default().validate().unwrap();
        let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(GuestLimits::default()) else {
            panic!("limits are an object");
        };
        for name in fields.keys() {
            let mut changed = fields.clone();
            changed.insert(name.clone(), 0.into());
            let limits: GuestLimits = serde_json::from_value(changed.into()).unwrap();
            let error = limits.validate().unwrap_err();
            assert_eq!(error.code, "guest_limit_invalid");
            assert!(error.message.contains(name.as_str()), "{}", error.message);
        }
    }

    #[test]
    fn i8_memory_is_counted_over_all_memories_and_tables() {
        let limits =
            GuestLimits { memory_bytes: 4 * WASM_PAGE, table_elements: 10_000, ..Default::default() };
        let mut meter = Meter::new(&limits);
        let page = WASM_PAGE as usize;
        assert!(meter.memory_growing(0, 2 * page, None).unwrap());
        assert!(meter.memory_growing(0, page, None).unwrap());
        assert!(meter.table_growing(0, 8191, None).unwrap());
        let error = meter.memory_growing(page, 2 * page, None).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(Stop::Memory(_))));
        let error = meter.table_growing(8191, 10_001, None).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(Stop::Tables(10_000))));
    }

    #[test]
    fn i8_the_log_has_an_end() {
        let limits = GuestLimits { log_bytes: 10, log_lines: 3, ..Default::default() };
        let mut meter = Meter::new(&limits);
        assert_eq!(meter.log_line("123456").as_deref(), Some("123456"));
        assert!(meter.log_line("1234567890").is_some_and(|line| line.len() <= 10));
        assert_eq!(meter.log_line("x"), None);
        assert_eq!(meter.log_line("x"), None);
    }

    #[test]
    fn i8_cpu_is_counted_per_stretch_and_never_more_than_a_tick_at_once() {
        let limits = GuestLimits { deadline_ms: 30, ..Default::default() };
        let mut meter = Meter::new(&limits);
        let ms = Duration::from_millis;
        for elapsed in [ms(10), ms(4), ms(5000), ms(6)] {
            meter.charge(elapsed).unwrap();
        }
        assert!(matches!(meter.charge(ms(1)), Err(Stop::Cpu(30))));
        meter.rest();
        for _ in 0..3 {
            meter.charge(ms(10)).unwrap();
        }
        assert!(matches!(meter.charge(ms(10)), Err(Stop::Cpu(30))));
    }
}

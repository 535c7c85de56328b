//! Checks of the machine: processor, memory, port.

use std::net::TcpListener;

use super::Check;
use crate::cli::bytes::Bytes;
use crate::cli::failure::Outcome;
use crate::cli::options::Options;
use crate::cli::serve::DEFAULT_LISTEN;
use kernels::cpu::Isa;

/// The instruction set that the kernels will use.
pub(super) fn processor() -> Check {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    match kernels::cpu::best_isa() {
        Isa::Scalar => Check::warning(
            "processor",
            format!("{threads} threads without AVX2, FMA and F16C: the plain kernels are used"),
            "expect a small part of the speed; a processor with AVX2, FMA and F16C has the fast kernels",
        ),
        isa => Check::ok("processor", format!("{threads} threads, {} kernels", isa.name())),
    }
}

/// Whether model and KV fit in memory.
pub(super) fn memory(options: &Options) -> Check {
    let Some(available) = available_memory() else {
        return Check::ok("memory", "not known on this system");
    };
    let file = crate::models::catalog::resolve(options.model_name()).ok();
    let weights = file.and_then(|file| std::fs::metadata(file.path).ok()).map_or(0, |data| data.len());
    let budgets =
        options.config().map_or((0, 0), |config| (config.device_budget_bytes, config.host_budget_bytes));
    let needed = weights.saturating_add(budgets.0).saturating_add(budgets.1);
    let found = format!("{} available, {} needed for model and KV", Bytes(available), Bytes(needed));
    if needed > available {
        return Check::warning(
            "memory",
            found,
            "use a smaller --device-budget or --host-budget, or a smaller --model",
        );
    }
    Check::ok("memory", found)
}

/// Bytes that programs can have without swapping, on Linux.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Whether `serve` can listen where it does unless told otherwise.
pub(super) fn port(options: &Options) -> Outcome<Check> {
    let error = match TcpListener::bind(DEFAULT_LISTEN) {
        Ok(_) => return Ok(Check::ok("port", format!("{DEFAULT_LISTEN} is free for `serve`"))),
        Err(error) => error,
    };
    let holder = store::holder(&options.data_dir()?).and_then(|holder| holder.address);
    if holder.is_some_and(|address| address.ends_with(DEFAULT_LISTEN)) {
        return Ok(Check::ok(
            "port",
            format!("{DEFAULT_LISTEN} is served by the process with this data directory"),
        ));
    }
    let found = format!("{DEFAULT_LISTEN} cannot be used: {error}");
    Ok(Check::warning("port", found, "serve on another port: `session-runtime serve --listen 127.0.0.1:0`"))
}

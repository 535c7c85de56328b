//! What a runtime is opened on: the data directory, and memory for the host tier.

use store::{Store, StoreOptions};

use crate::config::{Config, Throttle};
use crate::engine;
use crate::error::{Error, ErrorKind};
use crate::seams::Seams;

/// Opens the data directory.
pub(super) fn open_store(config: &Config, seams: Seams) -> Result<Store, Error> {
    let options = StoreOptions {
        disk: seams.disk,
        clock: seams.clock,
        failpoints: seams.failpoints,
        cell_quota_bytes: config.disk_quota_bytes,
        probe: config.probe.clone().map(|mut command| {
            command.push(config.data_dir.clone().into_os_string());
            command
        }),
        ..StoreOptions::default()
    };
    let store = Store::open(&config.data_dir, options).map_err(|error| {
        let code = match &error {
            store::OpenError::InUse { .. } => "data_dir_in_use",
            store::OpenError::NewerFormat { .. } => "data_dir_newer",
            _ => "data_dir",
        };
        Error::new(ErrorKind::Conflict, code, error.to_string())
    })?;
    store.cells().set_throttle(throttle(config.throttle));
    Ok(store)
}

/// A tier's throttle as the store has it.
pub(super) fn throttle(throttle: Throttle) -> store::Throttle {
    store::Throttle { bytes_per_s: throttle.bytes_per_s, latency: throttle.latency }
}

/// Refuses a host tier that what is left of memory beside the model could not hold.
pub(super) fn check_memory(host_budget: u64) -> Result<(), Error> {
    match engine::memory_available() {
        Some(available) if host_budget > available => Err(Error::new(
            ErrorKind::Limit,
            "out_of_memory",
            format!(
                "a host budget of {host_budget} bytes is more than the {available} bytes of memory that the model leaves: \
                 lower --host-budget, or turn the host tier off with 0"
            ),
        )),
        _ => Ok(()),
    }
}

/// What an operator should know of how the data directory was opened.
pub(crate) fn recovery_lines(report: &store::RecoveryReport) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(reason) = &report.rebuilt {
        lines.push(format!("the metadata index was rebuilt from the journal: {reason}"));
    }
    lines.extend(report.quarantined.iter().map(|path| format!("kept for inspection: {path}")));
    let counts = [
        (report.torn_tail_bytes, "bytes of unfinished writes were cut from the logs"),
        (report.damaged.len() as u64, "damaged ranges of the logs were skipped"),
        (report.missing_records, "records are missing"),
        (report.cells_recovered, "saved cells were found that the index had missed"),
        (report.cells_dropped, "saved cells are gone with their packs and will be recomputed"),
    ];
    lines
        .extend(counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")));
    lines
}

//! The imports on wasm32: calls into the generated bindings.

#[cfg(feature = "agent")]
#[path = "wasm_agent.rs"]
mod agent;
#[cfg(feature = "tool")]
#[path = "wasm_tool.rs"]
mod tool;

#[cfg(feature = "agent")]
pub(crate) use agent::*;
#[cfg(feature = "tool")]
pub(crate) use tool::*;

#[cfg(feature = "agent")]
use crate::bindings::agent::session_runtime::agent as imports;
#[cfg(feature = "tool")]
use crate::bindings::tool::session_runtime::tool as imports;

use crate::log::Level;

pub(crate) fn log(level: Level, message: &str) {
    use imports::log::Level as To;
    let level = match level {
        Level::Debug => To::Debug,
        Level::Info => To::Info,
        Level::Warn => To::Warn,
        Level::Error => To::Error,
    };
    imports::log::write(level, message);
}

pub(crate) fn now_ms() -> u64 {
    imports::clock::now_ms()
}

//! A runtime for agents that live for hours or months.
//!
//! Agents and tools are WebAssembly components; the runtime runs the language model in its own
//! process and treats each session's KV cache as durable state with a life: active, idle, evicted,
//! restored. See `ARCHITECTURE.md` for the modules and their invariants.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod agent;
pub mod api;
pub mod bench;
pub mod cli;
pub mod config;
pub mod engine;
pub mod error;
pub mod ids;
pub mod kv;
pub mod models;
pub mod restore;
pub mod runtime;
pub mod scheduler;
pub mod seams;
pub mod session;

pub use config::Config;
pub use error::{Error, ErrorKind};
pub use runtime::Runtime;

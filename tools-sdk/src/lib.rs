//! What the author of an agent or a tool imports.
//!
//! An agent or a tool is a WebAssembly component for `wasm32-unknown-unknown` that sees nothing but the
//! imports of its WIT world (`wit/agent`, `wit/tool`). This crate is those imports as plain Rust, plus the two
//! attributes that write the exports:
//!
//! ```
//! use tools_sdk::prelude::*;
//!
//! /// What to greet.
//! #[derive(Deserialize, JsonSchema)]
//! struct Input {
//!     /// Who is greeted.
//!     name: String,
//! }
//!
//! #[derive(Serialize, JsonSchema)]
//! struct Output {
//!     greeting: String,
//! }
//!
//! /// Says hello to someone.
//! #[tool(effect = "pure")]
//! fn greet(input: Input, _cx: &Context) -> Result<Output, ToolError> {
//!     Ok(Output { greeting: format!("Hello, {}.", input.name) })
//! }
//!
//! // A host build has mocked imports, so a tool is tested like any other code.
//! let host = tools_sdk::testing::Host::new();
//! let output = host.call::<greet>(r#"{"name": "Ada"}"#)?;
//! assert_eq!(output.json, r#"{"greeting":"Hello, Ada."}"#);
//! # Ok::<(), ToolError>(())
//! ```
//!
//! On wasm32 choose one world with the feature `tool` or `agent`. On the host both are there, and every import
//! goes to [`testing::Host`]. This crate knows nothing of the host's own code: the WIT text is all they share.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

#[cfg(all(target_arch = "wasm32", feature = "tool", feature = "agent"))]
compile_error!(
    "a component speaks one world: enable the feature `tool` or the feature `agent`, not both (build one guest at a time: cargo build -p NAME)"
);
#[cfg(all(target_arch = "wasm32", not(feature = "tool"), not(feature = "agent")))]
compile_error!("enable the feature `tool` or the feature `agent` of tools-sdk");

// The attributes name this crate by its name, also inside its own tests and docs.
extern crate self as tools_sdk;

#[cfg(any(feature = "agent", not(target_arch = "wasm32")))]
pub mod agent;
#[cfg(target_arch = "wasm32")]
#[doc(hidden)]
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod bindings;
pub mod clock;
mod error;
pub mod log;
pub mod schema;
#[cfg_attr(target_arch = "wasm32", path = "sys/wasm.rs")]
#[cfg_attr(not(target_arch = "wasm32"), path = "sys/native.rs")]
mod sys;
#[cfg(not(target_arch = "wasm32"))]
pub mod testing;
#[cfg(any(feature = "tool", not(target_arch = "wasm32")))]
pub mod tool;

pub use error::{AgentError, Error, ErrorKind, ToolError};
pub use tools_sdk_macros::{agent, tool};

#[doc(hidden)]
pub use schemars;
#[doc(hidden)]
pub use serde;
#[doc(hidden)]
pub use serde_json;
#[cfg(target_arch = "wasm32")]
#[doc(hidden)]
pub use wit_bindgen;

/// What nearly every guest uses.
pub mod prelude {
    #[cfg(any(feature = "agent", not(target_arch = "wasm32")))]
    pub use crate::agent::{Event, chat, context, random, segments, session, state, tools};
    #[cfg(any(feature = "tool", not(target_arch = "wasm32")))]
    pub use crate::tool::{Context, files, progress};
    pub use crate::{AgentError, Error, ErrorKind, ToolError, agent, clock, log, tool};
    pub use schemars::JsonSchema;
    pub use serde::{Deserialize, Serialize};
}

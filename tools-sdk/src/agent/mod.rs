//! An agent: parameters, a start and a turn. `#[agent]` implements [`Agent`]; the functions here turn it into the
//! exports of the WIT world `session-runtime:agent/agent`.
//!
//! A turn is replayed after a crash: it runs again from its start and is fed what the host answered before. So
//! an agent decides by nothing but its imports and its own arguments.

pub mod chat;
pub mod context;
pub mod random;
pub mod segments;
pub mod session;
pub mod state;
pub mod tools;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;

use crate::{Error, schema};

/// What an agent says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Name sessions choose it by.
    pub name: String,
    /// What it does.
    pub description: String,
    /// JSON Schema of the parameters a session may give.
    pub params_schema: String,
}

/// Why a turn runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The user wrote this.
    UserMessage(String),
}

/// What `#[agent]` implements.
pub trait Agent {
    /// Parameters of a session; every field should have a default.
    type Params: DeserializeOwned + JsonSchema;
    /// Name sessions choose it by.
    const NAME: &'static str;
    /// What it does.
    const DESCRIPTION: &'static str;

    /// Runs once, before the session's first event.
    ///
    /// # Errors
    /// Whatever keeps the session from starting.
    fn start(_params: Self::Params) -> Result<(), Error> {
        Ok(())
    }

    /// Runs one turn.
    ///
    /// # Errors
    /// Whatever ends the turn without an answer.
    fn on_event(event: Event, params: Self::Params) -> Result<(), Error>;
}

/// What the agent says of itself.
///
/// # Errors
/// As for [`schema::input`].
pub fn describe<A: Agent>() -> Result<Info, Error> {
    Ok(Info {
        name: A::NAME.to_owned(),
        description: A::DESCRIPTION.to_owned(),
        params_schema: schema::input::<A::Params>()?,
    })
}

/// Reads the session's parameters and starts.
///
/// # Errors
/// `params_mismatch` when the parameters do not fit, and the agent's own errors.
pub fn start<A: Agent>() -> Result<(), Error> {
    A::start(params::<A>()?)
}

/// Reads the session's parameters and runs one turn.
///
/// # Errors
/// As for [`start`].
pub fn on_event<A: Agent>(event: Event) -> Result<(), Error> {
    A::on_event(event, params::<A>()?)
}

fn params<A: Agent>() -> Result<A::Params, Error> {
    let text = session::params();
    let text = if text.trim().is_empty() { "{}" } else { text.as_str() };
    schema::read(text).map_err(|error| {
        Error::invalid_input("params_mismatch", format!("the parameters of {} do not fit: {error}", A::NAME))
    })
}

/// Writes the component's exports for a type that implements [`Agent`]. `#[agent]` does this already.
#[macro_export]
macro_rules! export_agent {
    ($agent:ty) => {
        #[cfg(target_arch = "wasm32")]
        const _: () = {
            struct Exports;
            impl $crate::bindings::agent::Guest for Exports {
                fn describe() -> $crate::bindings::agent::AgentInfo {
                    $crate::bindings::describe_agent::<$agent>()
                }
                fn start() -> ::core::result::Result<(), $crate::bindings::agent::Error> {
                    $crate::bindings::start_agent::<$agent>()
                }
                fn on_event(
                    event: $crate::bindings::agent::Event,
                ) -> ::core::result::Result<(), $crate::bindings::agent::Error> {
                    $crate::bindings::agent_event::<$agent>(event)
                }
            }
    $crate::bindings::agent::export!(Exports with_types_in $crate::bindings::agent);
        };
    };
}

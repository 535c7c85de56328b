//! What `wit-bindgen` writes from `wit/`, and the glue between its types and ours. Guests reach it only through
//! the macros.

#[cfg(feature = "tool")]
pub mod tool {
    //! Bindings of `session-runtime:tool/tool`.
    wit_bindgen::generate!({
        path: "wit/tool",
        world: "tool",
        pub_export_macro: true,
        default_bindings_module: "tools_sdk::bindings::tool",
        runtime_path: "::tools_sdk::wit_bindgen::rt",
    });
}

#[cfg(feature = "agent")]
pub mod agent {
    //! Bindings of `session-runtime:agent/agent`.
    wit_bindgen::generate!({
        path: "wit/agent",
        world: "agent",
        pub_export_macro: true,
        default_bindings_module: "tools_sdk::bindings::agent",
        runtime_path: "::tools_sdk::wit_bindgen::rt",
    });
}

#[cfg(feature = "agent")]
use agent::session_runtime::agent::types as vocabulary;
#[cfg(feature = "tool")]
use tool::session_runtime::tool::types as vocabulary;

use crate::{Error, ErrorKind};

/// Sends a panic's message to the log before the trap, once per instance.
fn report_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|panic| crate::log::error(&panic.to_string())));
    });
}

/// The value, or a trap whose message is in the log.
fn or_trap<T>(result: Result<T, Error>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => {
            crate::log::error(&error.to_string());
            core::arch::wasm32::unreachable()
        }
    }
}

impl From<vocabulary::Error> for Error {
    fn from(error: vocabulary::Error) -> Self {
        use vocabulary::ErrorKind as Kind;
        let kind = match error.kind {
            Kind::InvalidInput => ErrorKind::InvalidInput,
            Kind::NotFound => ErrorKind::NotFound,
            Kind::Denied => ErrorKind::Denied,
            Kind::Limit => ErrorKind::Limit,
            Kind::Cancelled => ErrorKind::Cancelled,
            Kind::Unavailable => ErrorKind::Unavailable,
            Kind::Failed => ErrorKind::Failed,
        };
        Self { kind, code: error.code, message: error.message, retryable: error.retryable }
    }
}

impl From<Error> for vocabulary::Error {
    fn from(error: Error) -> Self {
        use vocabulary::ErrorKind as Kind;
        let kind = match error.kind {
            ErrorKind::InvalidInput => Kind::InvalidInput,
            ErrorKind::NotFound => Kind::NotFound,
            ErrorKind::Denied => Kind::Denied,
            ErrorKind::Limit => Kind::Limit,
            ErrorKind::Cancelled => Kind::Cancelled,
            ErrorKind::Unavailable => Kind::Unavailable,
            ErrorKind::Failed => Kind::Failed,
        };
        Self { kind, code: error.code, message: error.message, retryable: error.retryable }
    }
}

#[cfg(feature = "tool")]
pub fn describe_tool<T: crate::tool::Tool>() -> tool::ToolInfo {
    report_panics();
    let info = or_trap(crate::tool::describe::<T>());
    tool::ToolInfo {
        name: info.name,
        description: info.description,
        input_schema: info.input_schema,
        output_schema: info.output_schema,
        effect: match info.effect {
            crate::tool::Effect::Pure => vocabulary::EffectClass::Pure,
            crate::tool::Effect::Read => vocabulary::EffectClass::Read,
            crate::tool::Effect::Idempotent => vocabulary::EffectClass::Idempotent,
            crate::tool::Effect::Effect => vocabulary::EffectClass::Effect,
        },
        wants: info.wants,
        expected_ms: info.expected_ms,
        expected_seconds_of: info.expected_seconds_of,
    }
}

#[cfg(feature = "tool")]
pub fn call_tool<T: crate::tool::Tool>(
    input: &str,
    context: tool::CallContext,
) -> Result<tool::Output, tool::Error> {
    report_panics();
    let context = crate::tool::Context {
        call_id: context.call_id,
        session_id: context.session_id,
        deadline_ms: context.deadline_ms,
    };
    let output = crate::tool::call::<T>(input, &context)?;
    Ok(tool::Output { json: output.json, text: output.text })
}

#[cfg(feature = "agent")]
pub fn describe_agent<A: crate::agent::Agent>() -> agent::AgentInfo {
    report_panics();
    let info = or_trap(crate::agent::describe::<A>());
    agent::AgentInfo { name: info.name, description: info.description, params_schema: info.params_schema }
}

#[cfg(feature = "agent")]
pub fn start_agent<A: crate::agent::Agent>() -> Result<(), agent::Error> {
    report_panics();
    Ok(crate::agent::start::<A>()?)
}

#[cfg(feature = "agent")]
pub fn agent_event<A: crate::agent::Agent>(event: agent::Event) -> Result<(), agent::Error> {
    report_panics();
    let event = match event {
        agent::Event::UserMessage(text) => crate::agent::Event::UserMessage(text),
    };
    Ok(crate::agent::on_event::<A>(event)?)
}

//! Host bindings generated from the WIT packages: the only text shared with guests.

/// World of a tool.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated from WIT")]
pub(super) mod tool {
    pub use self::session_runtime::tool::types::EffectClass;

    /// What a call gives back.
    pub type Outcome = Result<Output, Error>;

    wasmtime::component::bindgen!({
        path: "../tools-sdk/wit/tool",
        world: "tool",
        imports: { default: async | trappable },
        exports: { default: async },
    });
}

/// World of an agent.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated from WIT")]
pub(super) mod agent {
    wasmtime::component::bindgen!({
        path: "../tools-sdk/wit/agent",
        world: "agent",
        imports: { default: async | trappable },
        exports: { default: async },
        with: {
            "session-runtime:agent/chat.generation": crate::agent::agent_host::Generation,
        },
    });
}

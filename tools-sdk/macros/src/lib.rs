//! The attributes `#[tool]` and `#[agent]` of `tools-sdk`. They only name things: what a tool or an agent does at
//! run time is in `tools-sdk` itself.

mod agent;
mod arguments;
mod tool;

use proc_macro::TokenStream;

/// Makes a function a tool and its crate a tool component.
///
/// `fn name(input: In, context: &Context) -> Result<Out, ToolError>`, where `In` is `Deserialize + JsonSchema` and
/// `Out` is `Serialize + JsonSchema`. The doc comment becomes the description the model sees. Arguments:
///
/// - `effect = "pure" | "read" | "idempotent" | "effect"` (required): what a call may change;
/// - `name = "..."`: the tool's name, when it is not the function's;
/// - `wants = ["files", ...]`: imports used beyond log and clock;
/// - `text = path`: `fn(&Out) -> String`, the output for reading, when it is not its JSON;
/// - `expected_ms = 2000`: how long a call usually takes, milliseconds;
/// - `expected_seconds_of = "..."`: the property of the input that says how many seconds a call takes.
///
/// A type with the function's name stands for the tool, so that a test can say `host.call::<name>(...)`.
///
/// A tool without a doc comment, or without an effect, does not compile: the model and the host need them.
#[proc_macro_attribute]
pub fn tool(arguments: TokenStream, item: TokenStream) -> TokenStream {
    tool::expand(arguments.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Makes an `impl` block an agent and its crate an agent component.
///
/// The block has `fn on_event(event: Event, params: Params) -> Result<(), AgentError>` and may have
/// `fn start(params: Params) -> Result<(), AgentError>` and whatever else it needs; `Params` is
/// `Deserialize + JsonSchema`. The doc comment of the block becomes the description. Arguments: `name = "..."`
/// (required).
#[proc_macro_attribute]
pub fn agent(arguments: TokenStream, item: TokenStream) -> TokenStream {
    agent::expand(arguments.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}

//! A tool: a name, two schemas and one function. `#[tool]` implements [`Tool`]; the functions here turn it into
//! the exports of the WIT world `session-runtime:tool/tool`.

pub mod files;
pub mod progress;

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, schema};

/// Most bytes of input JSON a tool reads.
pub const MAX_INPUT_BYTES: usize = 1 << 20;

/// What a call may change in the world; the host decides by it what to do with a call that a crash interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Depends on its input only.
    Pure,
    /// Looks, changes nothing.
    Read,
    /// Changes something, and doing it twice is doing it once.
    Idempotent,
    /// Changes something each time.
    Effect,
}

/// What a tool says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Name the model calls it by.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// JSON Schema of the input.
    pub input_schema: String,
    /// JSON Schema of the output.
    pub output_schema: String,
    /// What a call may change.
    pub effect: Effect,
    /// Imports used beyond log and clock.
    pub wants: Vec<String>,
    /// Milliseconds a call usually takes.
    pub expected_ms: Option<u64>,
    /// The property of the input that says how many seconds a call takes.
    pub expected_seconds_of: Option<String>,
}

/// Facts of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// Id of the call; the same when an interrupted call runs again.
    pub call_id: String,
    /// Session that called.
    pub session_id: String,
    /// Milliseconds left before the host stops the call.
    pub deadline_ms: u64,
}

/// Result of a call, as a document and as text for the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// A JSON document that matches the output schema.
    pub json: String,
    /// The same for reading.
    pub text: String,
}

/// What `#[tool]` implements.
///
/// What a tool changes and what it is for cannot be left out:
///
/// ```compile_fail
/// # use tools_sdk::prelude::*;
/// # #[derive(Deserialize, JsonSchema)] struct In {}
/// # #[derive(Serialize, JsonSchema)] struct Out {}
/// /// Has a description, and no effect.
/// #[tool]
/// fn silent(_input: In, _cx: &Context) -> Result<Out, ToolError> { Ok(Out {}) }
/// ```
///
/// ```compile_fail
/// # use tools_sdk::prelude::*;
/// # #[derive(Deserialize, JsonSchema)] struct In {}
/// # #[derive(Serialize, JsonSchema)] struct Out {}
/// #[tool(effect = "pure")]
/// fn nameless(_input: In, _cx: &Context) -> Result<Out, ToolError> { Ok(Out {}) }
/// ```
pub trait Tool {
    /// What a call is given.
    type Input: DeserializeOwned + JsonSchema;
    /// What a call gives back.
    type Output: Serialize + JsonSchema;
    /// Name the model calls it by.
    const NAME: &'static str;
    /// What it does, for the model.
    const DESCRIPTION: &'static str;
    /// What a call may change.
    const EFFECT: Effect;
    /// Imports used beyond log and clock.
    const WANTS: &'static [&'static str];
    /// Milliseconds a call usually takes.
    const EXPECTED_MS: Option<u64> = None;
    /// The property of the input that says how many seconds a call takes.
    const EXPECTED_SECONDS_OF: Option<&'static str> = None;

    /// Runs one call.
    ///
    /// # Errors
    /// Whatever the tool refuses or fails at.
    fn call(input: Self::Input, context: &Context) -> Result<Self::Output, Error>;

    /// The output for reading; `None` means its JSON.
    fn text(_output: &Self::Output) -> Option<String> {
        None
    }
}

/// What a tool's function returns: names the output inside the `Result`.
#[doc(hidden)]
pub trait Outcome {
    /// The output.
    type Output;
}

impl<T> Outcome for Result<T, Error> {
    type Output = T;
}

/// What the tool says of itself.
///
/// # Errors
/// As for [`schema::input`].
pub fn describe<T: Tool>() -> Result<Info, Error> {
    Ok(Info {
        name: T::NAME.to_owned(),
        description: T::DESCRIPTION.to_owned(),
        input_schema: schema::input::<T::Input>()?,
        output_schema: schema::output::<T::Output>()?,
        effect: T::EFFECT,
        wants: T::WANTS.iter().map(|want| (*want).to_owned()).collect(),
        expected_ms: T::EXPECTED_MS,
        expected_seconds_of: T::EXPECTED_SECONDS_OF.map(str::to_owned),
    })
}

/// Reads the input, runs the tool, writes the output.
///
/// # Errors
/// `input_too_large` and `input_mismatch` before the tool runs, the tool's own errors, and `output_unwritable`
/// when its output has no JSON form.
pub fn call<T: Tool>(input: &str, context: &Context) -> Result<Output, Error> {
    if input.len() > MAX_INPUT_BYTES {
        return Err(Error::limit(
            "input_too_large",
            format!("the input of {} is {} bytes; at most {MAX_INPUT_BYTES} are read", T::NAME, input.len()),
        ));
    }
    let input = schema::read(input).map_err(|error| {
        Error::invalid_input(
            "input_mismatch",
            format!("the input of {} does not fit its schema: {error}", T::NAME),
        )
    })?;
    let output = T::call(input, context)?;
    let json = serde_json::to_string(&output).map_err(|error| {
        Error::failed("output_unwritable", format!("the output of {} has no JSON form: {error}", T::NAME))
    })?;
    let text = T::text(&output).unwrap_or_else(|| json.clone());
    Ok(Output { json, text })
}

/// Writes the component's exports for a type that implements [`Tool`]. `#[tool]` does this already.
#[macro_export]
macro_rules! export_tool {
    ($tool:ty) => {
        #[cfg(target_arch = "wasm32")]
        const _: () = {
            struct Exports;
            impl $crate::bindings::tool::Guest for Exports {
                fn describe() -> $crate::bindings::tool::ToolInfo {
                    $crate::bindings::describe_tool::<$tool>()
                }
                fn call(
                    input: ::std::string::String,
                    context: $crate::bindings::tool::CallContext,
                ) -> ::core::result::Result<$crate::bindings::tool::Output, $crate::bindings::tool::Error>
                {
                    $crate::bindings::call_tool::<$tool>(&input, context)
                }
            }
    $crate::bindings::tool::export!(Exports with_types_in $crate::bindings::tool);
        };
    };
}

//! The order of a turn: the user's message, a plan, its calls, the answer.

use serde_json::Value;
use tools_sdk::agent::chat::{self, Options, Retention, Role, SegmentKind};
use tools_sdk::agent::tools::Info;
use tools_sdk::agent::{session, tools};
use tools_sdk::{Error, ErrorKind, log};

use crate::{Params, ToolPolicy, call, plan};

/// Runs a turn to its answer.
pub(crate) fn run(message: &str, params: &Params) -> Result<(), Error> {
    chat::append(Role::User, SegmentKind::User, Retention::Keep, message)?;
    let tools = if params.tool_policy == ToolPolicy::Never { Vec::new() } else { tools::list() };
    if !tools.is_empty() {
        let plan = plan::make(params, &tools)?;
        Steps { params, tools: &tools, made: Vec::new() }.run(&plan)?;
    }
    check_cancelled()?;
    let options =
        Options { temperature: params.temperature, ..Options::new(SegmentKind::Answer, params.max_tokens) };
    chat::generate(&options)?.finish()?;
    Ok(())
}

/// The calls of a turn.
struct Steps<'a> {
    params: &'a Params,
    tools: &'a [Info],
    /// Calls that were made, and whether they failed.
    made: Vec<(String, Value)>,
}

impl Steps<'_> {
    /// Follows the plan. A step whose input the tool refused is tried once more, with the refusal in view.
    fn run(&mut self, plan: &[String]) -> Result<(), Error> {
        for name in plan {
            for _ in 0..2 {
                if self.made.len() >= self.params.max_steps as usize {
                    return Ok(());
                }
                check_cancelled()?;
                if !self.step(name)? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Makes one call; whether it is worth trying again.
    fn step(&mut self, name: &str) -> Result<bool, Error> {
        let Some(tool) = self.tools.iter().find(|tool| tool.name == name) else { return Ok(false) };
        let Some(arguments) = call::write(tool)? else {
            self.tell("Error: call_cut_off: the call was too long and was not made")?;
            return Ok(false);
        };
        let call = (name.to_owned(), arguments);
        if self.made.contains(&call) {
            log::info(&format!("{name} was not called again with the same arguments"));
            self.tell("Error: repeated_call: this call was made before; its result is above")?;
            return Ok(false);
        }
        let result = tools::call(name, &call.1.to_string());
        self.made.push(call);
        self.tell(&call::shown(&result, self.params.result_limit))?;
        match result {
            Err(error) if error.kind == ErrorKind::Cancelled => Err(error),
            Err(error) => Ok(matches!(error.kind, ErrorKind::InvalidInput | ErrorKind::NotFound)),
            Ok(_) => Ok(false),
        }
    }

    fn tell(&self, text: &str) -> Result<(), Error> {
        chat::append(Role::Tool, SegmentKind::ToolResult, Retention::Keep, text)?;
        Ok(())
    }
}

fn check_cancelled() -> Result<(), Error> {
    if session::cancelled() {
        return Err(Error::new(ErrorKind::Cancelled, "cancelled", "the turn was asked to stop"));
    }
    Ok(())
}

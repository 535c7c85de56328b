//! The order of a turn: the user's message, calls of tools, a thought about their results, the answer.

use serde_json::Value;
use tools_sdk::agent::chat::{self, Constraint, Options, Retention, Role, SegmentKind};
use tools_sdk::agent::tools::Info;
use tools_sdk::agent::{session, tools};
use tools_sdk::{Error, ErrorKind, log};

use crate::step::{Offer, Step, shown};
use crate::{Params, ToolPolicy, memory, prompt};

/// What an answer is to a model that has been writing calls: anything that does not begin as one.
const WORDS: &str = r"[^\s{}<`\[](.|\n)*";

/// Runs a turn to its answer.
pub(crate) fn run(message: &str, params: &Params) -> Result<(), Error> {
    chat::append(Role::User, SegmentKind::User, Retention::Keep, message)?;
    let tools = if params.tool_policy == ToolPolicy::Never { Vec::new() } else { tools::list() };
    let mut answer =
        Options { temperature: params.temperature, ..Options::new(SegmentKind::Answer, params.max_tokens) };
    if !tools.is_empty() {
        let named = if params.named_first { prompt::named(message, &tools) } else { Vec::new() };
        let mut calls = Calls { params, tools: &tools, named, made: 0, gave: Vec::new(), failed: Vec::new() };
        calls.run()?;
        if calls.made > 0 {
            think(params)?;
            chat::append(Role::User, SegmentKind::System, Retention::Keep, prompt::ANSWER)?;
        }
        answer.constraint = Constraint::Regex(WORDS.to_owned());
    }
    check_cancelled()?;
    chat::generate(&answer)?.finish()?;
    Ok(())
}

/// A sentence about the results, kept for a while only.
fn think(params: &Params) -> Result<(), Error> {
    if params.thought.is_empty() {
        return Ok(());
    }
    let options = Options {
        retention: match params.reasoning_ttl_seconds {
            0 => Retention::DropAfterTurn,
            seconds => Retention::Expire(seconds),
        },
        temperature: Some(0.0),
        prefix: params.thought.clone(),
        constraint: Constraint::Regex(prompt::THOUGHT_FORM.to_owned()),
        ..Options::new(SegmentKind::Reasoning, params.thought_tokens)
    };
    chat::generate(&options)?.finish()?;
    Ok(())
}

/// The calls of a turn.
struct Calls<'a> {
    params: &'a Params,
    tools: &'a [Info],
    /// Tools the message names.
    named: Vec<&'a str>,
    /// How many were asked for, also those that were not made.
    made: u32,
    /// Tools that gave a result, once for each.
    gave: Vec<String>,
    /// Calls of this turn that failed.
    failed: Vec<(String, Value)>,
}

impl Calls<'_> {
    /// Follows the session's plan, or the model's choices.
    fn run(&mut self) -> Result<(), Error> {
        if self.params.plan.is_empty() {
            while self.made < self.params.max_steps && self.choose()? {}
            return Ok(());
        }
        for name in &self.params.plan {
            if self.made >= self.params.max_steps {
                break;
            }
            let tools: Vec<&Info> = self.tools.iter().filter(|tool| tool.name == *name).collect();
            self.step(&tools, false)?;
        }
        Ok(())
    }

    /// Lets the model choose; whether it may go on choosing. First among the tools that the message names and that
    /// have given nothing yet, then among all that may still be called, and then it may answer.
    fn choose(&mut self) -> Result<bool, Error> {
        let gave = |tool: &Info| self.gave.iter().filter(|name| **name == tool.name).count();
        let due = |tool: &&Info| self.named.contains(&tool.name.as_str()) && gave(tool) == 0;
        let named: Vec<&Info> = self.tools.iter().filter(due).collect();
        if !named.is_empty() {
            return self.step(&named, false);
        }
        let most = self.params.calls_per_tool as usize;
        let rest: Vec<&Info> = self.tools.iter().filter(|tool| gave(tool) < most).collect();
        if rest.is_empty() { Ok(false) } else { self.step(&rest, true) }
    }

    fn step(&mut self, tools: &[&Info], answer: bool) -> Result<bool, Error> {
        check_cancelled()?;
        let offer = Offer { tools, answer, optional_arguments: self.params.optional_arguments };
        match offer.write()? {
            Step::Call { name, arguments } => self.call(&name, &arguments),
            Step::Answer => Ok(false),
            Step::CutOff => {
                log::warn("a step was cut off and is not used");
                Ok(false)
            }
        }
    }

    /// Makes a call, unless its result is there already: then the model has nothing new to ask for.
    fn call(&mut self, name: &str, arguments: &Value) -> Result<bool, Error> {
        self.made += 1;
        let call = (name.to_owned(), arguments.clone());
        if !self.params.repeat_calls && (self.failed.contains(&call) || memory::has(name, arguments)) {
            log::info(&format!("{name} is not called again with the same arguments"));
            return Ok(false);
        }
        let result = tools::call(name, &arguments.to_string());
        if let Err(error) = &result
            && error.kind == ErrorKind::Cancelled
        {
            return Err(error.clone());
        }
        let text = shown(&result, self.params.result_limit);
        chat::append(Role::Tool, SegmentKind::ToolResult, Retention::Keep, &text)?;
        if result.is_ok() {
            memory::add(name, arguments)?;
            self.gave.push(call.0);
        } else {
            // It may be tried again with other arguments, and in another turn.
            self.failed.push(call);
        }
        Ok(true)
    }
}

fn check_cancelled() -> Result<(), Error> {
    if session::cancelled() {
        return Err(Error::new(ErrorKind::Cancelled, "cancelled", "the turn was asked to stop"));
    }
    Ok(())
}

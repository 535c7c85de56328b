//! The order of a turn: the user's message, a plan, its calls, a thought about their results, the answer.

use serde_json::Value;
use tools_sdk::agent::chat::{self, Constraint, Options, Retention, Role, SegmentKind};
use tools_sdk::agent::tools::Info;
use tools_sdk::agent::{session, tools};
use tools_sdk::{Error, ErrorKind, log};

use crate::memory::Kind;
use crate::plan::{self, Task};
use crate::{Params, ToolPolicy, prompt, step};

/// What an answer is to a model that has been writing calls: anything that does not begin as one.
const WORDS: &str = r"[^\s{}<`\[](.|\n)*";

/// Runs a turn to its answer.
pub(crate) fn run(message: &str, params: &Params) -> Result<(), Error> {
    chat::append(Role::User, SegmentKind::User, Retention::Keep, message)?;
    let tools = if params.tool_policy == ToolPolicy::Never { Vec::new() } else { tools::list() };
    let mut answer =
        Options { temperature: params.temperature, ..Options::new(SegmentKind::Answer, params.max_tokens) };
    if !tools.is_empty() {
        let named = if params.named_tools { prompt::named(message, &tools) } else { Vec::new() };
        let mut calls =
            Calls { params, tools: &tools, made: 0, repeated: false, gave: Vec::new(), failed: Vec::new() };
        calls.run(&named)?;
        if calls.made > 0 {
            think(params)?;
        }
        if calls.made > 0 || calls.repeated {
            let request = prompt::answer(message);
            chat::append(Role::User, SegmentKind::System, Retention::Keep, &request)?;
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
        retention: params.reasoning_retention(),
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
    /// How many were asked for, also those that were not made.
    made: u32,
    /// Whether a task was planned whose result is in the conversation.
    repeated: bool,
    /// Tools that gave a result, once for each.
    gave: Vec<String>,
    /// Calls of this turn that failed.
    failed: Vec<(String, Value)>,
}

impl Calls<'_> {
    /// Follows the session's plan, or those the model makes: the first before any result is known, later ones,
    /// where the session allows more, when the results are.
    fn run(&mut self, named: &[&str]) -> Result<(), Error> {
        if !self.params.plan.is_empty() {
            let task = |name: &String| Task { text: String::new(), tool: name.clone() };
            return self.follow(&self.params.plan.iter().map(task).collect::<Vec<_>>());
        }
        for number in 0..self.params.plans {
            check_cancelled()?;
            let plan = self.plan(if number == 0 { named } else { &[] })?;
            if plan.is_empty() {
                break;
            }
            self.follow(&plan)?;
        }
        Ok(())
    }

    /// Lets the model plan with what may still be called. No tool is in the plan more often than that, and no task a
    /// second time: a small model that repeats a task tries it with every tool there is, or copies its last plan.
    /// The tools that the message names are in it.
    fn plan(&mut self, named: &[&str]) -> Result<Vec<Task>, Error> {
        let most = self.params.calls_per_tool as usize;
        let left = |name: &str| most.saturating_sub(self.gave.iter().filter(|gave| *gave == name).count());
        let names = self.tools.iter().map(|tool| tool.name.as_str());
        let open: Vec<&str> = names.filter(|name| left(name) > 0).collect();
        let steps = self.params.max_steps.saturating_sub(self.made);
        if steps == 0 || open.is_empty() {
            return Ok(Vec::new());
        }
        let (mut plan, mut repeated): (Vec<Task>, bool) = (Vec::new(), false);
        let of = |plan: &[Task], name: &str| plan.iter().filter(|task| task.tool == name).count();
        for task in plan::write(&open, steps, self.params)? {
            let done = !self.params.repeat_calls && Kind::Tasks.has(&task.tool, &task.text);
            repeated |= done;
            let planned = plan.iter().any(|planned| planned.text == task.text);
            if !done && !planned && of(&plan, &task.tool) < left(&task.tool) {
                plan.push(task);
            }
        }
        for name in named {
            if of(&plan, name) == 0 {
                plan.push(Task { text: String::new(), tool: (*name).to_owned() });
            }
        }
        self.repeated |= repeated;
        Ok(plan)
    }

    /// Does the tasks in order: each calls its tool until it gave a result or the model has no other arguments.
    fn follow(&mut self, plan: &[Task]) -> Result<(), Error> {
        for task in plan {
            let Some(tool) = self.tools.iter().find(|tool| tool.name == task.tool) else { continue };
            let given = self.gave.len();
            while self.made < self.params.max_steps
                && self.gave.len() == given
                && self.step(tool, &task.text)?
            {}
            if self.gave.len() > given && !task.text.is_empty() {
                Kind::Tasks.add(&task.tool, &task.text)?;
            }
        }
        Ok(())
    }

    /// One call of `tool`; whether it was made.
    fn step(&mut self, tool: &Info, task: &str) -> Result<bool, Error> {
        check_cancelled()?;
        match step::write(tool, task, self.params.optional_arguments)? {
            Some(arguments) => self.call(&tool.name, &arguments),
            None => {
                log::warn("a step was cut off and is not used");
                Ok(false)
            }
        }
    }

    /// Makes a call, unless its result is there already: then the model has nothing new to ask for. Whether it was
    /// made.
    fn call(&mut self, name: &str, arguments: &Value) -> Result<bool, Error> {
        self.made += 1;
        let call = (name.to_owned(), arguments.clone());
        if !self.params.repeat_calls
            && (self.failed.contains(&call) || Kind::Calls.has(name, &arguments.to_string()))
        {
            log::info(&format!("{name} is not called again with the same arguments"));
            return Ok(false);
        }
        let result = tools::call(name, &arguments.to_string());
        if let Err(error) = &result
            && error.kind == ErrorKind::Cancelled
        {
            return Err(error.clone());
        }
        let text = step::shown(&result, self.params.result_limit);
        chat::append(Role::Tool, SegmentKind::ToolResult, Retention::Keep, &text)?;
        if result.is_ok() {
            Kind::Calls.add(name, &arguments.to_string())?;
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

//! The agent `assistant`: it plans which tools a request needs, calls them one by one, and answers.
//!
//! It is made for models that are too small to be trusted with the form of a call or with knowing when to stop.
//! Plan and calls are written under JSON Schemas, so that what comes back can be used. The model chooses the tools,
//! their order and their arguments; the agent decides what may be chosen: the tools the message names at least, each
//! tool as often as `calls_per_tool` says, no call whose result is still in view, at most `max_steps` calls a turn.
//!
//! `prompt` says what the model is told, `plan` and `step` what it may write, `turn` in which order, `memory` what
//! was called before.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod memory;
mod plan;
mod prompt;
mod step;
mod turn;

use tools_sdk::prelude::*;

/// When tools are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
#[expect(missing_docs, reason = "documented variants would make the schema a list of alternatives")]
pub enum ToolPolicy {
    #[default]
    Auto,
    Never,
}

/// Parameters of a session; all have defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Params {
    /// Who the assistant is and how it answers, in front of what it is told of its tools.
    pub instructions: String,
    /// "auto" lets the model choose tools, "never" only answers.
    pub tool_policy: ToolPolicy,
    /// Tools to call in each turn, in this order, instead of letting the model plan.
    pub plan: Vec<String>,
    /// Most plans of the model in one turn: with more than one it sees the results and may plan further calls. Small
    /// models find more to call than was asked for.
    #[schemars(range(min = 1, max = 32))]
    pub plans: u32,
    /// Most calls of tools in one turn.
    #[schemars(range(min = 1, max = 32))]
    pub max_steps: u32,
    /// Whether the tools that a message names are called also where the plan forgets them. Small models do.
    pub named_tools: bool,
    /// Most tokens of an answer.
    #[schemars(range(min = 1, max = 16_384))]
    pub max_tokens: u32,
    /// Most characters of a tool's result that the model is shown.
    #[schemars(range(min = 100, max = 100_000))]
    pub result_limit: u32,
    /// Whether the model may fill in arguments that a tool does not require. Small models fill in too much.
    pub optional_arguments: bool,
    /// Most calls of the same tool in one turn that gave a result. Small models repeat themselves.
    #[schemars(range(min = 1, max = 32))]
    pub calls_per_tool: u32,
    /// Whether a call may be made again whose result is in the conversation.
    pub repeat_calls: bool,
    /// How the model's thought about the results begins; empty is no thought.
    pub thought: String,
    /// Most tokens of a thought.
    #[schemars(range(min = 1, max = 4_096))]
    pub thought_tokens: u32,
    /// How long plans and thoughts are kept; 0 drops them after the turn.
    pub reasoning_ttl_seconds: u64,
    /// Temperature of answers; calls are always greedy. Left out, the session's default.
    pub temperature: Option<f32>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            instructions: String::new(),
            tool_policy: ToolPolicy::Auto,
            plan: Vec::new(),
            plans: 1,
            max_steps: 6,
            named_tools: true,
            max_tokens: 256,
            result_limit: 2_000,
            optional_arguments: false,
            calls_per_tool: 3,
            repeat_calls: false,
            thought: prompt::THOUGHT.to_owned(),
            thought_tokens: 48,
            reasoning_ttl_seconds: 3_600,
            temperature: None,
        }
    }
}

/// The agent.
#[derive(Debug)]
pub struct Assistant;

/// Plans which tools a request needs, calls them one by one, and answers.
#[agent(name = "assistant")]
impl Assistant {
    /// Checks the parameters and tells the model what it is.
    fn start(params: Params) -> Result<(), AgentError> {
        let tools = tools::list();
        params.check(&tools)?;
        let text = prompt::system(&params, &tools);
        chat::append(chat::Role::System, chat::SegmentKind::System, chat::Retention::Keep, &text)?;
        Ok(())
    }

    /// One turn.
    fn on_event(event: Event, params: Params) -> Result<(), AgentError> {
        let Event::UserMessage(text) = event;
        turn::run(&text, &params)
    }
}

impl Params {
    /// How long plans and thoughts are kept.
    fn reasoning_retention(&self) -> chat::Retention {
        match self.reasoning_ttl_seconds {
            0 => chat::Retention::DropAfterTurn,
            seconds => chat::Retention::Expire(seconds),
        }
    }

    fn check(&self, tools: &[tools::Info]) -> Result<(), AgentError> {
        let within = |name: &str, value: u32, least: u32, most: u32| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            let message = format!("{name} is {value}; it is from {least} to {most}");
            Err(AgentError::invalid_input("parameter_out_of_range", message))
        };
        within("max_steps", self.max_steps, 1, 32)?;
        within("plans", self.plans, 1, 32)?;
        within("calls_per_tool", self.calls_per_tool, 1, 32)?;
        within("max_tokens", self.max_tokens, 1, 16_384)?;
        within("result_limit", self.result_limit, 100, 100_000)?;
        within("thought_tokens", self.thought_tokens, 1, 4_096)?;
        if tools.iter().any(|tool| tool.name == prompt::NO_TOOL) {
            let message = format!(
                "a tool is called {}, which in a plan stands for what needs no tool: give it another name",
                prompt::NO_TOOL
            );
            return Err(AgentError::invalid_input("tool_name_taken", message));
        }
        match self.plan.iter().find(|name| !tools.iter().any(|tool| tool.name == **name)) {
            Some(name) => {
                let message = format!("the plan names the tool {name}, which this session may not call");
                Err(AgentError::invalid_input("unknown_tool", message))
            }
            None => Ok(()),
        }
    }
}

//! An application with the runtime inside: it adds a tool of its own, runs two sessions, moves one out of
//! memory and continues it.
//!
//! `cargo run --example embedded [MODEL] [DIR]`: MODEL is an alias, a .gguf file or a checkpoint's directory
//! (default `smollm2-135m`); DIR holds guests. With the guest `assistant` in it the tool is offered to that agent.

#![expect(clippy::print_stdout, reason = "an example speaks on the terminal")]

use std::path::PathBuf;
use std::sync::Arc;

use session_runtime::agent::{NativeTool, ToolContext, ToolInfo};
use session_runtime::session::spec::{SessionSpec, TurnRequest};
use session_runtime::session::tool::{Effect, ToolFailure};
use session_runtime::session::view::TurnView;
use session_runtime::{Config, Error, Runtime};

/// A tool that is plain Rust: it knows how many of a thing the shop has.
struct Stock;

#[async_trait::async_trait]
impl NativeTool for Stock {
    fn info(&self) -> ToolInfo {
        let mut info = ToolInfo::native("stock", "How many pieces of an article are in stock.", Effect::Read);
        info.input_schema = serde_json::json!({
            "type": "object",
            "properties": {"article": {"type": "string", "description": "Name of the article"}},
            "required": ["article"],
        });
        info
    }

    async fn call(&self, input: &str, _: ToolContext) -> Result<String, ToolFailure> {
        let input: serde_json::Value = serde_json::from_str(input).unwrap_or_default();
        let pieces = match input["article"].as_str() {
            Some("lamp") => 12,
            Some("chair") => 3,
            _ => 0,
        };
        Ok(format!("{pieces} pieces"))
    }
}

async fn ask(runtime: &Runtime, session: &str, input: &str) -> Result<TurnView, Error> {
    let request = TurnRequest { input: input.to_owned(), max_tokens: Some(48), ..TurnRequest::default() };
    let turn = runtime.start_turn(session, request).await?;
    runtime.wait_turn(session, &turn.id).await
}

fn show(who: &str, turn: &TurnView) {
    println!("{who}: {}", turn.output_text.trim());
    println!(
        "    {} tokens read, {} of them from KV that was there; {} written",
        turn.usage.input_tokens, turn.usage.cached_tokens, turn.usage.output_tokens
    );
    for restore in &turn.restores {
        println!("    kv restored: {}", restore.summary());
    }
    if let Some(error) = &turn.error {
        println!("    {}: {}", error.code, error.message);
    }
}

async fn run(config: Config) -> Result<(), Error> {
    let runtime = Runtime::open(config).await?;
    let info = runtime.info().await?;
    println!("{} on {}", info.model.alias, info.backend);

    runtime.register_tool(Arc::new(Stock))?;
    let assistant = runtime.agents().iter().any(|agent| agent.name == "assistant" && agent.error.is_none());
    let (agent, tools) = match assistant {
        true => (Some("assistant".to_owned()), vec!["stock".to_owned()]),
        false => (None, Vec::new()),
    };
    let shop = runtime.create_session(SessionSpec { agent, tools, ..SessionSpec::default() }).await?.id;
    let instructions = Some("You answer in one short sentence.".to_owned());
    let travel = runtime.create_session(SessionSpec { instructions, ..SessionSpec::default() }).await?.id;

    show("shop", &ask(&runtime, &shop, "How many pieces of the article lamp are in stock?").await?);
    show("travel", &ask(&runtime, &travel, "Name one sight of Paris.").await?);

    let moved = runtime.evict(&travel).await?;
    println!("travel: kv {} -> {}, {} tokens", moved.from.as_str(), moved.to.as_str(), moved.tokens);
    show("travel", &ask(&runtime, &travel, "And one of Rome?").await?);

    runtime.delete_session(&shop).await?;
    runtime.delete_session(&travel).await?;
    runtime.shutdown().await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let data_dir = std::env::temp_dir().join(format!("session-runtime-embedded-{}", std::process::id()));
    let config = Config {
        data_dir: data_dir.clone(),
        model: arguments.next().unwrap_or_else(|| "smollm2-135m".to_owned()),
        guests: arguments.next().map(PathBuf::from).into_iter().collect(),
        device_budget_bytes: 256 << 20,
        ..Config::default()
    };
    let outcome = run(config).await;
    std::fs::remove_dir_all(&data_dir)?;
    Ok(outcome?)
}

//! `session-runtime run`: one turn of a session, shown as it happens.

use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use clap::Args;
use serde_json::{Map, Value, json};
use tokio::runtime::Handle;

use super::client::{Client, Events, member};
use super::connect::with_connection;
use super::failure::{Failure, Outcome};
use super::options::Options;
use super::render::Screen;
use super::serve::directory;
use super::terminal::print_line;
use crate::kv::codec::KvCodec;
use crate::kv::reuse::KvReuse;

/// Most bytes of a prompt read from standard input.
const PROMPT_LIMIT: u64 = 4 * 1024 * 1024;

/// Options of `run`.
#[derive(Args, Debug)]
pub(super) struct Run {
    /// Tenant that the new session's KV counts for
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Agent of the new session; without one the session is a plain chat
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Tool the new session may call; may be repeated
    #[arg(long = "tool", value_name = "NAME")]
    tools: Vec<String>,
    /// Directory that tools may read, by a name of your choice; may be repeated. A running server allows only those
    /// below one of its --grant-root directories
    #[arg(long = "grant", value_name = "NAME=DIR", value_parser = grant)]
    grants: Vec<(String, String)>,
    /// Parameter of the agent; the value is JSON, or else text; may be repeated
    #[arg(long = "param", value_name = "KEY=VALUE", value_parser = param)]
    params: Vec<(String, Value)>,
    /// System message of a plain chat
    #[arg(long, value_name = "TEXT")]
    instructions: Option<String>,
    /// Title of the new session
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
    /// How the new session's KV is packed once it leaves the device: raw, lossless, int8 or int4. The last two do not continue
    /// exactly
    #[arg(long, value_name = "NAME")]
    kv_codec: Option<KvCodec>,
    /// Whether the new session takes KV near what would be computed, where that saves computing it: exact or approximate. With
    /// approximate, what follows a segment that expires keeps its KV
    #[arg(long, value_name = "NAME")]
    kv_reuse: Option<KvReuse>,
    /// Continues this session
    #[arg(long, value_name = "ID")]
    #[arg(conflicts_with_all = ["tenant", "agent", "tools", "grants", "params", "instructions", "title", "kv_codec", "kv_reuse"])]
    session: Option<String>,
    /// Most tokens of one message of the model
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// 0 is greedy
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Seed of the sampling
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Waits for the session's running turn instead of failing
    #[arg(long)]
    enqueue: bool,
    /// Prints the finished turn as JSON and nothing else
    #[arg(long)]
    json: bool,
    /// What to say; read from standard input when absent or `-`
    prompt: Option<String>,
}

fn grant(text: &str) -> Result<(String, String), String> {
    let (name, dir) = text.split_once('=').ok_or("write NAME=DIR, such as notes=./notes")?;
    let path =
        directory(dir)?.into_os_string().into_string().map_err(|_| format!("{dir} is not valid UTF-8"))?;
    Ok((name.to_owned(), path))
}

fn param(text: &str) -> Result<(String, Value), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, such as max_steps=4")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
    Ok((key.to_owned(), value))
}

impl Run {
    pub(super) fn run(&self, options: &Options, handle: &Handle) -> Outcome {
        let prompt = self.prompt()?;
        let granted: Vec<PathBuf> = self.grants.iter().map(|(_, path)| path.into()).collect();
        with_connection(options, handle, &granted, |client| {
            let session = self.session(client)?;
            let turn = self.turn(client, handle, &session, prompt)?;
            let view = client.get(&format!("/v1/sessions/{session}/turns/{turn}"))?;
            if self.json {
                print_line(format_args!("{view:#}"))?;
            }
            ended(&session, &view)
        })
    }

    fn prompt(&self) -> Outcome<String> {
        let empty = || Failure::usage("the prompt is empty: say something, or pipe it in");
        if let Some(prompt) = self.prompt.as_ref().filter(|prompt| *prompt != "-") {
            return if prompt.trim().is_empty() { Err(empty()) } else { Ok(prompt.clone()) };
        }
        let stdin = std::io::stdin();
        if self.prompt.is_none() && stdin.is_terminal() {
            return Err(Failure::usage("there is no prompt: add it as the last argument, or pipe it in"));
        }
        let mut text = String::new();
        let read = stdin.lock().take(PROMPT_LIMIT).read_to_string(&mut text);
        read.map_err(|error| Failure::new(format!("the prompt could not be read: {error}")))?;
        if text.trim().is_empty() {
            return Err(empty());
        }
        Ok(text)
    }

    /// The session to use: a new one unless one is named.
    fn session(&self, client: &Client) -> Outcome<String> {
        if let Some(id) = &self.session {
            return Ok(member(id)?.to_owned());
        }
        let grants: Vec<Value> =
            self.grants.iter().map(|(name, path)| json!({"name": name, "path": path})).collect();
        let params: Map<String, Value> = self.params.iter().cloned().collect();
        let mut body = json!({"tools": self.tools, "grants": grants, "params": params});
        for (name, value) in [
            ("tenant", &self.tenant),
            ("agent", &self.agent),
            ("instructions", &self.instructions),
            ("title", &self.title),
        ] {
            if let Some(value) = value {
                body[name] = value.clone().into();
            }
        }
        if let Some(codec) = self.kv_codec {
            body["kv_codec"] = json!(codec);
        }
        if let Some(reuse) = self.kv_reuse {
            body["kv_reuse"] = json!(reuse);
        }
        let session = client.post("/v1/sessions", &body)?;
        session["id"].as_str().map(str::to_owned).ok_or_else(|| Failure::new("the server made no session"))
    }

    /// Runs the turn and shows it; gives back the turn's id.
    fn turn(&self, client: &Client, handle: &Handle, session: &str, prompt: String) -> Outcome<String> {
        let mut body = json!({"input": prompt, "stream": true});
        if self.enqueue {
            body["on_busy"] = "enqueue".into();
        }
        if let Some(limit) = self.max_tokens {
            body["max_tokens"] = limit.into();
        }
        if let Some(temperature) = self.temperature {
            body["temperature"] = f64::from(temperature).into();
        }
        if let Some(seed) = self.seed {
            body["seed"] = seed.into();
        }
        let running = Arc::new(Mutex::new(None));
        let watcher = cancel_on_interrupt(client, handle, session, &running);
        let outcome = match client.post_events(&format!("/v1/sessions/{session}/turns"), &body) {
            Ok(events) => {
                if !self.json {
                    eprintln!("session {session}");
                }
                self.follow(events, session, &running)
            }
            Err(refused) => {
                // A session made for a turn that was refused is of no use.
                if self.session.is_none()
                    && let Err(failure) = client.delete(&format!("/v1/sessions/{session}"))
                {
                    eprintln!("session {session} is left behind: {failure}");
                }
                Err(refused)
            }
        };
        watcher.abort();
        outcome
    }

    fn follow(&self, mut events: Events, session: &str, running: &Mutex<Option<String>>) -> Outcome<String> {
        let mut screen = if self.json { Screen::silent() } else { Screen::terminal() };
        let mut turn = String::new();
        loop {
            let frame = events.next_frame().map_err(|error| cut_off(session, &error.to_string()))?;
            let Some(frame) = frame else { return Err(cut_off(session, "the server closed it")) };
            let event: Value = serde_json::from_str(&frame.data).map_err(|error| {
                Failure::new(format!("the server sent an event that is not JSON: {error}"))
            })?;
            if frame.event == "error" {
                return Err(Failure::new(event["detail"].as_str().unwrap_or("the server failed")));
            }
            if let Some(id) = event["data"]["turn"].as_str().filter(|_| turn.is_empty()) {
                id.clone_into(&mut turn);
                if let Ok(mut running) = running.lock() {
                    *running = Some(turn.clone());
                }
            }
            screen.show(&event);
            if frame.event == "turn.finished" {
                return Ok(turn);
            }
        }
    }
}

fn cut_off(session: &str, why: &str) -> Failure {
    Failure::new(format!(
        "the stream of the turn ended early ({why}); the turn goes on when the server does: see \
         `session-runtime sessions events {session}`"
    ))
}

/// The first Ctrl-C cancels the turn, so that the session stays usable; a second one ends the program.
fn cancel_on_interrupt(
    client: &Client,
    handle: &Handle,
    session: &str,
    running: &Arc<Mutex<Option<String>>>,
) -> tokio::task::JoinHandle<()> {
    let (client, session, running) = (client.clone(), session.to_owned(), Arc::clone(running));
    handle.spawn(async move {
        if tokio::signal::ctrl_c().await.is_err() {
            return;
        }
        let turn = running.lock().ok().and_then(|turn| turn.clone());
        let Some(turn) = turn else { std::process::exit(1) };
        eprintln!("\ncancelling the turn (Ctrl-C again ends the program)");
        let path = format!("/v1/sessions/{session}/turns/{turn}/cancel");
        let cancelled = tokio::task::spawn_blocking(move || client.post(&path, &json!({})));
        if let Ok(Err(failure)) = cancelled.await {
            eprintln!("error: {failure}");
        }
        if tokio::signal::ctrl_c().await.is_ok() {
            std::process::exit(1);
        }
    })
}

/// Whether the turn ended well.
fn ended(session: &str, turn: &Value) -> Outcome {
    let status = turn["status"].as_str().unwrap_or_default();
    if status == "completed" {
        return Ok(());
    }
    let why = turn["error"]["message"].as_str().unwrap_or("it was stopped");
    let status = status.replace('_', " ");
    Err(Failure::new(format!(
        "the turn is {status}: {why}; go on with `session-runtime run --session {session} ...`"
    )))
}

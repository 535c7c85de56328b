//! `session-runtime sessions`: list, show, evict, restore, fork, delete, and read the log.

use clap::Subcommand;
use serde_json::{Value, json};
use tokio::runtime::Handle;

use super::bytes::Bytes;
use super::client::{Client, member};
use super::connect::with_connection;
use super::failure::{Failure, Outcome};
use super::options::Options;
use super::render::shortened;
use super::table::Table;
use super::terminal::{print, print_line};
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;

/// Commands on sessions.
#[derive(Subcommand, Debug)]
pub(super) enum Sessions {
    /// Lists the sessions, newest first
    Ls {
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
    /// Shows a session with its turns and segments
    Show {
        /// Id of the session
        id: String,
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
    /// Moves a session's KV from memory to disk
    Evict {
        /// Id of the session
        id: String,
    },
    /// Brings a session's KV back and reports how
    Restore {
        /// Id of the session
        id: String,
        /// planned, load, recompute, alternate or cut:N
        #[arg(long, default_value = "planned")]
        mode: RestoreMode,
        /// Also prints the plan, with its predicted and its real time
        #[arg(long)]
        explain: bool,
    },
    /// Makes a session that continues from the same history
    Fork {
        /// Id of the session
        id: String,
        /// Id of the new session
        #[arg(long, value_name = "ID")]
        new_id: Option<String>,
        /// Title of the new session
        #[arg(long, value_name = "TEXT")]
        title: Option<String>,
    },
    /// Deletes sessions with their history, KV and log
    Rm {
        /// Ids of the sessions
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Prints a session's log
    Events {
        /// Id of the session
        id: String,
        /// Only events after this one
        #[arg(long, value_name = "SEQ", default_value_t = 0)]
        after: u64,
        /// Waits for further events
        #[arg(long)]
        follow: bool,
        /// Prints one JSON object a line
        #[arg(long)]
        json: bool,
    },
}

impl Sessions {
    pub(super) fn run(&self, options: &Options, handle: &Handle) -> Outcome {
        with_connection(options, handle, &[], |client| match self {
            Self::Ls { json } => list(client, *json),
            Self::Show { id, json } => show(client, member(id)?, *json),
            Self::Evict { id } => evict(client, member(id)?),
            Self::Restore { id, mode, explain } => restore(client, member(id)?, *mode, *explain),
            Self::Fork { id, new_id, title } => {
                fork(client, member(id)?, new_id.as_deref(), title.as_deref())
            }
            Self::Rm { ids } => remove(client, ids),
            Self::Events { id, after, follow, json } => events(client, member(id)?, *after, *follow, *json),
        })
    }
}

/// The member of `value` at a path such as `kv.state`, as text.
fn text(value: &Value, path: &str) -> String {
    let pointer = format!("/{}", path.replace('.', "/"));
    match value.pointer(&pointer) {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// Every item of a paged list.
fn pages(client: &Client, path: &str) -> Outcome<Vec<Value>> {
    let mut items = Vec::new();
    let mut after = String::new();
    loop {
        let mut page = client.get(&format!("{path}&limit=1000{after}"))?;
        let more = page["has_more"].as_bool().unwrap_or(false);
        after = format!("&after={}", text(&page, "last_id"));
        match page["data"].take() {
            Value::Array(data) if !data.is_empty() => items.extend(data),
            _ => return Ok(items),
        }
        if !more {
            return Ok(items);
        }
    }
}

fn list(client: &Client, json: bool) -> Outcome {
    let sessions = pages(client, "/v1/sessions?order=desc")?;
    if json {
        return print_line(format_args!("{:#}", Value::Array(sessions)));
    }
    if sessions.is_empty() {
        eprintln!("no sessions yet: `session-runtime run \"hello\"` makes one");
        return Ok(());
    }
    let mut table = Table::new(&[
        "SESSION", "STATUS", "KV", "TOKENS", "RESIDENT", "HOST", "SAVED", "TURNS", "AGENT", "TITLE",
    ]);
    for session in &sessions {
        let columns = [
            "id",
            "status",
            "kv.state",
            "tokens",
            "kv.resident_tokens",
            "kv.host_tokens",
            "kv.saved_tokens",
            "turns",
            "spec.agent",
            "spec.title",
        ];
        table.row(columns.map(|column| shortened(&text(session, column))));
    }
    print(table.render())
}

fn show(client: &Client, id: &str, json: bool) -> Outcome {
    let session = client.get(&format!("/v1/sessions/{id}"))?;
    let turns = client.get(&format!("/v1/sessions/{id}/turns"))?;
    let segments = client.get(&format!("/v1/sessions/{id}/segments"))?;
    if json {
        let all = json!({"session": session, "turns": turns["data"], "segments": segments["data"]});
        return print_line(format_args!("{:#}", all));
    }
    let bytes = Bytes(session["kv"]["device_bytes"].as_u64().unwrap_or(0));
    let in_host = Bytes(session["kv"]["host_bytes"].as_u64().unwrap_or(0));
    print_line(format_args!("session   {}", text(&session, "id")))?;
    print_line(format_args!("status    {}", text(&session, "status")))?;
    print_line(format_args!("model     {}", text(&session, "model")))?;
    print_line(format_args!("tenant    {}", text(&session, "spec.tenant")))?;
    print_line(format_args!("agent     {}", text(&session, "spec.agent")))?;
    print_line(format_args!("tools     {}", text(&session, "spec.tools")))?;
    print_line(format_args!("parent    {}", text(&session, "parent")))?;
    print_line(format_args!(
        "kv        {}: {} tokens, {} on the device ({bytes}), {} in host memory ({in_host}), {} on disk",
        text(&session, "kv.state"),
        text(&session, "tokens"),
        text(&session, "kv.resident_tokens"),
        text(&session, "kv.host_tokens"),
        text(&session, "kv.saved_tokens")
    ))?;
    print_line(format_args!(
        "usage     {} tokens read ({} reused), {} written",
        text(&session, "usage.input_tokens"),
        text(&session, "usage.cached_tokens"),
        text(&session, "usage.output_tokens")
    ))?;
    let mut table = Table::new(&["TURN", "STATUS", "ANSWER"]);
    for turn in turns["data"].as_array().into_iter().flatten() {
        table.row([text(turn, "number"), text(turn, "status"), excerpt(&text(turn, "output_text"))]);
    }
    print(format_args!("\n{}", table.render()))?;
    let mut table = Table::new(&["SEGMENT", "TOKENS", "KIND", "RETENTION", "TEXT"]);
    for segment in segments["data"].as_array().into_iter().flatten() {
        let range = format!("{}..{}", text(segment, "start"), text(segment, "end"));
        let retention = text(segment, "retention.policy");
        table.row([
            text(segment, "id"),
            range,
            text(segment, "kind"),
            retention,
            excerpt(&text(segment, "text")),
        ]);
    }
    print(format_args!("\n{}", table.render()))
}

/// The beginning of a text.
fn excerpt(text: &str) -> String {
    let line = shortened(text);
    if line.chars().count() <= 60 {
        line
    } else {
        format!("{}...", line.chars().take(57).collect::<String>())
    }
}

fn evict(client: &Client, id: &str) -> Outcome {
    let done = client.post(&format!("/v1/sessions/{id}/kv/evict"), &json!({}))?;
    if done["from"] == done["to"] {
        return print_line(format_args!(
            "kv {} already: {} tokens saved",
            text(&done, "to"),
            text(&done, "tokens")
        ));
    }
    let bytes = Bytes(done["bytes"].as_u64().unwrap_or(0));
    let ms = done["ms"].as_f64().unwrap_or(0.0);
    print_line(format_args!(
        "kv {} -> {}: {} tokens, {bytes}, {ms:.0} ms",
        text(&done, "from"),
        text(&done, "to"),
        text(&done, "tokens")
    ))
}

fn restore(client: &Client, id: &str, mode: RestoreMode, explain: bool) -> Outcome {
    let done = client.post(&format!("/v1/sessions/{id}/kv/restore"), &json!({"mode": mode.to_string()}))?;
    let report: RestoreReport = serde_json::from_value(done)
        .map_err(|error| Failure::new(format!("the server's report could not be read: {error}")))?;
    print_line(format_args!("kv restored: {}", report.summary()))?;
    if explain { print_line(report.explain()) } else { Ok(()) }
}

fn fork(client: &Client, id: &str, new_id: Option<&str>, title: Option<&str>) -> Outcome {
    let forked = client.post(&format!("/v1/sessions/{id}/fork"), &json!({"id": new_id, "title": title}))?;
    print_line(format_args!("{}", text(&forked, "id")))
}

fn remove(client: &Client, ids: &[String]) -> Outcome {
    for id in ids {
        client.delete(&format!("/v1/sessions/{}", member(id)?))?;
        print_line(format_args!("deleted {id}"))?;
    }
    Ok(())
}

fn events(client: &Client, id: &str, after: u64, follow: bool, json: bool) -> Outcome {
    if !follow {
        let mut after = after;
        loop {
            let page = client.get(&format!("/v1/sessions/{id}/events?limit=1000&after={after}"))?;
            for event in page["data"].as_array().into_iter().flatten() {
                print_event(event, json)?;
                after = event["seq"].as_u64().unwrap_or(after);
            }
            if !page["has_more"].as_bool().unwrap_or(false) {
                return Ok(());
            }
        }
    }
    let mut stream = client.get_events(&format!("/v1/sessions/{id}/events?after={after}"))?;
    let lost = |error: std::io::Error| Failure::new(format!("the stream ended early: {error}"));
    while let Some(frame) = stream.next_frame().map_err(lost)? {
        match serde_json::from_str::<Value>(&frame.data) {
            Ok(event) => print_event(&event, json)?,
            Err(error) => {
                return Err(Failure::new(format!("the server sent an event that is not JSON: {error}")));
            }
        }
    }
    Ok(())
}

fn print_event(event: &Value, json: bool) -> Outcome {
    if json {
        return print_line(event);
    }
    print_line(format_args!(
        "{:>6}  {:<20} {}",
        text(event, "seq"),
        text(event, "type"),
        shortened(&event["data"].to_string())
    ))
}

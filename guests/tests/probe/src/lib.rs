//! The agent `probe`: does what each line of the user's message says, for the host's tests to see what it is told.
//!
//! A line is a word and what it needs; see `act`. What the host answers, refusals too, becomes a line of
//! the answer, so that a replayed turn shows whether it was told the same.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

use tools_sdk::prelude::*;

/// No parameters.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Params {
    /// A text to be read back.
    pub text: String,
}

/// The agent.
#[derive(Debug)]
pub struct Probe;

/// Does what each line of a message says. Only for testing a host.
#[agent(name = "probe")]
impl Probe {
    /// Says who it is.
    fn start(_params: Params) -> Result<(), AgentError> {
        chat::append(chat::Role::System, chat::SegmentKind::System, chat::Retention::Keep, "You are brief.")?;
        Ok(())
    }

    /// One turn.
    fn on_event(event: Event, params: Params) -> Result<(), AgentError> {
        let Event::UserMessage(script) = event;
        let mut said = Vec::new();
        let mut last = String::new();
        for line in script.lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            let told = act(word, rest, &params, &mut last)
                .unwrap_or_else(|error| format!("refused {:?} {}", error.kind, error.code));
            said.push(format!("{word}: {told}"));
        }
        chat::append(
            chat::Role::Assistant,
            chat::SegmentKind::Answer,
            chat::Retention::Keep,
            &said.join("\n"),
        )?;
        Ok(())
    }
}

/// Does one thing. `last` is the id of the segment last made.
fn act(word: &str, rest: &str, params: &Params, last: &mut String) -> Result<String, AgentError> {
    let amount = rest.parse::<u32>().unwrap_or(0);
    let pair = rest.split_once(' ').unwrap_or((rest, ""));
    Ok(match word {
        "session" => {
            format!("{} {} {} {}", session::id(), session::turn(), session::cancelled(), params.text)
        }
        "say" => say(rest, last)?,
        "say-bytes" => say(&"x".repeat(amount as usize), last)?,
        "keep" => retain(rest, chat::Retention::Keep)?,
        "drop" => retain(if rest.is_empty() { last } else { rest }, chat::Retention::DropAfterTurn)?,
        "expire" => retain(last, chat::Retention::Expire(u64::from(amount)))?,
        "segments" => segments::list().iter().map(shown).collect::<Vec<_>>().join(", "),
        "context" => {
            let status = context::status();
            let (tokens, resident) = (status.tokens, status.resident_tokens);
            format!("{:?} {tokens} {resident} {}", status.state, status.context_length)
        }
        "restore" => context::last_restore().map_or_else(
            || "none".to_owned(),
            |report| {
                let tiers = [report.from_host, report.from_disk]
                    .map(|tier| format!("{}/{}/{}", tier.tokens, tier.cells, tier.bytes));
                let [host, disk] = tiers;
                format!(
                    "{} = {} + {} + {} + {}; host {host} disk {disk}; cells {} {} {}",
                    report.tokens,
                    report.tokens_resident,
                    report.tokens_loaded,
                    report.tokens_mixed,
                    report.tokens_recomputed,
                    report.cells_loaded,
                    report.cells_recomputed,
                    report.cells_refused
                )
            },
        ),
        "set" => state::set(pair.0, pair.1).map(|()| "done".to_owned())?,
        "get" => state::get(rest).unwrap_or_else(|| "nothing".to_owned()),
        "delete" => {
            state::delete(rest);
            "done".to_owned()
        }
        "random" => random::get_u64().to_string(),
        "clock" => clock::now_ms().to_string(),
        "tool" => tools::call(pair.0, pair.1)?,
        "log" => {
            log::info(rest);
            "done".to_owned()
        }
        "write" => written(chat::generate(&options(amount))?.finish()?, last),
        "stream" => stream(amount, last)?,
        "leave" => leave(amount)?,
        "write-under" => {
            let constraint = chat::Constraint::JsonSchema(rest.to_owned());
            written(chat::generate(&chat::Options { constraint, ..options(64) })?.finish()?, last)
        }
        "interrupt" => interrupt(amount)?,
        _ => return Err(AgentError::invalid_input("unknown_word", word)),
    })
}

fn say(text: &str, last: &mut String) -> Result<String, AgentError> {
    let segment = chat::append(chat::Role::User, chat::SegmentKind::User, chat::Retention::Keep, text)?;
    *last = segment.id;
    Ok(format!("{}..{}", segment.start, segment.end))
}

fn retain(segment: &str, retention: chat::Retention) -> Result<String, AgentError> {
    segments::set_retention(segment, retention).map(|()| "done".to_owned())
}

fn shown(segment: &segments::Info) -> String {
    format!("{:?} {}..{} {:?}", segment.kind, segment.start, segment.end, segment.retention)
}

fn options(max_tokens: u32) -> chat::Options {
    chat::Options::new(chat::SegmentKind::Reasoning, max_tokens)
}

fn written(written: chat::Written, last: &mut String) -> String {
    let (segment, text) = (written.segment, written.text);
    *last = segment.id;
    format!("{}..{} {:?} {text:?}", segment.start, segment.end, written.finish)
}

/// Does other things between the pieces of a message: they too are on record, between its tokens.
fn stream(max_tokens: u32, last: &mut String) -> Result<String, AgentError> {
    let mut generation = chat::generate(&options(max_tokens))?;
    let (mut text, mut grown) = (String::new(), generation.segment().end);
    loop {
        match generation.next_chunk()? {
            chat::Chunk::Text(piece) => {
                clock::now_ms();
                text.push_str(&piece);
                state::set("written", &text)?;
                if generation.segment().end <= grown {
                    return Err(AgentError::failed("not_grown", "the segment has not grown by the piece"));
                }
                grown = generation.segment().end;
            }
            chat::Chunk::Done(finish) => {
                return Ok(written(chat::Written { text, finish, segment: generation.segment() }, last));
            }
        }
    }
}

/// Loses interest after the first piece; the host writes the message to its end.
fn leave(max_tokens: u32) -> Result<String, AgentError> {
    let mut generation = chat::generate(&options(max_tokens))?;
    generation.next_chunk()?;
    Ok("left".to_owned())
}

/// Tries what cannot be done while a message is written, then reads it.
fn interrupt(max_tokens: u32) -> Result<String, AgentError> {
    let mut generation = chat::generate(&options(max_tokens))?;
    let code = |error: Option<AgentError>| error.map_or_else(|| "allowed".to_owned(), |error| error.code);
    let second = code(chat::generate(&options(1)).err());
    let append = code(say("x", &mut String::new()).err());
    while let chat::Chunk::Text(_) = generation.next_chunk()? {}
    let after = code(generation.next_chunk().err());
    Ok(format!("{second} {append} {after}"))
}

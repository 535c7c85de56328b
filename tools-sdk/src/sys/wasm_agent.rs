//! Imports of the agent world.

use crate::Error;
use crate::agent::chat::{Chunk, Constraint, Finish, Options, Retention, Role, Segment, SegmentKind};
use crate::agent::context::{KvState, RestoreReport, Status, TierLoads};
use crate::agent::{segments, tools};
use crate::bindings::agent::session_runtime::agent as imports;

pub(crate) fn session_id() -> String {
    imports::session::id()
}

pub(crate) fn session_params() -> String {
    imports::session::params()
}

pub(crate) fn session_turn() -> u32 {
    imports::session::turn()
}

pub(crate) fn session_cancelled() -> bool {
    imports::session::cancelled()
}

/// A generation held by the host.
pub(crate) struct Generation(imports::chat::Generation);

impl Generation {
    pub(crate) fn next_chunk(&mut self) -> Result<Chunk, Error> {
        use imports::chat::Finish as From;
        Ok(match self.0.next()? {
            imports::chat::Chunk::Text(text) => Chunk::Text(text),
            imports::chat::Chunk::Done(finish) => Chunk::Done(match finish {
                From::EndOfTurn => Finish::EndOfTurn,
                From::StopString => Finish::StopString,
                From::MaxTokens => Finish::MaxTokens,
                From::ConstraintComplete => Finish::ConstraintComplete,
                From::Cancelled => Finish::Cancelled,
            }),
        })
    }

    pub(crate) fn segment(&self) -> Segment {
        segment(self.0.segment())
    }
}

pub(crate) fn chat_append(
    role: Role,
    kind: SegmentKind,
    keep: Retention,
    text: &str,
) -> Result<Segment, Error> {
    use imports::chat::Role as To;
    let role = match role {
        Role::System => To::System,
        Role::User => To::User,
        Role::Assistant => To::Assistant,
        Role::Tool => To::Tool,
    };
    Ok(segment(imports::chat::append(role, to_kind(kind), to_retention(keep), text)?))
}

pub(crate) fn chat_generate(options: &Options) -> Result<Generation, Error> {
    let options = imports::chat::Options {
        kind: to_kind(options.kind),
        retention: to_retention(options.retention),
        max_tokens: options.max_tokens,
        temperature: options.temperature,
        stop: options.stop.clone(),
        constraint: match &options.constraint {
            Constraint::None => imports::chat::Constraint::None,
            Constraint::JsonSchema(schema) => imports::chat::Constraint::JsonSchema(schema.clone()),
            Constraint::Regex(regex) => imports::chat::Constraint::Regex(regex.clone()),
        },
        prefix: options.prefix.clone(),
    };
    Ok(Generation(imports::chat::generate(&options)?))
}

pub(crate) fn context_status() -> Status {
    use imports::context::KvState as From;
    let status = imports::context::status();
    Status {
        state: match status.state {
            From::None => KvState::None,
            From::Active => KvState::Active,
            From::Idle => KvState::Idle,
            From::Evicted => KvState::Evicted,
            From::Restoring => KvState::Restoring,
            From::Restored => KvState::Restored,
            From::Stale => KvState::Stale,
            From::Lost => KvState::Lost,
        },
        tokens: status.tokens,
        resident_tokens: status.resident_tokens,
        context_length: status.context_length,
    }
}

pub(crate) fn context_last_restore() -> Option<RestoreReport> {
    imports::context::last_restore().map(|report| RestoreReport {
        tokens: report.tokens,
        tokens_resident: report.tokens_resident,
        tokens_loaded: report.tokens_loaded,
        tokens_mixed: report.tokens_mixed,
        tokens_recomputed: report.tokens_recomputed,
        cells_loaded: report.cells_loaded,
        cells_recomputed: report.cells_recomputed,
        cells_refused: report.cells_refused,
        from_host: tier_loads(report.from_host),
        from_disk: tier_loads(report.from_disk),
        milliseconds: report.milliseconds,
    })
}

fn tier_loads(loads: imports::context::TierLoads) -> TierLoads {
    TierLoads { tokens: loads.tokens, cells: loads.cells, bytes: loads.bytes }
}

pub(crate) fn segments_list() -> Vec<segments::Info> {
    use imports::chat::{Retention as FromRetention, SegmentKind as FromKind};
    imports::segments::list_segments()
        .into_iter()
        .map(|info| segments::Info {
            id: info.id,
            kind: match info.kind {
                FromKind::System => SegmentKind::System,
                FromKind::User => SegmentKind::User,
                FromKind::Reasoning => SegmentKind::Reasoning,
                FromKind::ToolCall => SegmentKind::ToolCall,
                FromKind::ToolResult => SegmentKind::ToolResult,
                FromKind::Answer => SegmentKind::Answer,
                FromKind::Summary => SegmentKind::Summary,
            },
            start: info.start,
            end: info.end,
            retention: match info.retention {
                FromRetention::Keep => Retention::Keep,
                FromRetention::DropAfterTurn => Retention::DropAfterTurn,
                FromRetention::Expire(seconds) => Retention::Expire(seconds),
            },
        })
        .collect()
}

pub(crate) fn segments_set_retention(id: &str, retention: Retention) -> Result<(), Error> {
    Ok(imports::segments::set_retention(id, to_retention(retention))?)
}

pub(crate) fn tools_list() -> Vec<tools::Info> {
    imports::tools::list_tools()
        .into_iter()
        .map(|info| tools::Info {
            name: info.name,
            description: info.description,
            input_schema: info.input_schema,
        })
        .collect()
}

pub(crate) fn tools_call(name: &str, input: &str) -> Result<String, Error> {
    Ok(imports::tools::call(name, input)?)
}

pub(crate) fn state_get(key: &str) -> Option<String> {
    imports::state::get(key)
}

pub(crate) fn state_set(key: &str, value: &str) -> Result<(), Error> {
    Ok(imports::state::set(key, value)?)
}

pub(crate) fn state_delete(key: &str) {
    imports::state::delete(key);
}

pub(crate) fn random_u64() -> u64 {
    imports::random::get_u64()
}

fn segment(segment: imports::chat::Segment) -> Segment {
    Segment { id: segment.id, start: segment.start, end: segment.end }
}

fn to_kind(kind: SegmentKind) -> imports::chat::SegmentKind {
    use imports::chat::SegmentKind as To;
    match kind {
        SegmentKind::System => To::System,
        SegmentKind::User => To::User,
        SegmentKind::Reasoning => To::Reasoning,
        SegmentKind::ToolCall => To::ToolCall,
        SegmentKind::ToolResult => To::ToolResult,
        SegmentKind::Answer => To::Answer,
        SegmentKind::Summary => To::Summary,
    }
}

fn to_retention(retention: Retention) -> imports::chat::Retention {
    use imports::chat::Retention as To;
    match retention {
        Retention::Keep => To::Keep,
        Retention::DropAfterTurn => To::DropAfterTurn,
        Retention::Expire(seconds) => To::Expire(seconds),
    }
}

//! The agent world's words and the session's words, both ways. Pure.

use super::bindings::agent::session_runtime::agent::{chat, context, types};
use crate::kv::state::KvState;
use crate::restore::report::{RestoreReport, TierLoads};
use crate::session::scope::SegmentRange;
use crate::session::spec::{ConstraintSpec, Finish, GenerateOptions, Retention, Role, Sampling, SegmentKind};
use crate::session::tool::ToolFailure;

const STOPS: usize = 16;
const STOP_BYTES: usize = 256;

/// A count as guests see it; one that does not fit is shown as the largest.
pub(super) fn count(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

pub(super) fn segment(range: &SegmentRange) -> chat::Segment {
    chat::Segment { id: range.id.clone(), start: count(range.start), end: count(range.end) }
}

pub(super) fn role(role: chat::Role) -> Role {
    match role {
        chat::Role::System => Role::System,
        chat::Role::User => Role::User,
        chat::Role::Assistant => Role::Assistant,
        chat::Role::Tool => Role::Tool,
    }
}

pub(super) fn kind(kind: chat::SegmentKind) -> SegmentKind {
    use chat::SegmentKind as K;
    match kind {
        K::System => SegmentKind::System,
        K::User => SegmentKind::User,
        K::Reasoning => SegmentKind::Reasoning,
        K::ToolCall => SegmentKind::ToolCall,
        K::ToolResult => SegmentKind::ToolResult,
        K::Answer => SegmentKind::Answer,
        K::Summary => SegmentKind::Summary,
    }
}

pub(super) fn kind_to_guest(kind: SegmentKind) -> chat::SegmentKind {
    use chat::SegmentKind as K;
    match kind {
        SegmentKind::System => K::System,
        SegmentKind::User => K::User,
        SegmentKind::Reasoning => K::Reasoning,
        SegmentKind::ToolCall => K::ToolCall,
        SegmentKind::ToolResult => K::ToolResult,
        SegmentKind::Answer => K::Answer,
        SegmentKind::Summary => K::Summary,
    }
}

pub(super) fn retention(retention: chat::Retention) -> Retention {
    match retention {
        chat::Retention::Keep => Retention::Keep,
        chat::Retention::DropAfterTurn => Retention::DropAfterTurn,
        chat::Retention::Expire(ttl_seconds) => Retention::Expire { ttl_seconds },
    }
}

pub(super) fn retention_to_guest(retention: Retention) -> chat::Retention {
    match retention {
        Retention::Keep => chat::Retention::Keep,
        Retention::DropAfterTurn => chat::Retention::DropAfterTurn,
        Retention::Expire { ttl_seconds } => chat::Retention::Expire(ttl_seconds),
    }
}

/// Options of a message. `most` is the turn's own limit on tokens.
///
/// # Errors
/// A sentence that names the field.
pub(super) fn options(options: chat::Options, most: Option<u32>) -> Result<GenerateOptions, String> {
    if options.max_tokens == 0 {
        return Err("options.max-tokens must be at least 1".to_owned());
    }
    if options.stop.len() > STOPS {
        return Err(format!("options.stop has {} texts, more than {STOPS}", options.stop.len()));
    }
    if options.stop.iter().any(|stop| stop.is_empty() || stop.len() > STOP_BYTES) {
        return Err(format!("each of options.stop must have 1 to {STOP_BYTES} bytes"));
    }
    if options.temperature.is_some_and(|temperature| !(0.0..=100.0).contains(&temperature)) {
        return Err("options.temperature must be from 0 to 100".to_owned());
    }
    Ok(GenerateOptions {
        kind: kind(options.kind),
        retention: retention(options.retention),
        max_tokens: most.map_or(options.max_tokens, |most| options.max_tokens.min(most)),
        sampling: Sampling { temperature: options.temperature, ..Sampling::default() },
        stop: options.stop,
        constraint: match options.constraint {
            chat::Constraint::None => ConstraintSpec::None,
            chat::Constraint::JsonSchema(schema) => ConstraintSpec::JsonSchema(schema),
            chat::Constraint::Regex(regex) => ConstraintSpec::Regex(regex),
        },
        prefix: options.prefix,
    })
}

pub(super) fn finish(finish: Finish) -> chat::Finish {
    match finish {
        Finish::EndOfTurn => chat::Finish::EndOfTurn,
        Finish::StopString => chat::Finish::StopString,
        Finish::MaxTokens => chat::Finish::MaxTokens,
        Finish::ConstraintComplete => chat::Finish::ConstraintComplete,
        Finish::Cancelled => chat::Finish::Cancelled,
    }
}

pub(super) fn kv_state(state: KvState) -> context::KvState {
    use context::KvState as K;
    match state {
        KvState::None => K::None,
        KvState::Active => K::Active,
        KvState::Idle => K::Idle,
        KvState::Evicted => K::Evicted,
        KvState::Restoring => K::Restoring,
        KvState::Restored => K::Restored,
        KvState::Stale => K::Stale,
        KvState::Lost => K::Lost,
    }
}

pub(super) fn restore_report(report: &RestoreReport) -> context::RestoreReport {
    context::RestoreReport {
        tokens: count(report.tokens),
        tokens_resident: count(report.tokens_resident),
        tokens_loaded: count(report.tokens_loaded),
        tokens_mixed: count(report.tokens_mixed),
        tokens_recomputed: count(report.tokens_recomputed),
        cells_loaded: count(report.cells_loaded),
        cells_recomputed: count(report.cells_recomputed),
        cells_refused: count(report.cells_refused()),
        from_host: tier_loads(&report.from_host),
        from_disk: tier_loads(&report.from_disk),
        milliseconds: report.ms,
    }
}

fn tier_loads(loads: &TierLoads) -> context::TierLoads {
    context::TierLoads { tokens: count(loads.tokens), cells: count(loads.cells), bytes: loads.bytes }
}

/// A tool's failure as the agent sees it.
pub(super) fn failure(failure: ToolFailure) -> types::Error {
    use types::ErrorKind as K;
    let kind = match failure.kind.as_str() {
        "invalid_input" => K::InvalidInput,
        "not_found" => K::NotFound,
        "denied" => K::Denied,
        "limit" => K::Limit,
        "cancelled" => K::Cancelled,
        "unavailable" => K::Unavailable,
        _ => K::Failed,
    };
    types::Error { kind, code: failure.code, message: failure.message, retryable: failure.retryable }
}

//! Schedulers of their own, for tests that cut histories anywhere or watch KV more closely than a runtime lets them.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use session_runtime::models::Tokenizer;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::scheduler::tenants::TenantQuotas;
use session_runtime::scheduler::{
    GenerationEvent, GenerationRequest, HostControl, IdlePolicyName, RestReason, Scheduler, SchedulerOptions,
    Speculation,
};

/// Saved KV is on disk and comes back from there; nothing leaves unasked.
pub fn options(context_length: usize) -> SchedulerOptions {
    SchedulerOptions {
        restore_mode: RestoreMode::Load,
        idle_policy: IdlePolicyName::default(),
        idle_ttl_ms: u64::MAX,
        context_length,
        save_when_idle: true,
        speculation: Speculation::Off,
        share_prefixes: false,
        host_budget_bytes: 0,
        host_control: HostControl::default(),
        tenants: TenantQuotas::default(),
        step_seconds: 1.0,
        trace: None,
    }
}

/// Lets a session write up to `count` tokens.
pub async fn write(
    scheduler: &Scheduler,
    tokenizer: &Arc<Tokenizer>,
    session: &Arc<str>,
    count: usize,
) -> Vec<u32> {
    let (events, mut told) = tokio::sync::mpsc::unbounded_channel();
    let tokenizer = Some(Arc::clone(tokenizer));
    let request = GenerationRequest { max_tokens: count, tokenizer, ..GenerationRequest::default() };
    scheduler.generate(session, request, events).unwrap();
    let mut written = Vec::new();
    while let Some(event) = told.recv().await {
        match event {
            GenerationEvent::Token { id, .. } => written.push(id),
            GenerationEvent::Failed(error) => panic!("{error}"),
            GenerationEvent::Started { .. } | GenerationEvent::Done { .. } => {}
        }
    }
    scheduler.rest(session, RestReason::EndOfTurn).unwrap();
    written
}

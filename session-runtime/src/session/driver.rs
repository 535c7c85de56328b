//! The seam between a session and what drives its turns.

use std::sync::Arc;

use async_trait::async_trait;

use super::scope::TurnScope;
use super::spec::{Chunk, GenerateOptions, Retention, Role, Sampling, SegmentKind, SessionSpec};
use crate::error::Error;

/// Drives the turns of a session: an agent guest, or a plain chat.
#[async_trait]
pub trait TurnDriver: Send + Sync {
    /// Runs one turn to its end and gives the scope back.
    async fn run(&self, scope: TurnScope) -> (TurnScope, Result<(), Error>);
}

/// Finds the driver of a session.
pub trait Drivers: Send + Sync {
    /// The driver for a session of this spec.
    ///
    /// # Errors
    /// The agent does not exist.
    fn driver(&self, spec: &SessionSpec) -> Result<Arc<dyn TurnDriver>, Error>;
}

/// The driver of a session without an agent: the user's message, then the model's answer.
pub struct PlainChat;

#[async_trait]
impl TurnDriver for PlainChat {
    async fn run(&self, mut scope: TurnScope) -> (TurnScope, Result<(), Error>) {
        let outcome = chat(&mut scope).await;
        (scope, outcome)
    }
}

async fn chat(scope: &mut TurnScope) -> Result<(), Error> {
    if scope.is_new()
        && let Some(text) = scope.spec().instructions.clone()
    {
        scope.append(Role::System, SegmentKind::System, Retention::Keep, &text).await?;
    }
    let request = scope.request().clone();
    scope.append(Role::User, SegmentKind::User, Retention::Keep, &request.input).await?;
    let options = GenerateOptions {
        kind: SegmentKind::Answer,
        retention: Retention::Keep,
        max_tokens: scope.max_tokens(),
        sampling: Sampling::default(),
        stop: request.stop,
        constraint: request.constraint,
        prefix: String::new(),
    };
    scope.generate(options).await?;
    while let Chunk::Text(_) = scope.next_chunk().await? {}
    Ok(())
}

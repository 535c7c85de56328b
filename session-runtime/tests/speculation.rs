//! Guessing next tokens from the history, and prompts that are read beside sessions that decode: the tokens are those of
//! a session that is alone and decodes one by one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use session_runtime::Runtime;
use session_runtime::scheduler::Speculation;
use session_runtime::session::spec::{Sampling, SessionSpec, TurnRequest};
use support::{config, create, say, story};

/// Repeats itself, so that there is something to guess.
const PROMPT: &str = "Repeat this list three times, line by line: red lamp, blue lamp, green lamp, red lamp, blue lamp, \
                      green lamp, red lamp, blue lamp, green lamp.";

/// Tokens of a session after a turn at a temperature, and how many guesses there were and were right.
async fn tokens(speculation: Speculation, temperature: f32) -> (Vec<u32>, [u64; 2]) {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path());
    config.speculation = speculation;
    let runtime = Runtime::open(config).await.unwrap();
    create(&runtime, "s").await;
    let sampling = Sampling { temperature: Some(temperature), seed: Some(11), ..Sampling::default() };
    let request =
        TurnRequest { input: PROMPT.to_owned(), max_tokens: Some(96), sampling, ..TurnRequest::default() };
    let turn = runtime.start_turn("s", request).await.unwrap();
    runtime.wait_turn("s", &turn.id).await.unwrap();
    // A second turn reads the history that guesses helped to write.
    say(&runtime, "s", "Once more.", 24).await;
    (runtime.tokens("s").await.unwrap(), runtime.info().await.unwrap().device.tokens_guessed)
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_guesses_change_no_token() {
    for temperature in [0.0, 0.7] {
        let (alone, none) = tokens(Speculation::Off, temperature).await;
        assert_eq!(none, [0, 0]);
        let (guessed, [all, right]) = tokens(Speculation::Always, temperature).await;
        assert_eq!(guessed, alone, "at temperature {temperature}");
        assert!(right > 0 && right < all, "{right} of {all} guesses were right: both kinds were to be seen");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_prompt_in_small_pieces_beside_a_decoding_session_changes_no_token() {
    let mut histories = Vec::new();
    for step_time in [Duration::from_nanos(1), Duration::from_secs(3600)] {
        let directory = tempfile::tempdir().unwrap();
        let mut config = config(directory.path());
        // With no time at all a prompt is read a page at a time; with an hour, in whole steps.
        config.step_time = step_time;
        let runtime = Runtime::open(config).await.unwrap();
        for id in ["a", "b"] {
            runtime
                .create_session(SessionSpec { id: Some(id.to_owned()), ..SessionSpec::default() })
                .await
                .unwrap();
        }
        let long = TurnRequest { input: story(1), max_tokens: Some(64), ..TurnRequest::default() };
        let short = TurnRequest { input: PROMPT.to_owned(), max_tokens: Some(64), ..TurnRequest::default() };
        let b = runtime.start_turn("b", short).await.unwrap();
        let a = runtime.start_turn("a", long).await.unwrap();
        runtime.wait_turn("a", &a.id).await.unwrap();
        runtime.wait_turn("b", &b.id).await.unwrap();
        histories.push((runtime.tokens("a").await.unwrap(), runtime.tokens("b").await.unwrap()));
    }
    assert_eq!(histories[0], histories[1]);
}

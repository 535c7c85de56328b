use store::failpoint::{FailAction, Failpoints, point};

use super::*;
use crate::kv::state::KvState;
use crate::scheduler::KvObserver;

/// Who waits for an event looks at the number of the last one that took effect, so that it must never go back.
#[tokio::test(flavor = "multi_thread")]
async fn i6_an_event_whose_writer_is_held_up_is_not_overtaken() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        model: "smollm2-135m".to_owned(),
        data_dir: directory.path().to_owned(),
        device_budget_bytes: 64 << 20,
        ..Config::default()
    };
    let points = Failpoints::default();
    let seams = Seams { failpoints: Some(points.clone()), ..Seams::default() };
    let runtime = Runtime::open_on(config, seams, Arc::new(Silent)).await.unwrap();
    let id = runtime.create_session(SessionSpec::default()).await.unwrap().id;
    let session = runtime.0.manager.get(&id).unwrap();
    let observer = JournalObserver { sessions: Arc::clone(&runtime.0.sessions) };
    let write = |tokens| {
        let (from, to) = (KvState::Idle, KvState::Evicted);
        let reason = "command".to_owned();
        observer.transition(&id, &KvTransition { from, to, reason, tokens, bytes: 0, ms: 0.0 });
    };
    let before = session.record().last_event;

    points.arm(point::JOURNAL_AFTER_APPEND, FailAction::Sleep(Duration::from_secs(1)), 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| write(1));
        while points.hits(point::JOURNAL_AFTER_APPEND) == 0 {
            std::thread::yield_now();
        }
        points.disarm_all();
        write(2);
    });
    let waited = tokio::time::timeout(Duration::from_secs(60), session.wait_events(before + 1)).await;
    waited.expect("the last event is waited for in vain").unwrap();
    assert_eq!(session.record().last_event, before + 2);
    drop(session);
    runtime.shutdown().await.unwrap();
}

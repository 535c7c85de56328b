//! Tenants over a small real model: shares and quotas of the device and of host memory, and no KV in common.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/server.rs"]
mod server;
mod support;

use serde_json::json;
use server::{TestServer, get, post};
use session_runtime::kv::state::KvState;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::scheduler::tenants::{TenantQuota, TenantQuotas};
use session_runtime::session::spec::{SessionSpec, TurnRequest};
use session_runtime::session::view::{TurnStatus, TurnView};
use session_runtime::{Config, Runtime};
use support::{SECOND, config, control, say, story};

/// Bytes of KV of a token of the model.
const TOKEN_BYTES: u64 = 2 * 3 * 64 * 2 * 30;

async fn create(runtime: &Runtime, id: &str, tenant: Option<&str>) {
    let (id, tenant) = (Some(id.to_owned()), tenant.map(str::to_owned));
    runtime.create_session(SessionSpec { id, tenant, ..SessionSpec::default() }).await.unwrap();
}

/// A quota in tokens.
fn quota(device: Option<u64>, host: Option<u64>) -> TenantQuota {
    let bytes = |tokens: Option<u64>| tokens.map(|tokens| tokens * TOKEN_BYTES);
    TenantQuota { device_bytes: bytes(device), host_bytes: bytes(host), disk_bytes: None }
}

fn quotas(quotas: &[(&str, TenantQuota)]) -> TenantQuotas {
    let named = quotas.iter().map(|(name, quota)| ((*name).to_owned(), *quota)).collect();
    TenantQuotas { named, others: TenantQuota::default() }
}

async fn is_resident(runtime: &Runtime, id: &str) -> bool {
    runtime.kv(id).await.unwrap().state.is_resident()
}

async fn attempt(runtime: &Runtime, id: &str, input: &str) -> TurnView {
    let request = TurnRequest { input: input.to_owned(), max_tokens: Some(4), ..TurnRequest::default() };
    let turn = runtime.start_turn(id, request).await.unwrap();
    runtime.wait_turn(id, &turn.id).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_who_is_above_its_share_makes_room_and_everyone_goes_on_exactly() {
    let expected = [control(1).await, control(2).await, control(3).await, control(0).await];
    let directory = tempfile::tempdir().unwrap();
    // Two sessions and a half: a share is one.
    let length = expected[0].len() as u64;
    let device_budget_bytes = length * 5 / 2 * TOKEN_BYTES;
    let runtime = Runtime::open(Config { device_budget_bytes, ..config(directory.path()) }).await.unwrap();
    let sessions = [("a-1", "a", 1), ("a-2", "a", 2), ("b-1", "b", 3), ("b-2", "b", 0)];
    for (id, tenant, salt) in sessions {
        create(&runtime, id, Some(tenant)).await;
        say(&runtime, id, &story(salt), 16).await;
        if id == "a-2" {
            assert!(is_resident(&runtime, "a-1").await, "an unused share is anyone's");
        }
    }
    let of_a = [is_resident(&runtime, "a-1").await, is_resident(&runtime, "a-2").await];
    assert!(of_a[0] != of_a[1], "b-1 took what a had above its share, and b-2 nothing more: {of_a:?}");
    assert_eq!(runtime.kv("b-1").await.unwrap().state, KvState::Evicted);
    for tenant in runtime.info().await.unwrap().tenants {
        assert_eq!(tenant.sessions, 2);
        assert!((length / 2..=length).contains(&(tenant.device_bytes / TOKEN_BYTES)), "{tenant:?}");
    }
    for ((id, ..), expected) in sessions.into_iter().zip(expected) {
        say(&runtime, id, SECOND, 24).await;
        assert_eq!(runtime.tokens(id).await.unwrap(), expected, "session {id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_bounds_its_tenant_on_both_tiers_and_touches_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    let tenants = quotas(&[("a", quota(Some(900), Some(900)))]);
    let config = Config { tenants, host_budget_bytes: 128 << 20, ..config(directory.path()) };
    let runtime = Runtime::open(config).await.unwrap();
    for (id, tenant, salt) in
        [("b-1", Some("b"), 0), ("a-1", Some("a"), 1), ("a-2", Some("a"), 2), ("none", None, 3)]
    {
        create(&runtime, id, tenant).await;
        say(&runtime, id, &story(salt), 16).await;
    }
    assert_eq!(runtime.kv("a-1").await.unwrap().state, KvState::Evicted, "of 2,900 tokens there were free");
    for id in ["b-1", "a-2", "none"] {
        assert!(is_resident(&runtime, id).await, "{id}");
        runtime.evict(id).await.unwrap();
    }
    let tenants = runtime.info().await.unwrap().tenants;
    let [nobody, a, b] = tenants.as_slice() else { panic!("{tenants:?}") };
    let names = [nobody, a, b].map(|tenant| tenant.name.as_deref());
    assert_eq!(names, [None, Some("a"), Some("b")]);
    assert_eq!(
        (a.device_quota_bytes, a.host_quota_bytes),
        (Some(900 * TOKEN_BYTES), Some(900 * TOKEN_BYTES))
    );
    assert!(a.host_bytes > 500 * TOKEN_BYTES && a.host_bytes <= 900 * TOKEN_BYTES, "{a:?}");
    for (id, tenant) in [("none", nobody), ("b-1", b)] {
        assert_eq!(tenant.host_bytes, runtime.kv(id).await.unwrap().host_bytes, "all of {id} is there");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_a_tenant_at_its_quota_of_the_disk_loses_its_own_oldest_kv_and_no_token() {
    let expected = [control(1).await, control(2).await, control(3).await];
    let directory = tempfile::tempdir().unwrap();
    // A cell of 64 tokens takes 48 KiB and a header, in whole blocks: one session and a half.
    let chunks = expected[0].len() as u64 / 64 * 3 / 2;
    let most = chunks * 30 * (52 << 10);
    let quota = TenantQuota { disk_bytes: Some(most), ..TenantQuota::default() };
    let tenants = quotas(&[("a", quota), ("none", TenantQuota { disk_bytes: Some(0), ..quota })]);
    // Loads wait for the disk, so that only what it lacks is refused.
    let restore_mode = RestoreMode::Load;
    let config = Config { tenants, restore_mode, ..config(directory.path()) };
    let runtime = Runtime::open(config).await.unwrap();
    for (id, tenant, salt) in [("b-1", "b", 3), ("a-1", "a", 1), ("a-2", "a", 2), ("nothing", "none", 0)] {
        create(&runtime, id, Some(tenant)).await;
        say(&runtime, id, &story(salt), 16).await;
        runtime.evict(id).await.unwrap();
    }
    let tenants = runtime.info().await.unwrap().tenants;
    let held =
        |name: &str| tenants.iter().find(|tenant| tenant.name.as_deref() == Some(name)).unwrap().disk_bytes;
    assert!(held("a") <= most && held("a") > most * 9 / 10, "{tenants:?}");
    assert_eq!(held("none"), 0);
    for (id, salt, expected) in [("b-1", 3, &expected[2]), ("a-2", 2, &expected[1]), ("a-1", 1, &expected[0])]
    {
        let turn = say(&runtime, id, SECOND, 24).await;
        let report = &turn.restores[0];
        // Others have all they saved; of a's two the older one lost what the newer one needed.
        assert_eq!(report.cells_refused() > 0, id == "a-1", "{id}: {report:?}");
        assert_eq!(runtime.tokens(id).await.unwrap(), *expected, "story {salt}");
    }
    let turn = say(&runtime, "nothing", SECOND, 4).await;
    assert_eq!(turn.restores[0].tokens_loaded, 0, "{:?}", turn.restores[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_a_quota_of_nothing_and_one_too_small_refuse_with_the_fix() {
    let directory = tempfile::tempdir().unwrap();
    let tenants = quotas(&[("none", quota(Some(0), None)), ("small", quota(Some(160), None))]);
    let runtime = Runtime::open(Config { tenants, ..config(directory.path()) }).await.unwrap();
    for (tenant, input) in [("none", "Hello."), ("small", &*story(1))] {
        create(&runtime, tenant, Some(tenant)).await;
        let turn = attempt(&runtime, tenant, input).await;
        let error = turn.error.unwrap();
        assert_eq!((turn.status, error.code.as_str()), (TurnStatus::Failed, "tenant_quota"));
        let fix = format!("--tenant-quota '{tenant}:device=BYTES'");
        assert!(error.message.contains(&format!("of tenant '{tenant}' is ")), "{}", error.message);
        assert!(error.message.contains(&fix), "{}", error.message);
    }
    create(&runtime, "short", Some("small")).await;
    assert_eq!(attempt(&runtime, "short", "Hello.").await.status, TurnStatus::Completed);
    create(&runtime, "other", None).await;
    assert_eq!(attempt(&runtime, "other", &story(1)).await.status, TurnStatus::Completed);
}

#[tokio::test(flavor = "multi_thread")]
async fn i3_tenants_share_no_kv_on_any_tier_and_keep_their_own_over_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let open = || async {
        let config = Config { share_prefixes: true, host_budget_bytes: 64 << 20, ..config(directory.path()) };
        Runtime::open(config).await.unwrap()
    };
    let runtime = open().await;
    create(&runtime, "a-1", Some("a")).await;
    say(&runtime, "a-1", &story(1), 8).await;
    for (id, tenant, shares) in [("a-2", Some("a"), true), ("b-1", Some("b"), false), ("c-1", None, false)] {
        create(&runtime, id, tenant).await;
        let cached = say(&runtime, id, &story(1), 8).await.usage.cached_tokens;
        assert_eq!(cached > 0, shares, "{id} on the device: {cached}");
        assert_eq!(runtime.tokens(id).await.unwrap(), runtime.tokens("a-1").await.unwrap(), "{id}");
    }
    for id in ["b-1", "c-1"] {
        runtime.delete_session(id).await.unwrap();
    }
    for id in ["a-1", "a-2"] {
        runtime.evict(id).await.unwrap();
    }
    // The cells of b and of those without a name are left, and theirs alone.
    for (id, tenant, shares) in
        [("a-3", Some("a"), true), ("d-1", Some("d"), false), ("b-2", Some("b"), true)]
    {
        create(&runtime, id, tenant).await;
        let cached = say(&runtime, id, &story(1), 8).await.usage.cached_tokens;
        assert_eq!(cached > 0, shares, "{id} on the tiers: {cached}");
    }
    runtime.shutdown().await.unwrap();
    let runtime = open().await;
    let view = runtime.session("a-1").await.unwrap();
    assert_eq!((view.spec.tenant.as_deref(), view.kv.state), (Some("a"), KvState::Evicted));
    assert!(view.kv.saved_tokens > 200, "{:?}", view.kv);
    let turn = say(&runtime, "a-1", SECOND, 4).await;
    assert!(turn.usage.cached_tokens > 200, "{:?}", turn.usage);
    // A fork stays with its tenant.
    let fork = runtime.fork_session("a-1", None, None).await.unwrap();
    assert_eq!(fork.spec.tenant.as_deref(), Some("a"));
}

fn named(base: &str, name: &str) -> server::Answer {
    post(&format!("{base}/v1/sessions"), &json!({"id": format!("of-{}", name.len()), "tenant": name}))
}

#[test]
fn clients_name_a_tenant_and_operators_see_what_each_has() {
    let directory = tempfile::tempdir().unwrap();
    let tenants = quotas(&[("acme", quota(Some(1000), None))]);
    let server = TestServer::start(Config { tenants, ..config(directory.path()) });
    let made = named(&server.base, "acme");
    assert_eq!((made.status, made.json["spec"]["tenant"].as_str()), (201, Some("acme")), "{}", made.text);
    let read = get(&format!("{}/v1/sessions/of-4", server.base));
    assert_eq!(read.json["spec"]["tenant"], "acme");
    for wrong in ["", "a b", "../x", &"x".repeat(65)] {
        let refused = named(&server.base, wrong);
        assert_eq!(
            (refused.status, refused.json["code"].as_str()),
            (400, Some("tenant_invalid")),
            "{wrong:?}"
        );
    }
    let health = get(&format!("{}/health", server.base)).json;
    let expected = json!({
        "name": "acme",
        "sessions": 1,
        "waiting": 0,
        "device_bytes": 0,
        "device_quota_bytes": 1000 * TOKEN_BYTES,
        "host_bytes": 0,
        "host_quota_bytes": null,
        "disk_bytes": 0,
        "disk_quota_bytes": null,
    });
    assert_eq!(health["runtime"]["tenants"], json!([expected]));
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_for_what_is_no_name_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let tenants = quotas(&[("a b", quota(Some(1), None))]);
    let error = Runtime::open(Config { tenants, ..config(directory.path()) }).await.err().unwrap();
    assert_eq!(error.code, "config_invalid");
    assert!(error.message.contains("'a b'"), "{}", error.message);
}

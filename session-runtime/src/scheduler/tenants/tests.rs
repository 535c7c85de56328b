use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::*;
use crate::scheduler::simulation::sessions::{Sessions, TOKEN_BYTES};

fn tenant(number: usize) -> Tenant {
    Tenant::named(["a", "b", "c"].get(number).copied())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// By arithmetic over what is left: nobody within its share loses anything while one above its share has something that
    /// can leave, the cheapest leaves first among those who have to, and everything leaves in the end.
    #[test]
    fn nobody_within_its_share_loses_while_one_above_has_something_to_lose(
        items in prop::collection::vec((0..4_usize, 1..40_u64), 0..30),
        pinned in prop::array::uniform4(0..60_u64),
        wanted in (0..4_usize, 0..50_u64),
        budget in 1..600_u64,
    ) {
        let held = |left: &[usize]| {
            let mut held: BTreeMap<usize, u64> = BTreeMap::new();
            for (number, amount) in pinned.iter().copied().enumerate().chain(left.iter().map(|at| items[*at])) {
                *held.entry(number).or_default() += amount;
            }
            *held.entry(wanted.0).or_default() += wanted.1;
            held
        };
        let mut left: Vec<usize> = (0..items.len()).collect();
        let holders = held(&left).into_iter().filter(|(number, sum)| *sum > 0 || *number == wanted.0).count() as u64;
        let share = budget / holders;
        let before = pinned.iter().copied().enumerate().chain(items.iter().copied());
        let owner = tenant(wanted.0);
        let mut shares = Shares::new(
            budget,
            before.map(|(number, amount)| (tenant(number), amount)),
            Some((&owner, wanted.1)),
        );
        let candidates = items.iter().enumerate().map(|(at, (number, _))| (tenant(*number), at));
        let mut leaving = Leaving::new(candidates);
        while let Some((whose, at)) = leaving.next(&shares) {
            let sums = held(&left);
            let above = |at: &usize| sums[&items[*at].0] > share;
            let expected = left.iter().copied().find(above).or_else(|| left.first().copied());
            prop_assert_eq!(Some(at), expected);
            prop_assert_eq!(&whose, &tenant(items[at].0));
            left.retain(|other| *other != at);
            shares.left(&whose, items[at].1);
        }
        prop_assert!(left.is_empty());
    }

    /// While a tenant waits, each other tenant has at most one turn before it.
    #[test]
    fn i9_a_tenant_that_waits_is_overtaken_once_by_each_other(
        moves in prop::collection::vec((0..4_usize, any::<bool>()), 1..200),
    ) {
        let mut turns = Turns::default();
        let mut jobs: Vec<usize> = Vec::new();
        // Turns of others since a tenant began to wait, or had its own.
        let mut passed: HashMap<usize, HashMap<usize, usize>> = HashMap::new();
        for (number, arrives) in moves {
            if arrives || jobs.is_empty() {
                jobs.push(number);
                passed.entry(number).or_default();
            }
            let waiting: Vec<Tenant> = jobs.iter().map(|number| tenant(*number)).collect();
            turns.waiting(&waiting);
            if arrives {
                continue;
            }
            let next = turns.next(&[]).unwrap();
            let place = waiting.iter().position(|other| *other == next).unwrap();
            let served = jobs.remove(place);
            turns.taken(&next);
            passed.remove(&served);
            for (waits, others) in &mut passed {
                let count = others.entry(served).or_default();
                *count += 1;
                prop_assert!(*count <= 1, "{served} overtook {waits} twice");
            }
            if jobs.contains(&served) {
                passed.insert(served, HashMap::new());
            }
        }
    }
}

fn device_quota(name: &str, tokens: u64) -> TenantQuotas {
    let quota = TenantQuota { device_bytes: Some(tokens * TOKEN_BYTES), ..TenantQuota::default() };
    TenantQuotas { named: [(name.to_owned(), quota)].into(), others: TenantQuota::default() }
}

#[test]
fn a_tenant_with_many_jobs_does_not_keep_another_waiting() {
    // The device holds one of them at a time.
    let place = |second: Option<&str>| {
        let mut sessions = Sessions::new(320, TenantQuotas::default());
        for number in 0..10 {
            sessions.begin(&format!("first-{number}"), Some("a"), 256, 8);
        }
        sessions.begin("late", second, 256, 8);
        sessions.run();
        assert!(sessions.ended.iter().all(|(_, error)| error.is_none()), "{:?}", sessions.ended);
        let order: Vec<usize> = (0..10).map(|number| sessions.place(&format!("first-{number}"))).collect();
        assert!(order.is_sorted(), "the oldest first within a tenant: {order:?}");
        sessions.place("late")
    };
    assert_eq!(place(Some("a")), 10, "within a tenant nobody is overtaken");
    assert_eq!(place(Some("b")), 1, "behind the one that was running");
    assert_eq!(place(None), 1, "sessions without a tenant are one");
}

#[test]
fn prompts_of_tenants_are_read_in_turn() {
    // All have room; what they share is the device's time.
    let mut sessions = Sessions::new(8192, TenantQuotas::default());
    for number in 0..6 {
        sessions.begin(&format!("first-{number}"), Some("a"), 512, 1);
    }
    sessions.begin("late", Some("b"), 512, 1);
    sessions.run();
    assert_eq!(sessions.place("late"), 1, "{:?}", sessions.ended);
}

#[test]
fn what_a_tenant_has_above_its_share_leaves_first() {
    // Six of these fit.
    let mut sessions = Sessions::new(6 * 144, TenantQuotas::default());
    sessions.alone("b-1", Some("b"), 128);
    for id in ["a-1", "a-2", "a-3", "a-4", "a-5"] {
        sessions.alone(id, Some("a"), 128);
    }
    let all = ["b-1", "a-1", "a-2", "a-3", "a-4", "a-5"];
    assert_eq!(sessions.resident(&all), [true; 6], "an unused share is anyone's");
    sessions.alone("a-6", Some("a"), 128);
    assert_eq!(
        sessions.resident(&["b-1", "a-1", "a-6"]),
        [true, false, true],
        "though b-1 was used longest ago"
    );
    sessions.alone("b-2", Some("b"), 128);
    assert_eq!(sessions.resident(&["b-1", "b-2", "a-2", "a-3"]), [true, true, false, true]);
    for id in ["c-1", "c-2"] {
        sessions.alone(id, None, 128);
    }
    assert_eq!(sessions.resident(&["b-1", "b-2", "a-5", "a-6"]), [true; 4], "two for each of three");
    sessions.alone("c-3", None, 128);
    assert_eq!(
        sessions.resident(&["c-1", "b-1", "a-5"]),
        [false, true, true],
        "who asks for more gives its own"
    );
}

#[test]
fn without_tenants_the_cheapest_leaves_first() {
    let mut sessions = Sessions::new(3 * 144, TenantQuotas::default());
    for id in ["x", "y", "z", "w"] {
        sessions.alone(id, None, 128);
    }
    assert_eq!(sessions.resident(&["x", "y", "z", "w"]), [false, true, true, true]);
}

#[test]
fn a_tenant_at_its_quota_evicts_its_own() {
    let mut sessions = Sessions::new(20 * 144, device_quota("a", 2 * 144));
    for (id, name) in [("b-1", "b"), ("a-1", "a"), ("a-2", "a"), ("a-3", "a"), ("b-2", "b")] {
        sessions.alone(id, Some(name), 128);
    }
    assert_eq!(sessions.resident(&["a-1", "a-2", "a-3", "b-1", "b-2"]), [false, true, true, true, true]);
    let views = sessions.simulation.tenants();
    let [a, b] = views.as_slice() else { panic!("{views:?}") };
    assert_eq!(
        (a.name.as_deref(), a.sessions, a.device_quota_bytes),
        (Some("a"), 3, Some(2 * 144 * TOKEN_BYTES))
    );
    assert!(a.device_bytes <= 2 * 144 * TOKEN_BYTES && a.device_bytes > 2 * 128 * TOKEN_BYTES, "{a:?}");
    assert_eq!((b.name.as_deref(), b.sessions, b.device_quota_bytes), (Some("b"), 2, None));
    assert_eq!(b.device_bytes, a.device_bytes);
}

#[test]
fn i9_a_full_quota_keeps_its_tenant_waiting_and_nobody_else() {
    let mut sessions = Sessions::new(20 * 144, device_quota("a", 300));
    for number in 1..=3 {
        sessions.begin(&format!("a-{number}"), Some("a"), 256, 30);
    }
    sessions.begin("b", Some("b"), 256, 30);
    sessions.run();
    assert!(sessions.ended.iter().all(|(_, error)| error.is_none()), "{:?}", sessions.ended);
    assert!(sessions.place("b") <= 1, "{:?}", sessions.ended);
    assert!((1..3).all(|number| {
        sessions.place(&format!("a-{number}")) < sessions.place(&format!("a-{}", number + 1))
    }));
}

#[test]
fn i8_a_session_larger_than_its_tenants_quota_is_refused_with_the_fix() {
    let quotas =
        |tokens| TenantQuotas { others: device_quota("x", tokens).named["x"], ..device_quota("a", 128) };
    let mut sessions = Sessions::new(2048, quotas(0));
    sessions.begin("large", Some("a"), 129, 4);
    sessions.begin("nothing", Some("b"), 1, 1);
    sessions.begin("fits", Some("a"), 100, 4);
    sessions.run();
    let error = |id: &str| sessions.ended[sessions.place(id)].1.clone();
    let refused = error("large").unwrap();
    assert_eq!((refused.code.as_ref(), refused.retryable), ("tenant_quota", false));
    // 130 tokens are nine pages of 16.
    let (need, quota) = (144 * TOKEN_BYTES, 128 * TOKEN_BYTES);
    for part in [
        "session 'large'".to_owned(),
        format!("needs {need} bytes"),
        format!("the device quota of tenant 'a' is {quota} bytes"),
        "--tenant-quota 'a:device=BYTES'".to_owned(),
    ] {
        assert!(refused.message.contains(&part), "{part}: {}", refused.message);
    }
    let refused = error("nothing").unwrap();
    assert!(refused.message.contains("--tenant-quota '*:device=BYTES'"), "{}", refused.message);
    assert_eq!(error("fits"), None);
    // A session that grows past the quota ends there, and its tenant goes on.
    let mut sessions = Sessions::new(2048, device_quota("a", 128));
    sessions.begin("grows", Some("a"), 100, 60);
    sessions.run();
    assert_eq!(sessions.ended[0].1.as_ref().unwrap().code, "tenant_quota");
    sessions.alone("after", Some("a"), 100);
    assert_eq!(sessions.ended[1].1, None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the quotas and the device, as long as each session alone fits: everyone gets on, twice.
    #[test]
    fn i9_with_quotas_everyone_gets_on(
        jobs in prop::collection::vec((0..4_usize, 20..300_usize, 1..40_usize), 1..16),
        quotas in prop::array::uniform3(420..900_u64),
        device in 420..1400_usize,
    ) {
        let named = quotas.iter().zip(["a", "b", "c"]).map(|(tokens, name)| {
            (name.to_owned(), device_quota(name, *tokens).named[name])
        });
        let quotas = TenantQuotas { named: named.collect(), others: TenantQuota::default() };
        let mut sessions = Sessions::new(device, quotas);
        for (number, (whose, tokens, output)) in jobs.iter().enumerate() {
            sessions.begin(&format!("s{number}"), tenant(*whose).name(), *tokens, *output);
        }
        sessions.run();
        for (number, (_, _, output)) in jobs.iter().enumerate() {
            sessions.say(&format!("s{number}"), 10, *output);
        }
        sessions.run();
        prop_assert_eq!(sessions.ended.len(), 2 * jobs.len());
        prop_assert!(sessions.ended.iter().all(|(_, error)| error.is_none()), "{:?}", sessions.ended);
    }
}

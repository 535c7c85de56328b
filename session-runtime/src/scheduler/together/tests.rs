use std::time::Duration;

use proptest::prelude::*;

use crate::scheduler::simulation::sessions::Sessions;
use crate::scheduler::tenants::TenantQuotas;

/// Seconds until sessions with so many tokens, on the disk or lost, are all back: woken at once, and one after another.
fn seconds(sessions: &[(usize, bool)]) -> [f64; 2] {
    [true, false].map(|together| {
        let mut device = Sessions::new(64 * 1024, TenantQuotas::default());
        // Costs are learned from these.
        device.alone("computed", None, 900);
        device.wake("loaded", 900, true);
        device.run();
        let begun = device.simulation.now();
        for (number, (tokens, saved)) in sessions.iter().enumerate() {
            device.wake(&format!("s{number}"), *tokens, *saved);
            if !together {
                device.run();
            }
        }
        device.run();
        assert!(device.ended.iter().all(|(_, error)| error.is_none()), "{:?}", device.ended);
        (device.simulation.now() - begun).as_secs_f64()
    })
}

#[test]
fn the_loads_of_one_restore_overlap_the_compute_of_another() {
    let [together, apart] = seconds(&[(1600, false), (3200, true)]);
    assert!(together <= 0.75 * apart, "{together} s together, {apart} s one after another");
    let [together, apart] = seconds(&[(3200, true), (1600, false)]);
    assert!(together <= 0.85 * apart, "{together} s together, {apart} s one after another");
}

/// Between two tokens of a session that writes there is one bounded step and one bounded piece of one restore, however many there
/// are.
#[test]
fn restores_hold_up_who_writes_by_one_bounded_piece() {
    let mut device = Sessions::new(64 * 1024, TenantQuotas::default());
    // Costs are learned from this.
    device.alone("computed", None, 900);
    device.begin("writer", None, 40, 120);
    for number in 0..6 {
        device.wake(&format!("s{number}"), 1600, false);
    }
    device.run();
    assert!(device.ended.iter().all(|(_, error)| error.is_none()), "{:?}", device.ended);
    let times: Vec<f64> = device
        .tokens
        .iter()
        .filter(|(session, _)| &**session == "writer")
        .map(|(_, time)| time.as_secs_f64())
        .collect();
    assert!(times.len() == 120);
    let longest = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    // Twice the 0.15 s that a step may be predicted to take, and the decoding rows themselves.
    assert!(longest <= 0.35, "{longest} s between two tokens");
    // They do come back meanwhile: one, besides who ended before all of this.
    assert!(device.place("writer") > 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    /// Planned together is no worse than one after another, but for the steps that are not interrupted: of each other restore one
    /// may be in the way.
    #[test]
    fn restores_at_once_end_no_later_than_one_after_another(
        sessions in prop::collection::vec((100..2500_usize, any::<bool>()), 2..6),
    ) {
        let [together, apart] = seconds(&sessions);
        let steps = Duration::from_millis(270).as_secs_f64() * (sessions.len() - 1) as f64;
        prop_assert!(together <= apart * 1.02 + steps, "{together} s together, {apart} s one after another");
    }
}

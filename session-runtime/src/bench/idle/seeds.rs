//! The same comparison with other draws: how far the speedups of the default policy depend on which agents were drawn.

use super::workload::Agents;
use super::{AGENTS, SEED, cases, ratio, scripts, under};
use crate::bench::Figure;
use crate::error::Error;
use crate::scheduler::IdlePolicyName;
use crate::scheduler::simulation::Machine;

/// Draws, the one of the other figures among them.
const SEEDS: usize = 5;

/// The baselines, with the figures that compare with them.
const BASELINES: [(IdlePolicyName, &str, [&str; 2]); 2] = [
    (IdlePolicyName::Drop, "drop", ["mean_speedup_over_drop", "worst_speedup_over_drop"]),
    (IdlePolicyName::Lru, "lru", ["mean_speedup_over_lru", "worst_speedup_over_lru"]),
];

/// The speedups that one draw gave, by baseline.
type Speedups = [f64; BASELINES.len()];

/// Tells the mean and the worst speedup of the default policy over all draws.
pub(super) fn seeds(machine: &Machine, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    let mut draws: Vec<(&str, Vec<Speedups>)> =
        cases(*machine).into_iter().map(|(case, _)| (case, Vec::new())).collect();
    for seed in 0..SEEDS as u64 {
        let (scripts, machine) = scripts(machine, Agents { seed: SEED + seed, ..AGENTS });
        for ((_, speedups), (_, machine)) in draws.iter_mut().zip(cases(machine)) {
            let chosen = under(IdlePolicyName::default(), machine, &scripts)?.mean_ms();
            let mut over = Speedups::default();
            for (over, (policy, ..)) in over.iter_mut().zip(BASELINES) {
                *over = under(policy, machine, &scripts)?.mean_ms() / chosen;
            }
            speedups.push(over);
        }
    }
    for (case, speedups) in draws {
        for (index, (_, against, [mean, worst])) in BASELINES.into_iter().enumerate() {
            let (sum, least) = speedups
                .iter()
                .map(|over| over[index])
                .fold((0.0, f64::INFINITY), |(sum, least), over| (sum + over, least.min(over)));
            tell(ratio(case, mean, sum / SEEDS as f64, against, SEEDS));
            tell(ratio(case, worst, least, against, SEEDS));
        }
    }
    Ok(())
}

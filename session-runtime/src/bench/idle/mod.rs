//! `bench idle`: agents that call tools, on a device that holds a quarter of their KV, under each idle policy.
//!
//! The scheduler, its restores and the policies are the real ones; device and disk are simulated from times measured at the
//! start, so that hours pass in seconds. A smaller run on the real engine shows how near the simulation comes.

mod drive;
mod measure;
mod real;
mod seeds;
mod workload;

use std::time::Duration;

use self::drive::{Outcome, Run, drive};
use self::real::Real;
use self::workload::{Agents, Random, Script};
use super::{Figure, Setup};
use crate::error::Error;
use crate::scheduler::IdlePolicyName;
use crate::scheduler::simulation::{DeviceCost, DiskCost, Machine, Overstay};

/// Share of the sessions' KV that the device holds.
const BUDGET: f64 = 0.25;
/// Share of the device's time that the turns would take if nothing had to be restored.
const LOAD: f64 = 0.3;
/// On a small CPU a local disk is so much faster than computing that it hardly matters what is on the device. The tier of
/// `agents-200` takes this share of the time of recomputing, as one behind a network, or beside an accelerator, does.
const LOAD_OVER_RECOMPUTE: f64 = 0.25;
const IDLE_TTL: Duration = Duration::from_secs(300);
/// The sessions among which deadlocks are looked for, and how many of them share a device.
const MANY: usize = 10_000;
const TOGETHER: usize = 50;
const SEED: u64 = 20_240_202;

const AGENTS: Agents = Agents {
    sessions: 200,
    turns: 16,
    history: (2000, 6000),
    input: (32, 256),
    output: (16, 48),
    pause: 0.0,
    seed: SEED,
};

/// Few sessions with short pauses, for the real engine.
const REAL: Agents = Agents {
    sessions: 8,
    turns: 5,
    history: (100, 400),
    input: (16, 64),
    output: (12, 24),
    pause: 6.0,
    seed: SEED,
};

/// Measures the first model.
pub(super) async fn run(setup: &Setup, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    let Some(name) = setup.models.first() else { return Ok(()) };
    let real = Real::open(name, setup)?;
    let machine = real.measure(0).await?;
    tell_costs(name, &machine, tell);
    tokio::task::block_in_place(|| agents(&machine, tell))?;
    tokio::task::block_in_place(|| deadlocks(&machine, tell))?;
    agree(&real, tell).await?;
    // Last, because it takes longer than all the others.
    tokio::task::block_in_place(|| seeds::seeds(&machine, tell))
}

fn figure(case: &str, metric: &'static str, value: f64, unit: &'static str, n: usize) -> Figure {
    let (against, ratio) = (None, None);
    Figure { bench: "idle", case: case.to_owned(), metric, value, unit, against, ratio, n }
}

fn ratio(case: &str, metric: &'static str, value: f64, against: &'static str, n: usize) -> Figure {
    Figure { against: Some(against), ratio: Some(value), ..figure(case, metric, value, "ratio", n) }
}

fn tell_costs(name: &str, machine: &Machine, tell: &mut (dyn FnMut(Figure) + Send)) {
    let case = format!("costs/{name}");
    let (device, disk) = (&machine.device, &machine.disk);
    for (metric, value, unit) in [
        ("step_ms", device.step * 1e3, "ms"),
        ("row_ms", device.row * 1e3, "ms"),
        ("row_context_ns", device.context * 1e9, "ns"),
        ("logits_ms", device.logits * 1e3, "ms"),
        ("copy_bytes_per_s", device.copy_bytes_per_s, "B/s"),
        ("read_bytes_per_s", disk.read_bytes_per_s, "B/s"),
        ("write_bytes_per_s", disk.write_bytes_per_s, "B/s"),
    ] {
        tell(figure(&case, metric, value, unit, 1));
    }
}

/// Seconds that a turn takes the device, without restores.
fn turn_seconds(machine: &Machine, agents: &Agents) -> f64 {
    let mean = |(first, last): (usize, usize)| (first + last) as f64 / 2.0;
    let (history, input, output) = (mean(agents.history), mean(agents.input), mean(agents.output));
    let row = machine.device.row + machine.device.context * history;
    (input + output) * row + output * (machine.device.step + machine.device.logits)
}

/// Seconds to recompute a token of a mean history.
fn recompute_seconds(machine: &Machine, agents: &Agents) -> f64 {
    let history = (agents.history.0 + agents.history.1) as f64 / 2.0;
    machine.device.row + machine.device.context * history / 2.0
}

/// Sessions as many as `agents` that together load the device by [`LOAD`], and a device that holds [`BUDGET`] of them.
fn scripts(machine: &Machine, agents: Agents) -> (Vec<Script>, Machine) {
    let pause = agents.sessions as f64 * turn_seconds(machine, &agents) / LOAD;
    let scripts = Agents { pause, ..agents }.scripts();
    let tokens: usize = scripts.iter().map(Script::tokens).sum();
    (scripts, Machine { device_tokens: (tokens as f64 * BUDGET) as usize, ..*machine })
}

/// The machine with a slow tier, and with the disk it has.
fn cases(machine: Machine) -> [(&'static str, Machine); 2] {
    let recompute = recompute_seconds(&machine, &AGENTS);
    let slow = machine.token_bytes as f64 / (recompute * LOAD_OVER_RECOMPUTE);
    let mut throttled = machine;
    throttled.disk.read_bytes_per_s = throttled.disk.read_bytes_per_s.min(slow);
    [("agents-200", throttled), ("agents-200-local-disk", machine)]
}

/// Agents under a policy.
fn under(policy: IdlePolicyName, machine: Machine, scripts: &[Script]) -> Result<Outcome, Error> {
    // Where the TTL is the policy it is the runtime's own; the others decide by themselves.
    let idle_ttl = if policy == IdlePolicyName::Fixed { IDLE_TTL } else { Duration::MAX };
    drive(&Run { machine, scripts, policy, idle_ttl, begun_before: true })
}

fn agents(machine: &Machine, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    let (scripts, machine) = scripts(machine, AGENTS);
    for (case, machine) in cases(machine) {
        tell(figure(case, "read_bytes_per_s", machine.disk.read_bytes_per_s, "B/s", 1));
        let mut outcomes = Vec::new();
        for policy in IdlePolicyName::ALL {
            let outcome = under(policy, machine, &scripts)?;
            tell_outcome(&format!("{case}/{policy}"), &outcome, tell);
            outcomes.push((policy, outcome));
        }
        let mean = |name| {
            outcomes
                .iter()
                .find(|(policy, _)| *policy == name)
                .map_or(f64::NAN, |(_, outcome)| outcome.mean_ms())
        };
        let (drop, lru) = (mean(IdlePolicyName::Drop), mean(IdlePolicyName::Lru));
        for (policy, outcome) in &outcomes {
            let case = format!("{case}/{policy}");
            let n = outcome.latencies.len();
            tell(ratio(&case, "speedup_over_drop", drop / outcome.mean_ms(), "drop", n));
            tell(ratio(&case, "speedup_over_lru", lru / outcome.mean_ms(), "lru", n));
        }
        let chosen = mean(IdlePolicyName::default());
        let n = outcomes.first().map_or(0, |(_, outcome)| outcome.latencies.len());
        tell(figure(case, "mean_turn_latency_ms", chosen, "ms", n));
        tell(ratio(case, "speedup_over_drop", drop / chosen, "drop", n));
        tell(ratio(case, "speedup_over_lru", lru / chosen, "lru", n));
    }
    Ok(())
}

fn tell_outcome(case: &str, outcome: &Outcome, tell: &mut (dyn FnMut(Figure) + Send)) {
    let n = outcome.latencies.len();
    let share = |count: usize| count as f64 / n.max(1) as f64;
    tell(figure(case, "mean_turn_latency_ms", outcome.mean_ms(), "ms", n));
    tell(figure(case, "p90_turn_latency_ms", outcome.quantile_ms(0.9), "ms", n));
    tell(figure(case, "on_device_at_return", share(outcome.hits), "share", n));
    tell(figure(case, "tokens_loaded", outcome.moves.loaded as f64, "tokens", n));
    tell(figure(case, "tokens_recomputed", outcome.moves.recomputed as f64, "tokens", n));
    tell(figure(case, "prefetched", outcome.moves.prefetched as f64, "restores", n));
    tell(figure(case, "stuck", outcome.stuck as f64, "sessions", n));
}

/// Many small devices with policies, budgets and TTLs of all kinds: nobody waits for ever.
fn deadlocks(machine: &Machine, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    let mut random = Random(SEED);
    let (mut stuck, mut overstay, mut turns) = (0, Overstay::default(), 0);
    for group in 0..MANY / TOGETHER {
        let agents = Agents {
            sessions: TOGETHER,
            turns: 3,
            history: (16, 900),
            input: (4, 128),
            output: (1, 12),
            pause: 0.5 + 8.0 * random.unit(),
            seed: SEED + group as u64,
        };
        let scripts = agents.scripts();
        let tokens: usize = scripts.iter().map(Script::tokens).sum();
        let most = scripts.iter().map(Script::tokens).max().unwrap_or(0) + 16;
        let device_tokens = ((tokens as f64 * (0.02 + 0.4 * random.unit())) as usize).max(most);
        let policy = IdlePolicyName::ALL[group % IdlePolicyName::ALL.len()];
        let idle_ttl = Duration::from_millis(100 + random.within((0, 10_000)) as u64);
        let machine = Machine { device_tokens, ..*machine };
        let run = Run { machine, scripts: &scripts, policy, idle_ttl, begun_before: group % 2 == 0 };
        let outcome = drive(&run)?;
        stuck += outcome.stuck;
        turns += outcome.latencies.len();
        overstay = overstay.max(outcome.overstay);
    }
    let case = "deadlocks-10000";
    tell(figure(case, "deadlocks", stuck as f64, "sessions", MANY));
    tell(figure(case, "turns", turns as f64, "turns", MANY));
    tell(figure(case, "longest_overstay_ticks", overstay.ticks as f64, "ticks", MANY));
    tell(figure(case, "longest_overstay_ms", overstay.time.as_secs_f64() * 1e3, "ms", MANY));
    Ok(())
}

/// The mean of two measurements of the same machine.
fn between(one: Machine, other: &Machine) -> Machine {
    let mean = |of: &dyn Fn(&Machine) -> f64| f64::midpoint(of(&one), of(other));
    Machine {
        device: DeviceCost {
            step: mean(&|machine| machine.device.step),
            row: mean(&|machine| machine.device.row),
            context: mean(&|machine| machine.device.context),
            logits: mean(&|machine| machine.device.logits),
            copy_bytes_per_s: mean(&|machine| machine.device.copy_bytes_per_s),
        },
        disk: DiskCost {
            read_bytes_per_s: mean(&|machine| machine.disk.read_bytes_per_s),
            write_bytes_per_s: mean(&|machine| machine.disk.write_bytes_per_s),
            latency: mean(&|machine| machine.disk.latency),
        },
        ..one
    }
}

/// The same agents on the real engine and in the simulation.
async fn agree(real: &Real, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    let scripts = REAL.scripts();
    let tokens: usize = scripts.iter().map(Script::tokens).sum();
    let device_tokens = (tokens as f64 * 0.4) as usize;
    let policy = IdlePolicyName::default();
    // Measured before and after the run: what else the machine does meanwhile slows both.
    let before = real.measure(device_tokens).await?;
    let (latencies, forward_seconds) = real.run(&scripts, device_tokens, (policy, IDLE_TTL)).await?;
    let machine = between(before, &real.measure(device_tokens).await?);
    let run = |machine| Run { machine, scripts: &scripts, policy, idle_ttl: IDLE_TTL, begun_before: false };
    // What is compared is what the scheduler makes of steps. How long those took on a machine that has other things to do
    // is taken from the run itself, and its distance from what was measured is a figure of its own.
    let speed = forward_seconds / drive(&run(machine))?.forward_seconds;
    let device = machine.device.scaled(speed);
    let outcome = drive(&run(Machine { device, ..machine }))?;
    let n = latencies.len();
    let mean = 1e3 * latencies.iter().sum::<f64>() / n.max(1) as f64;
    let case = "agents-real";
    tell(figure(case, "mean_turn_latency_ms", mean, "ms", n));
    tell(figure(case, "simulated_turn_latency_ms", outcome.mean_ms(), "ms", n));
    tell(ratio(case, "measured_steps_over_real", 1.0 / speed, "real", n));
    tell(ratio(case, "simulated_over_real", outcome.mean_ms() / mean, "real", n));
    Ok(())
}

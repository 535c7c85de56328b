//! The replay of what would have been: what sessions did, on simulated time, under another policy or with other budgets. The
//! scheduler is the real one; what steps and transfers cost is what it had measured when the trace ended.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::counts::{Counter, Counts};
use super::exact::{Listener, Sessions, command};
use super::plan::{Act, Plan};
use super::script::Script;
use super::setting;
use crate::error::Error;
use crate::restore::cost::Costs;
use crate::scheduler::host_loads::check_budget;
use crate::scheduler::simulation::{DeviceCost, DiskCost, Progress, Simulation, Steps};
use crate::scheduler::trace::{Cause, Effect, SessionNumber, Taken, TraceHeader};
use crate::scheduler::{GenerationEvent, HostControl, IdlePolicyName, Speculation};

/// Bytes of a transfer whose cost is asked for: many, so that what a request costs hardly counts.
const MANY: usize = 1 << 30;

/// What a run is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub policy: IdlePolicyName,
    /// Bytes of KV on the device, where they are not those of the trace.
    pub device_budget: Option<u64>,
    pub host_budget: u64,
}

/// What was measured while the trace was written.
pub(super) struct Measured<'a> {
    pub costs: &'a Costs,
    /// Seconds of a step that gave one token.
    pub token_seconds: f64,
    pub disk_limit: Option<u64>,
    pub host: &'a HostControl,
}

impl Measured<'_> {
    fn device(&self, layers: usize) -> DeviceCost {
        let row = self.costs.compute.seconds(1, layers, 0.0);
        DeviceCost {
            step: (self.token_seconds - row).max(0.0),
            row,
            context: self.costs.compute.seconds(1, layers, 1.0) - row,
            logits: 0.0,
            copy_bytes_per_s: MANY as f64 / self.costs.host.seconds(0, MANY),
        }
    }

    fn disk(&self) -> DiskCost {
        let load = self.costs.load.limited(self.disk_limit);
        let latency = load.seconds(1, 0);
        let bytes_per_s = MANY as f64 / load.seconds(0, MANY);
        // Writes are not measured: nobody waits for them.
        DiskCost { read_bytes_per_s: bytes_per_s, write_bytes_per_s: bytes_per_s, latency }
    }
}

/// How a run went.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Simulated {
    /// The idle policy.
    pub policy: &'static str,
    /// Bytes of KV on the device.
    pub device_budget_bytes: u64,
    /// Bytes of cells in host memory.
    pub host_budget_bytes: u64,
    /// What became of KV.
    pub counts: Counts,
    /// Mean milliseconds that a message waited for its first token.
    pub mean_wait_ms: Option<f64>,
    /// Messages that failed, such as those of sessions that outgrew the device.
    pub failed: u64,
    /// Sessions that waited in vain.
    pub stuck: u64,
}

/// A message under way.
struct Under {
    session: SessionNumber,
    told: UnboundedReceiver<GenerationEvent>,
}

struct Run {
    simulation: Simulation,
    listener: Listener,
    sessions: Sessions,
    /// What each session has still to do.
    acts: Vec<VecDeque<Act>>,
    forks: HashMap<SessionNumber, VecDeque<SessionNumber>>,
    due: BinaryHeap<Reverse<(Duration, SessionNumber)>>,
    under: Vec<Under>,
    counter: Counter,
    failed: u64,
}

/// Runs a plan to its end.
///
/// # Errors
/// A budget that holds nothing, or a header that is of no scheduler.
pub(super) fn run(
    header: &TraceHeader,
    plan: &Plan,
    measured: &Measured<'_>,
    choice: Choice,
) -> Result<Simulated, Error> {
    let model = setting::model(header)?;
    let layers = model.layers;
    let spec = setting::pool(header, &model, choice.device_budget)?;
    let mut options = setting::options(header)?;
    options.idle_policy = choice.policy;
    options.host_budget_bytes = choice.host_budget;
    options.speculation = Speculation::Off;
    options.host_control.follow(measured.host);
    let steps = Steps { cost: measured.device(layers), rows: (header.shape.step_rows as usize).max(1) };
    let listener = Listener::default();
    let observer = Box::new(listener.clone());
    let mut simulation = Simulation::of(model, spec, steps, measured.disk(), options, observer)?;
    check_budget(&simulation.worker.engine, choice.host_budget)?;
    simulation.worker.costs = measured.costs.clone();
    let mut run = Run {
        simulation,
        listener,
        sessions: Sessions::default(),
        acts: plan.sessions.iter().map(|session| session.acts.clone()).collect(),
        forks: HashMap::new(),
        due: BinaryHeap::new(),
        under: Vec::new(),
        counter: Counter::default(),
        failed: 0,
    };
    for (number, session) in (0..).zip(&plan.sessions) {
        match (session.forked_from, session.acts.front()) {
            (Some(source), _) => run.forks.entry(source).or_default().push_back(number),
            (None, Some(first)) => run.due.push(Reverse((first.after, number))),
            (None, None) => {}
        }
    }
    let stuck = run.all()?;
    run.counter.counts.bytes_to_disk = run.simulation.bytes_written();
    Ok(Simulated {
        policy: choice.policy.as_str(),
        device_budget_bytes: spec.pages as u64 * spec.page_bytes() as u64,
        host_budget_bytes: choice.host_budget,
        mean_wait_ms: run.counter.counts.mean_wait_ms(),
        counts: run.counter.counts,
        failed: run.failed,
        stuck,
    })
}

impl Run {
    /// To the end; how many sessions waited in vain.
    fn all(&mut self) -> Result<u64, Error> {
        loop {
            while let Some(Reverse((due, session))) = self.due.peek().copied()
                && due <= self.simulation.now()
            {
                self.due.pop();
                self.act(session)?;
            }
            self.count();
            let progress = self.simulation.step(self.due.peek().map(|Reverse((due, _))| *due));
            self.count();
            self.hear();
            match progress {
                Progress::Passed if self.is_over() => return Ok(0),
                Progress::Worked | Progress::Passed => {}
                Progress::Stuck => return Ok(self.under.len() as u64),
            }
        }
    }

    fn is_over(&self) -> bool {
        self.under.is_empty() && self.due.is_empty() && self.simulation.is_quiet()
    }

    fn count(&mut self) {
        let now = self.simulation.now();
        for heard in self.listener.take() {
            self.counter.count(&heard.effect(&self.sessions), now);
        }
    }

    /// A session's next act.
    fn act(&mut self, session: SessionNumber) -> Result<(), Error> {
        let Some(Act { cause, tokens, .. }) =
            self.acts.get_mut(session as usize).and_then(VecDeque::pop_front)
        else {
            return Ok(());
        };
        if let Cause::Generate { sampled, .. } = cause {
            return self.generate(session, sampled as usize, tokens);
        }
        let fork = matches!(cause, Cause::Fork { .. })
            .then(|| self.forks.get_mut(&session).and_then(VecDeque::pop_front))
            .flatten();
        if let Cause::Open { tokens, saved_under: Some(differing), .. } = &cause
            && differing.is_empty()
        {
            self.simulation.hold(tokens);
        }
        let contract = self.simulation.worker.contract.clone();
        let command = command(&cause, fork.unwrap_or(session), &mut self.sessions, &contract)?;
        self.simulation.worker.command(command);
        if let Cause::Cut { start, tail: Some(tail), .. } = &cause {
            let id = self.sessions.id(session)?;
            if let Some(sequence) = self.simulation.worker.sequences.get_mut(&id) {
                sequence.tokens.truncate(usize::try_from(*start).unwrap_or(usize::MAX));
                sequence.tokens.extend(tail);
            }
        }
        self.plan_next(session);
        fork.into_iter().for_each(|fork| self.plan_next(fork));
        Ok(())
    }

    /// When a session acts next.
    fn plan_next(&mut self, session: SessionNumber) {
        let acts = self.acts.get(session as usize);
        if let Some(next) = acts.and_then(VecDeque::front) {
            self.due.push(Reverse((self.simulation.now() + next.after, session)));
        }
    }

    fn generate(
        &mut self,
        session: SessionNumber,
        sampled: usize,
        mut tokens: Vec<Taken>,
    ) -> Result<(), Error> {
        // Whoever stopped to listen, cancelled, or failed had the tokens that were sampled until then.
        match tokens.last_mut() {
            Some(last) => {
                if let Taken::Unheard(id) | Taken::Token(id) = *last {
                    *last = Taken::Last(id);
                } else if *last == Taken::Failed {
                    *last = Taken::End;
                }
            }
            None => tokens.push(Taken::Over),
        }
        let (events, told) = unbounded_channel();
        self.counter.asked(session, self.simulation.now());
        let script = Box::new(Script::of(tokens));
        let id = self.sessions.id(session)?;
        self.simulation.worker.generate(id, sampled, || Ok(script), events);
        self.under.push(Under { session, told });
        Ok(())
    }

    /// Hears of messages that began or ended.
    fn hear(&mut self) {
        let now = self.simulation.now();
        let mut ended = Vec::new();
        for Under { session, told } in &mut self.under {
            while let Ok(event) = told.try_recv() {
                match event {
                    GenerationEvent::Started { input_tokens: input, cached_tokens: cached } => {
                        self.counter.count(&Effect::Started { session: *session, input, cached }, now);
                    }
                    GenerationEvent::Done { .. } => ended.push(*session),
                    GenerationEvent::Failed(_) => {
                        self.failed += 1;
                        ended.push(*session);
                    }
                    GenerationEvent::Token { .. } => {}
                }
            }
        }
        self.under.retain(|under| !ended.contains(&under.session));
        ended.into_iter().for_each(|session| self.plan_next(session));
    }
}

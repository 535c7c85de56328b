//! Sessions on simulated time, for the unit tests of the scheduler: whose message ends when, and whose KV is where.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use super::{DeviceCost, DiskCost, Machine, Progress, Simulation};
use crate::error::Error;
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use crate::scheduler::tenants::{Tenant, TenantQuotas};
use crate::scheduler::{
    GenerationEvent, HostControl, IdlePolicyName, KvObserver, KvTransition, OpenSession, RestReason,
    SchedulerOptions, Speculation,
};

struct Unobserved;

impl KvObserver for Unobserved {
    fn transition(&self, _: &str, _: &KvTransition) {}
    fn restored(&self, _: &str, _: &RestoreReport) {}
}

/// Bytes of KV of a token.
pub(in crate::scheduler) const TOKEN_BYTES: u64 = 23_040;

/// Tokens that no other session has.
fn history(id: &str, tokens: usize) -> Vec<u32> {
    let salt = id.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
    (0..tokens as u32).map(|place| (place ^ salt) % 30_000).collect()
}

/// Sessions on a small simulated machine.
pub(in crate::scheduler) struct Sessions {
    pub simulation: Simulation,
    under: Vec<(Arc<str>, UnboundedReceiver<GenerationEvent>)>,
    /// Whose tokens were heard when.
    pub tokens: Vec<(Arc<str>, Duration)>,
    /// Messages that ended, in that order, with their errors.
    pub ended: Vec<(Arc<str>, Option<Error>)>,
}

impl Sessions {
    /// On a device that holds so many tokens.
    pub(in crate::scheduler) fn new(device_tokens: usize, tenants: TenantQuotas) -> Self {
        let machine = Machine {
            device: DeviceCost { step: 8e-3, row: 1e-3, context: 1e-7, logits: 1e-3, copy_bytes_per_s: 4e9 },
            disk: DiskCost { read_bytes_per_s: 5e7, write_bytes_per_s: 1e8, latency: 1e-4 },
            token_bytes: TOKEN_BYTES,
            device_tokens,
            step_rows: 256,
        };
        let options = SchedulerOptions {
            restore_mode: RestoreMode::Planned,
            idle_policy: IdlePolicyName::Lru,
            idle_ttl_ms: u64::MAX,
            context_length: 4096,
            save_when_idle: false,
            speculation: Speculation::Off,
            share_prefixes: false,
            host_budget_bytes: 0,
            host_control: HostControl::default(),
            tenants,
            step_seconds: 0.15,
            trace: None,
        };
        let simulation = Simulation::new(&machine, options, Box::new(Unobserved)).unwrap();
        Self { simulation, under: Vec::new(), tokens: Vec::new(), ended: Vec::new() }
    }

    /// A session of a tenant, and the beginning of a message after so many tokens.
    pub(in crate::scheduler) fn begin(&mut self, id: &str, name: Option<&str>, tokens: usize, output: usize) {
        let session: Arc<str> = id.into();
        self.simulation.open(&session, OpenSession { tenant: Tenant::named(name), ..OpenSession::default() });
        self.say(id, tokens, output);
    }

    /// A session that has a history, on the disk or lost, and the beginning of a message after it.
    pub(in crate::scheduler) fn wake(&mut self, id: &str, tokens: usize, saved: bool) {
        self.simulation.open_with(&id.into(), history(id, tokens), saved);
        self.say(id, 0, 1);
    }

    /// The beginning of a message after so many more tokens.
    pub(in crate::scheduler) fn say(&mut self, id: &str, tokens: usize, output: usize) {
        let session: Arc<str> = id.into();
        self.simulation.append(&session, history(id, tokens));
        let told = self.simulation.generate(&session, output);
        self.under.push((session, told));
    }

    /// Until everyone's message has ended.
    pub(in crate::scheduler) fn run(&mut self) {
        while !self.under.is_empty() {
            assert_ne!(self.simulation.step(None), Progress::Stuck, "{:?} wait for ever", self.under.len());
            let mut index = 0;
            while index < self.under.len() {
                let mut outcome = None;
                while let Ok(event) = self.under[index].1.try_recv() {
                    match event {
                        GenerationEvent::Done { .. } => outcome = Some(None),
                        GenerationEvent::Failed(error) => outcome = Some(Some(error)),
                        GenerationEvent::Token { .. } => {
                            let session = Arc::clone(&self.under[index].0);
                            self.tokens.push((session, self.simulation.now()));
                        }
                        GenerationEvent::Started { .. } => {}
                    }
                }
                match outcome {
                    Some(error) => {
                        let (session, _) = self.under.remove(index);
                        self.simulation.rest(&session, RestReason::EndOfTurn);
                        self.ended.push((session, error));
                    }
                    None => index += 1,
                }
            }
        }
    }

    /// One message to its end.
    pub(in crate::scheduler) fn alone(&mut self, id: &str, name: Option<&str>, tokens: usize) {
        self.begin(id, name, tokens, 4);
        self.run();
        // Later sessions are used later.
        let until = self.simulation.now() + Duration::from_secs(1);
        while self.simulation.now() < until {
            self.simulation.step(Some(until));
        }
    }

    /// How many messages ended before a session's.
    pub(in crate::scheduler) fn place(&self, id: &str) -> usize {
        self.ended.iter().position(|(session, _)| &**session == id).unwrap()
    }

    /// Whose KV is on the device.
    pub(in crate::scheduler) fn resident(&self, ids: &[&str]) -> Vec<bool> {
        ids.iter().map(|id| self.simulation.is_resident(id)).collect()
    }
}

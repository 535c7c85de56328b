//! `bench restore`: one session brought back by forced load, forced recompute and the planner, over a disk tier throttled to
//! between a thirtieth and thirty times the time that recomputing takes.
//!
//! The planner is compared with the better of the two pure plans, run in turns with it; the worse one is left out where it is
//! far worse, because it would only take time. Beside a peer, a restore from the plain disk with the first token after it takes turns
//! with the peer's own (`resume`).

use std::path::Path;
use std::time::Duration;

use super::{Figure, Setup, median, resume};
use crate::config::Config;
use crate::error::Error;
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use crate::runtime::Runtime;
use crate::session::spec::{SessionSpec, TurnRequest};

const RUNS: usize = 3;
/// Tokens of the session, where none are asked for.
const TOKENS: [usize; 2] = [4_000, 8_000];
/// Tokens of the context beside them: the template's, and a few short turns.
const BESIDE: usize = 512;
/// Load time over compute time, three decades around break-even.
const SWEEP: [f64; 7] = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0];

/// Measures every model.
pub(super) async fn run(setup: &Setup, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    let lengths = if setup.tokens.is_empty() { &TOKENS[..] } else { &setup.tokens[..] };
    for name in &setup.models {
        for tokens in lengths {
            let directory = std::env::temp_dir().join(crate::ids::fresh("bench"));
            let config = Config {
                data_dir: directory.clone(),
                model: name.clone(),
                device_budget_bytes: 1 << 30,
                // The planner is measured against the disk alone.
                host_budget_bytes: 0,
                context_length: tokens + BESIDE,
                share_prefixes: false,
                ..setup.config.clone()
            };
            let outcome = match Runtime::open(config).await {
                Ok(runtime) => {
                    let session = Session::new(name, *tokens, runtime);
                    session.measure(setup.peer.as_deref(), tell).await
                }
                Err(error) => Err(error),
            };
            // The directory is ours alone; what is left of it harms nobody.
            let _ = std::fs::remove_dir_all(&directory);
            outcome?;
        }
    }
    Ok(())
}

/// The session that is restored.
struct Session {
    /// Model and tokens, as cases name them.
    name: String,
    tokens: usize,
    runtime: Runtime,
    id: String,
}

impl Session {
    fn new(model: &str, tokens: usize, runtime: Runtime) -> Self {
        Self { name: format!("{model}-{tokens}"), tokens, runtime, id: "bench".to_owned() }
    }

    async fn measure(self, peer: Option<&Path>, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
        let spec = SessionSpec { id: Some(self.id.clone()), ..SessionSpec::default() };
        self.runtime.create_session(spec).await?;
        let word = |index| if index % 7 == 0 { " river" } else { " stone" };
        let input: String = (0..self.tokens).map(word).collect();
        let request = TurnRequest { input, max_tokens: Some(1), ..TurnRequest::default() };
        let turn = self.runtime.start_turn(&self.id, request).await?;
        self.runtime.wait_turn(&self.id, &turn.id).await?;
        let once = self.restore(RestoreMode::Recompute).await?;
        let load = self.restore(RestoreMode::Load).await?;
        let case = format!("unthrottled/{}", self.name);
        tell(figure(&case, "recompute_ms", once.ms, "ms"));
        tell(figure(&case, "load_ms", load.ms, "ms"));
        if let Some(program) = peer {
            let subject =
                resume::Subject { runtime: &self.runtime, session: &self.id, recompute_ms: once.ms };
            resume::beside(program, &subject, &format!("disk/{}", self.name), tell).await?;
        }
        for factor in SWEEP {
            let rate = (load.bytes_loaded as f64 / (once.ms / 1e3 * factor)) as u64;
            let throttle = store::Throttle { bytes_per_s: Some(rate), latency: Duration::ZERO };
            self.runtime.store().cells().set_throttle(throttle);
            self.throttled(factor, tell).await?;
        }
        self.runtime.shutdown().await
    }

    /// The planner and what it is compared with at one throttle.
    async fn throttled(&self, factor: f64, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
        let (mut loads, mut recomputes, mut planned) = (Vec::new(), Vec::new(), Vec::new());
        let mut predicted = Vec::new();
        for _ in 0..RUNS {
            if factor <= 1.0 {
                loads.push(self.restore(RestoreMode::Load).await?.ms);
            }
            if factor >= 1.0 {
                recomputes.push(self.restore(RestoreMode::Recompute).await?.ms);
            }
            let report = self.restore(RestoreMode::Planned).await?;
            planned.push(report.ms);
            predicted.push(report.predicted_ms / report.ms);
        }
        let planned = median(planned);
        let mut best = f64::INFINITY;
        let case = format!("sweep/{}/load-over-compute-{factor}", self.name);
        for (metric, times) in [("load_ms", &loads), ("recompute_ms", &recomputes)] {
            if !times.is_empty() {
                best = best.min(median(times.clone()));
                tell(figure(&case, metric, median(times.clone()), "ms"));
            }
        }
        tell(figure(&case, "planned_ms", planned, "ms"));
        let ratio = planned / best;
        let against = Some("min(load, recompute)");
        tell(Figure {
            against,
            ratio: Some(ratio),
            ..figure(&case, "planned_over_best_pure", ratio, "ratio")
        });
        tell(figure(&case, "predicted_over_realised", median(predicted.clone()), "ratio"));
        if !loads.is_empty() && !recomputes.is_empty() {
            let (load, recompute) = (median(loads), median(recomputes));
            let ratio = planned / (load * recompute / (load + recompute));
            let case = format!("break-even/{}", self.name);
            let against = Some("Tc*Tl/(Tc+Tl)");
            tell(Figure {
                against,
                ratio: Some(ratio),
                ..figure(&case, "planned_over_bound", ratio, "ratio")
            });
            tell(figure(&case, "predicted_over_realised", median(predicted), "ratio"));
        }
        Ok(())
    }

    async fn restore(&self, mode: RestoreMode) -> Result<RestoreReport, Error> {
        self.runtime.evict(&self.id).await?;
        self.runtime.restore(&self.id, mode).await
    }
}

fn figure(case: &str, metric: &'static str, value: f64, unit: &'static str) -> Figure {
    let (against, ratio) = (None, None);
    Figure { bench: "restore", case: case.to_owned(), metric, value, unit, against, ratio, n: RUNS }
}

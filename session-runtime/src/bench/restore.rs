//! `bench restore`: one session brought back by forced load, forced recompute and the planner, over a
//! disk tier throttled around the point where both cost the same.

use std::time::Duration;

use super::{Figure, Setup, median};
use crate::config::Config;
use crate::error::Error;
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use crate::runtime::Runtime;
use crate::session::spec::{SessionSpec, TurnRequest};

const RUNS: usize = 3;
/// Words of the prompt; about as many tokens.
const WORDS: usize = 1500;
/// Load time over compute time.
const SWEEP: [f64; 5] = [0.1, 0.5, 1.0, 2.0, 10.0];

/// Measures every model.
pub(super) async fn run(setup: &Setup, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    for name in &setup.models {
        let directory = std::env::temp_dir().join(crate::ids::fresh("bench"));
        let config = Config {
            data_dir: directory.clone(),
            model: name.clone(),
            device_budget_bytes: 512 << 20,
            ..setup.config.clone()
        };
        let outcome = measure(name, Runtime::open(config).await?, tell).await;
        // The directory is ours alone; what is left of it harms nobody.
        let _ = std::fs::remove_dir_all(&directory);
        outcome?;
    }
    Ok(())
}

async fn measure(name: &str, runtime: Runtime, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    let session = runtime.create_session(SessionSpec::default()).await?.id;
    let input: String = (0..WORDS).map(|index| if index % 7 == 0 { " river" } else { " stone" }).collect();
    let request = TurnRequest { input, max_tokens: Some(1), ..TurnRequest::default() };
    let turn = runtime.start_turn(&session, request).await?;
    runtime.wait_turn(&session, &turn.id).await?;

    let once = restore(&runtime, &session, RestoreMode::Recompute).await?;
    let load = restore(&runtime, &session, RestoreMode::Load).await?;
    let tell_case =
        |tell: &mut (dyn FnMut(Figure) + Send), case: &str, metric, value, unit, ratio: Option<f64>| {
            let against = ratio.map(|_| "min(load, recompute)");
            let case = format!("{name}/{case}");
            tell(Figure { bench: "restore", case, metric, value, unit, against, ratio, n: RUNS });
        };
    tell_case(tell, "unthrottled/recompute", "ms", once.ms, "ms", None);
    tell_case(tell, "unthrottled/load", "ms", load.ms, "ms", None);
    for factor in SWEEP {
        let rate = load.bytes_loaded as f64 / (once.ms / 1e3 * factor);
        runtime
            .store()
            .cells()
            .set_throttle(store::Throttle { bytes_per_s: Some(rate as u64), latency: Duration::ZERO });
        // The planner learns this tier's speed before it is measured.
        restore(&runtime, &session, RestoreMode::Load).await?;
        let modes = [RestoreMode::Load, RestoreMode::Recompute, RestoreMode::Planned];
        let mut times: [Vec<f64>; 3] = Default::default();
        let mut predicted = Vec::new();
        for _ in 0..RUNS {
            for (mode, times) in modes.into_iter().zip(&mut times) {
                let report = restore(&runtime, &session, mode).await?;
                times.push(report.ms);
                if mode == RestoreMode::Planned {
                    predicted.push(report.predicted_ms / report.ms);
                }
            }
        }
        let [load, recompute, planned] = times.map(median);
        let case = format!("sweep/load-over-compute-{factor}");
        tell_case(tell, &case, "load_ms", load, "ms", None);
        tell_case(tell, &case, "recompute_ms", recompute, "ms", None);
        tell_case(tell, &case, "planned_ms", planned, "ms", None);
        let ratio = planned / load.min(recompute);
        tell_case(tell, &case, "planned_over_best_pure", ratio, "ratio", Some(ratio));
        let bound = load * recompute / (load + recompute);
        tell_case(tell, &case, "planned_over_bound", planned / bound, "ratio", None);
        tell_case(tell, &case, "predicted_over_realised", median(predicted), "ratio", None);
    }
    runtime.shutdown().await
}

async fn restore(runtime: &Runtime, session: &str, mode: RestoreMode) -> Result<RestoreReport, Error> {
    runtime.evict(session).await?;
    runtime.restore(session, mode).await
}

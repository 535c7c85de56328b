//! `gpu-check`: everything there is to find out about a GPU in one run of a few minutes, without a network, a model or a
//! toolkit: whether it computes the right numbers, whether KV that left comes back to the bit, and how fast it is.
//!
//! Nothing of it has been run on a GPU by the developers: until someone does, what it asserts there is a claim.

mod checkpoint;
mod logits;
mod programs;
mod random_weights;
pub mod report;
mod restores;
mod sequence;
mod speed;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::cuda::{CudaBackend, CudaOptions, Survey};

use self::programs::{PROGRAMS, Programs};
use self::random_weights::Shape;
use self::report::{Part, Report, Verdict};
use crate::config::Config;
use crate::error::Error;

/// How to check.
#[derive(Clone, Debug)]
pub struct GpuCheck {
    /// The GPU's number in the driver's order.
    pub device: usize,
    /// What a runtime would be opened with, as far as it matters here.
    pub config: Config,
    /// Where the kernels' test programs are; without it they are left out.
    pub tests: Option<PathBuf>,
    /// Where compiled kernels are kept.
    pub kernels: PathBuf,
    /// How long it may take; parts that no time is left for are left out.
    pub limit: Duration,
}

/// A check under way.
struct Run<'a> {
    check: &'a GpuCheck,
    backend: Arc<CudaBackend>,
    /// A folder for small models and what sessions leave.
    folder: &'a Path,
    deadline: Instant,
    report: Report,
    tell: &'a mut dyn FnMut(&Part),
}

impl GpuCheck {
    /// Checks; each part is told when it is done.
    ///
    /// # Errors
    /// No GPU that can be used, in one sentence. What a part fails with is in the report.
    pub async fn run(&self, tell: &mut (dyn FnMut(&Part) + Send)) -> Result<Report, Error> {
        let begun = Instant::now();
        let (nvrtc, cache) = (self.config.nvrtc.clone(), Some(self.kernels.clone()));
        let backend = CudaBackend::new(CudaOptions { device: self.device, cache, nvrtc })?;
        backend.prepare()?;
        let folder = std::env::temp_dir().join(crate::ids::fresh("gpu"));
        let backend = Arc::new(backend);
        let report = self.head(&backend);
        let deadline = begun + self.limit;
        let mut run = Run { check: self, backend, folder: &folder, deadline, report, tell };
        run.numbers();
        run.restores().await;
        run.speed();
        run.programs();
        let mut report = run.report;
        report.seconds = begun.elapsed().as_secs_f64();
        // The directory is ours alone; what is left of it harms nobody.
        let _ = std::fs::remove_dir_all(&folder);
        Ok(report)
    }

    fn head(&self, backend: &CudaBackend) -> Report {
        use kernels::backend::Backend;
        let survey = Survey::take(self.config.nvrtc.as_deref());
        Report {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: backend.describe(),
            driver: survey
                .driver
                .map_or_else(|error| error.to_string(), |(major, minor)| format!("{major}.{minor}")),
            compiler: survey.compiler.map_or_else(
                |_| "kernels compiled before".to_owned(),
                |(_, (major, minor))| format!("NVRTC {major}.{minor}"),
            ),
            ..Report::default()
        }
    }
}

impl Run<'_> {
    /// Does a part, or leaves it out where no time is left; `None` from it: it is left out, and the words say why.
    fn part(&mut self, name: &str, work: impl FnOnce(&mut Self) -> Result<(Verdict, String), Error>) {
        let begun = Instant::now();
        let outcome = if begun < self.deadline {
            work(self)
        } else {
            Ok((Verdict::LeftOut, "no time was left".to_owned()))
        };
        self.done(name, begun, outcome);
    }

    fn done(&mut self, name: &str, begun: Instant, outcome: Result<(Verdict, String), Error>) {
        let (verdict, found) = outcome.unwrap_or_else(|error| (Verdict::Failed, error.message));
        let part = Part { name: name.to_owned(), verdict, found, seconds: begun.elapsed().as_secs_f64() };
        (self.tell)(&part);
        self.report.parts.push(part);
    }

    /// Logits.
    fn numbers(&mut self) {
        self.part("known logits", |run| passed(logits::known(&run.backend, run.folder)));
        let threads = self.check.config.thread_count();
        for shape in Shape::all() {
            let name = format!("logits of {}'s shape", shape.name);
            self.part(&name, |run| passed(logits::random(&run.backend, &shape, threads)));
        }
    }

    /// KV that leaves and comes back.
    async fn restores(&mut self) {
        let begun = Instant::now();
        let outcome = restores::run(&self.check.config, self.check.device, self.folder).await;
        self.done("restores", begun, passed(outcome));
    }

    /// Figures.
    fn speed(&mut self) {
        let mut bandwidth = f64::NAN;
        self.part("memory bandwidth", |run| {
            bandwidth = speed::bandwidth(&run.backend)?;
            run.report.figures.push(speed::machine(bandwidth));
            passed(Ok(format!("{:.0} GB/s read and written", bandwidth / 1e9)))
        });
        for shape in Shape::all() {
            self.part(&format!("speed of {}'s shape", shape.name), |run| {
                let figures = speed::measure(&run.backend, &shape, bandwidth)?;
                run.report.figures.extend(figures);
                passed(Ok("see the figures".to_owned()))
            });
        }
    }

    /// The kernels' own tests.
    fn programs(&mut self) {
        let check = self.check;
        let Some(folder) = &check.tests else {
            return self.part("tests of the kernels", |_| left_out("no folder with the test programs"));
        };
        let programs = Programs { folder, kernels: &check.kernels, nvrtc: check.config.nvrtc.as_deref() };
        for name in PROGRAMS {
            self.part(&format!("tests {name}"), |run| passed(programs.run(name, run.deadline)));
        }
        self.part("memory accesses", |run| match programs.run_checked(run.deadline)? {
            Some(found) => passed(Ok(found)),
            None => left_out("compute-sanitizer is not installed"),
        });
    }
}

fn passed(found: Result<String, Error>) -> Result<(Verdict, String), Error> {
    found.map(|found| (Verdict::Passed, found))
}

fn left_out(why: &str) -> Result<(Verdict, String), Error> {
    Ok((Verdict::LeftOut, why.to_owned()))
}

//! What a check of a GPU found, as JSON for programs and as Markdown for people.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::bench::Figure;
use crate::error::Error;

/// How a part of the check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it has to be.
    Passed,
    /// Not as it has to be.
    Failed,
    /// Not done; the part says why.
    LeftOut,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::LeftOut => "left out",
        }
    }
}

/// One part of the check.
#[derive(Clone, Debug, Serialize)]
pub struct Part {
    /// What was looked at.
    pub name: String,
    /// How it ended.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// Seconds it took.
    pub seconds: f64,
}

/// Everything.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Version of this software.
    pub version: String,
    /// The device, in words.
    pub device: String,
    /// The newest CUDA version that the driver supports.
    pub driver: String,
    /// The run-time compiler, or that the kernels were compiled before.
    pub compiler: String,
    /// Seconds of all.
    pub seconds: f64,
    /// The parts in the order they were done.
    pub parts: Vec<Part>,
    /// What was measured.
    pub figures: Vec<Figure>,
}

impl Report {
    /// Whether no part failed.
    pub fn passed(&self) -> bool {
        self.parts.iter().all(|part| part.verdict != Verdict::Failed)
    }

    /// Tables for people.
    pub fn markdown(&self) -> String {
        let mut text = format!(
            "# GPU check\n\nsession-runtime {} on {}; driver for CUDA {}; {}. {} in {:.0} s.\n\n",
            self.version,
            self.device,
            self.driver,
            self.compiler,
            if self.passed() { "No part failed" } else { "Parts failed" },
            self.seconds
        );
        text.push_str("| part | verdict | seconds | found |\n|---|---|---:|---|\n");
        for Part { name, verdict, found, seconds } in &self.parts {
            let found = found.replace('|', "\\|").replace('\n', " ");
            // Writing to a string cannot fail.
            let _ = writeln!(text, "| {name} | {} | {seconds:.1} | {found} |", verdict.word());
        }
        text.push_str("\n| case | metric | value | unit | beside |\n|---|---|---:|---|---|\n");
        for figure in &self.figures {
            let beside = match (figure.against, figure.ratio) {
                (Some(against), Some(ratio)) => format!("{ratio:.2} of {against}"),
                _ => String::new(),
            };
            let (case, metric, value, unit) = (&figure.case, figure.metric, figure.value, figure.unit);
            let _ = writeln!(text, "| {case} | {metric} | {value:.3e} | {unit} | {beside} |");
        }
        text
    }

    /// Writes both files into `folder`; their paths.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn write(&self, folder: &Path) -> Result<[PathBuf; 2], Error> {
        let [json, markdown] = ["gpu-check.json", "gpu-check.md"].map(|name| folder.join(name));
        let failed = |error: std::io::Error| {
            Error::invalid(
                "report_not_written",
                format!("{}: {error}; name another folder", folder.display()),
            )
        };
        std::fs::create_dir_all(folder).map_err(failed)?;
        std::fs::write(&json, serde_json::to_vec_pretty(self)?).map_err(failed)?;
        std::fs::write(&markdown, self.markdown()).map_err(failed)?;
        Ok([json, markdown])
    }
}

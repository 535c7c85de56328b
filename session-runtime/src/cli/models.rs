//! `session-runtime model`: download, list and remove model files.

use clap::Subcommand;
use serde_json::{Value, json};

use super::bytes::Bytes;
use super::failure::{Failure, Outcome};
use super::table::Table;
use super::terminal::{print, print_line};
use crate::models::download::{Downloader, Listed};
use crate::models::progress::Terminal;

/// Commands on models.
#[derive(Subcommand, Debug)]
pub(super) enum Models {
    /// Downloads a model and checks its digest; goes on where an earlier try stopped
    Pull {
        /// Alias of the model
        name: String,
    },
    /// Lists the known models
    Ls {
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
    /// Removes a model's file
    Rm {
        /// Alias of the model
        name: String,
    },
}

impl Models {
    pub(super) fn run(&self) -> Outcome {
        let models = Downloader::from_env().map_err(failed)?;
        match self {
            Self::Pull { name } => {
                let path = models.pull(name, &Terminal::new()).map_err(failed)?;
                print_line(path.display())
            }
            Self::Ls { json } => list(&models.list(), *json),
            Self::Rm { name } => {
                let bytes = models.remove(name).map_err(failed)?;
                print_line(format_args!("removed {name} ({})", Bytes(bytes)))
            }
        }
    }
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::new(error.to_string())
}

fn list(models: &[Listed], json: bool) -> Outcome {
    if json {
        let models: Vec<Value> = models
            .iter()
            .map(|model| {
                json!({
                    "alias": model.entry.alias,
                    "description": model.entry.description,
                    "bytes": model.entry.bytes,
                    "downloaded": model.downloaded,
                    "partial_bytes": model.partial_bytes,
                })
            })
            .collect();
        return print_line(format_args!("{:#}", Value::Array(models)));
    }
    let mut table = Table::new(&["MODEL", "SIZE", "HERE", "DESCRIPTION"]);
    for model in models {
        let here = match (model.downloaded, model.partial_bytes) {
            (true, _) => "yes".to_owned(),
            (false, 0) => "no".to_owned(),
            (false, partial) => format!("{} so far", Bytes(partial)),
        };
        let entry = model.entry;
        table.row([
            entry.alias.to_owned(),
            Bytes(entry.bytes).to_string(),
            here,
            entry.description.to_owned(),
        ]);
    }
    print(table.render())
}

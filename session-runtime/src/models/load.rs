//! Opening a model: weights, shape, tokenizer, template and digests in one value.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::architecture::ModelConfig;
use super::catalog;
use super::checkpoint::Checkpoint;
use super::digest::{Digest, DigestError, weights_digest};
use super::gguf::Gguf;
use super::progress::{Progress, Silent};
use super::template::{ChatTemplate, Frames};
use super::tokenizer::Tokenizer;
use super::weights::WeightFile;
use crate::error::{Error, ErrorKind};

/// How the floats of a checkpoint are kept on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// As they are stored.
    #[default]
    Stored,
    /// Quantised to Q8_0 at load, where a matrix has whole blocks.
    Q8_0,
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Precision::Stored),
            "q8_0" => Ok(Precision::Q8_0),
            _ => Err(format!("weights cannot be quantised to '{text}': use q8_0 or none")),
        }
    }
}

/// A model, ready to be put on a device.
#[derive(Debug)]
pub struct LoadedModel {
    /// The file or directory.
    pub path: PathBuf,
    /// How floats are kept on the device.
    pub precision: Precision,
    /// Its weights.
    pub weights: Arc<WeightFile>,
    /// Its shape.
    pub config: ModelConfig,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub template: ChatTemplate,
    /// What the template puts around messages.
    pub frames: Frames,
    /// Digest of everything that decides the numbers: SHA-256 of a GGUF file; of a checkpoint, over the digests of
    /// its files of weights, its configuration and the precision.
    pub weights_digest: [u8; 32],
    /// Digest of everything that decides which ids a text gets.
    pub tokenizer_digest: [u8; 32],
    /// What an operator should know.
    pub warnings: Vec<String>,
}

/// The parts that come from files.
struct Parts {
    weights: WeightFile,
    config: ModelConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    digest: Digest,
}

impl LoadedModel {
    /// Opens a model file or the directory of a checkpoint. Its digest is computed if it is not known, which reads
    /// every weight and is reported to `progress`.
    ///
    /// # Errors
    /// `model_not_found`, `model_unreadable`, `model_malformed`, `model_unsupported`, each with the path.
    pub fn open(path: &Path, precision: Precision, progress: &dyn Progress) -> Result<LoadedModel, Error> {
        LoadedModel::read(path, precision, progress).map_err(|error| naming(path, error))
    }

    /// The error with the model's path in its message.
    pub fn naming(&self, error: Error) -> Error {
        naming(&self.path, error)
    }

    fn read(path: &Path, precision: Precision, progress: &dyn Progress) -> Result<LoadedModel, Error> {
        let parts = if path.is_dir() {
            let checkpoint = Checkpoint::open(path, precision == Precision::Q8_0)?;
            let config = ModelConfig::from_checkpoint(&checkpoint)?;
            Parts {
                tokenizer: Tokenizer::from_checkpoint(&checkpoint, config.vocab)?,
                config,
                template: ChatTemplate::from_checkpoint(&checkpoint)?,
                digest: checkpoint_digest(&checkpoint, progress)?,
                weights: WeightFile::Checkpoint(checkpoint),
            }
        } else if precision == Precision::Stored {
            let gguf = Gguf::open(path)?;
            Parts {
                config: ModelConfig::from_gguf(&gguf)?,
                tokenizer: Tokenizer::from_gguf(&gguf)?,
                template: ChatTemplate::from_gguf(&gguf)?,
                digest: weights_digest(path, progress).map_err(unreadable)?,
                weights: WeightFile::Gguf(gguf),
            }
        } else {
            let message = "a GGUF file is used as it is stored: leave the quantisation out, or name the directory of \
                           a checkpoint";
            return Err(Error::invalid("config_invalid", message));
        };
        let frames = Frames::probe(&parts.template)?;
        let Digest(tokenizer_digest) = parts.tokenizer.digest();
        let warning = |role: &super::Role| {
            format!("the model's template knows no {} messages: the user's frame is used", role.name())
        };
        Ok(LoadedModel {
            path: path.to_path_buf(),
            precision,
            weights: Arc::new(parts.weights),
            config: parts.config,
            tokenizer: parts.tokenizer,
            template: parts.template,
            warnings: frames.fallbacks().iter().map(warning).collect(),
            frames,
            weights_digest: parts.digest.0,
            tokenizer_digest,
        })
    }
}

fn naming(path: &Path, mut error: Error) -> Error {
    let shown = path.display().to_string();
    if !error.message.contains(&shown) {
        error.message = format!("{shown}: {}", error.message);
    }
    error
}

fn unreadable(error: DigestError) -> Error {
    Error::new(ErrorKind::Unavailable, "model_unreadable", error.to_string())
}

fn checkpoint_digest(checkpoint: &Checkpoint, progress: &dyn Progress) -> Result<Digest, Error> {
    let mut hash = Sha256::new();
    hash.update(b"checkpoint-1");
    hash.update([u8::from(checkpoint.quantises())]);
    let config = checkpoint.config().to_string();
    hash.update((config.len() as u64).to_le_bytes());
    hash.update(config);
    for file in checkpoint.files() {
        hash.update(weights_digest(file, progress).map_err(unreadable)?.0);
    }
    Ok(Digest(hash.finalize().into()))
}

/// The digest of a model's weights without opening the rest of it.
///
/// # Errors
/// The model cannot be read.
pub fn digest_of(path: &Path, progress: &dyn Progress) -> Result<Digest, Error> {
    if path.is_dir() {
        checkpoint_digest(&Checkpoint::open(path, false)?, progress)
    } else {
        weights_digest(path, progress).map_err(unreadable)
    }
}

/// Opens the model of an alias or path, as it is stored. A known alias that is missing is not downloaded here.
///
/// # Errors
/// `model_not_found`, and those of [`LoadedModel::open`].
pub fn open(name: &str) -> Result<LoadedModel, Error> {
    open_as(name, Precision::Stored, &Silent)
}

/// The same with a choice of precision; `progress` is told how far a digest is that is not known yet.
///
/// # Errors
/// Those of [`open`]; `config_invalid` for a GGUF file that is to be quantised.
pub fn open_as(name: &str, precision: Precision, progress: &dyn Progress) -> Result<LoadedModel, Error> {
    let file = catalog::resolve(name)?;
    LoadedModel::open(&file.path, precision, progress)
}

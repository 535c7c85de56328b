//! Opening a model: file, shape, tokenizer, template and digests in one value.

use std::path::Path;
use std::sync::Arc;

use super::architecture::ModelConfig;
use super::catalog;
use super::digest::{Digest, DigestError, weights_digest};
use super::gguf::Gguf;
use super::progress::{Progress, Silent};
use super::template::{ChatTemplate, Frames};
use super::tokenizer::Tokenizer;
use crate::error::{Error, ErrorKind};

/// A model, ready to be put on a device.
#[derive(Debug)]
pub struct LoadedModel {
    /// The file.
    pub gguf: Arc<Gguf>,
    /// Its shape.
    pub config: ModelConfig,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub template: ChatTemplate,
    /// What the template puts around messages.
    pub frames: Frames,
    /// SHA-256 of the file.
    pub weights_digest: [u8; 32],
    /// Digest of everything that decides which ids a text gets.
    pub tokenizer_digest: [u8; 32],
    /// What an operator should know.
    pub warnings: Vec<String>,
}

impl LoadedModel {
    /// Opens a model file. Its digest is computed if it is not known, which reads the whole file and is
    /// reported to `progress`.
    ///
    /// # Errors
    /// `model_not_found`, `model_unreadable`, `model_malformed`, `model_unsupported`, each with the file's path.
    pub fn open(path: &Path, progress: &dyn Progress) -> Result<LoadedModel, Error> {
        LoadedModel::read(path, progress).map_err(|mut error| {
            let shown = path.display().to_string();
            if !error.message.contains(&shown) {
                error.message = format!("{shown}: {}", error.message);
            }
            error
        })
    }

    fn read(path: &Path, progress: &dyn Progress) -> Result<LoadedModel, Error> {
        let gguf = Gguf::open(path)?;
        let config = ModelConfig::from_gguf(&gguf)?;
        let tokenizer = Tokenizer::from_gguf(&gguf)?;
        let template = ChatTemplate::from_gguf(&gguf)?;
        let frames = Frames::probe(&template)?;
        let unknown =
            |error: DigestError| Error::new(ErrorKind::Unavailable, "model_unreadable", error.to_string());
        let Digest(weights_digest) = weights_digest(path, progress).map_err(unknown)?;
        let Digest(tokenizer_digest) = tokenizer.digest();
        let warning = |role: &super::Role| {
            format!("the model's template knows no {} messages: the user's frame is used", role.name())
        };
        let warnings = frames.fallbacks().iter().map(warning).collect();
        Ok(LoadedModel {
            gguf: Arc::new(gguf),
            config,
            tokenizer,
            template,
            frames,
            weights_digest,
            tokenizer_digest,
            warnings,
        })
    }
}

/// Opens the model of an alias or path. A known alias that is missing is not downloaded here.
///
/// # Errors
/// `model_not_found`, and those of [`LoadedModel::open`].
pub fn open(name: &str) -> Result<LoadedModel, Error> {
    let file = catalog::resolve(name)?;
    LoadedModel::open(&file.path, &Silent)
}

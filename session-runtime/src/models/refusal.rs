//! What the errors of this folder mean to a caller of the library: kind, stable code, sentence.

use super::architecture::ArchitectureError;
use super::catalog::CatalogError;
use super::checkpoint::CheckpointError;
use super::constraint::ConstraintError;
use super::download::DownloadError;
use super::gguf::GgufError;
use super::template::TemplateError;
use super::tokenizer::TokenizerError;
use crate::error::{Error, ErrorKind};

const MALFORMED: &str = "model_malformed";
const UNSUPPORTED: &str = "model_unsupported";

impl From<GgufError> for Error {
    fn from(error: GgufError) -> Error {
        let message = error.to_string();
        match error {
            GgufError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Error::not_found("model_not_found", message)
            }
            GgufError::Io { .. } => Error::new(ErrorKind::Unavailable, "model_unreadable", message),
            GgufError::Version { .. } | GgufError::NotFloats { .. } | GgufError::TensorType { .. } => {
                Error::invalid(UNSUPPORTED, message)
            }
            GgufError::NotGguf { .. }
            | GgufError::Malformed { .. }
            | GgufError::MissingKey { .. }
            | GgufError::WrongType { .. }
            | GgufError::MissingTensor { .. } => Error::invalid(MALFORMED, message),
        }
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Error {
        let message = error.to_string();
        match error {
            CheckpointError::Io { .. } => Error::new(ErrorKind::Unavailable, "model_unreadable", message),
            CheckpointError::TensorType { .. } => Error::invalid(UNSUPPORTED, message),
            CheckpointError::Missing { .. }
            | CheckpointError::Malformed { .. }
            | CheckpointError::MissingTensor { .. }
            | CheckpointError::NotFinite { .. } => Error::invalid(MALFORMED, message),
        }
    }
}

impl From<CatalogError> for Error {
    fn from(error: CatalogError) -> Error {
        let message = error.to_string();
        match error {
            CatalogError::Unknown { .. } => Error::not_found("model_not_found", message),
            CatalogError::NotDownloaded { .. } => Error::not_found("model_not_downloaded", message),
            CatalogError::NoCache => Error::invalid("config_invalid", message),
        }
    }
}

impl From<DownloadError> for Error {
    fn from(error: DownloadError) -> Error {
        let message = error.to_string();
        match error {
            DownloadError::Catalog(error) => error.into(),
            DownloadError::Offline { .. } => Error::new(ErrorKind::Denied, "model_offline", message),
            DownloadError::Busy { .. } => Error::new(ErrorKind::Conflict, "model_download_busy", message),
            DownloadError::Io { .. } | DownloadError::Failed { .. } => {
                Error::new(ErrorKind::Unavailable, "model_download_failed", message)
            }
        }
    }
}

impl From<ArchitectureError> for Error {
    fn from(error: ArchitectureError) -> Error {
        let message = error.to_string();
        match error {
            ArchitectureError::Gguf(error) => error.into(),
            ArchitectureError::Checkpoint(error) => error.into(),
            ArchitectureError::Unsupported { .. }
            | ArchitectureError::Feature { .. }
            | ArchitectureError::UnexpectedTensor { .. } => Error::invalid(UNSUPPORTED, message),
            ArchitectureError::Invalid { .. } | ArchitectureError::Shape { .. } => {
                Error::invalid(MALFORMED, message)
            }
        }
    }
}

impl From<TokenizerError> for Error {
    fn from(error: TokenizerError) -> Error {
        let message = error.to_string();
        match error {
            TokenizerError::Gguf(error) => error.into(),
            TokenizerError::Checkpoint(error) => error.into(),
            TokenizerError::Model { .. }
            | TokenizerError::PreTokenizer { .. }
            | TokenizerError::Feature { .. } => Error::invalid(UNSUPPORTED, message),
            TokenizerError::Vocabulary { .. } => Error::invalid(MALFORMED, message),
            TokenizerError::TooLong { .. } => Error::new(ErrorKind::Limit, "text_too_long", message),
            TokenizerError::Encode { .. } => Error::internal(message),
        }
    }
}

impl From<TemplateError> for Error {
    fn from(error: TemplateError) -> Error {
        let message = error.to_string();
        match error {
            TemplateError::Gguf(error) => error.into(),
            TemplateError::Checkpoint(error) => error.into(),
            TemplateError::Tokenizer(error) => error.into(),
            TemplateError::Render { .. } => Error::invalid("template_refused", message),
            TemplateError::Frames { .. } => Error::invalid(UNSUPPORTED, message),
        }
    }
}

impl From<ConstraintError> for Error {
    fn from(error: ConstraintError) -> Error {
        let message = error.to_string();
        match error {
            ConstraintError::TooLong { .. } => Error::new(ErrorKind::Limit, "constraint_too_long", message),
            ConstraintError::Invalid { .. } => Error::invalid("constraint_invalid", message),
            ConstraintError::Vocabulary { .. } => Error::invalid(UNSUPPORTED, message),
            ConstraintError::NotAllowed { .. } => Error::internal(message),
            ConstraintError::Failed { .. } => Error::new(ErrorKind::Limit, "constraint_failed", message),
        }
    }
}

//! The weights of a model, whatever they are stored in.

use std::borrow::Cow;

use super::checkpoint::{Checkpoint, StoredMatrix};
use super::gguf::Gguf;
use crate::error::Error;

/// Open weights. Tensors have the names that GGUF files use.
#[derive(Debug)]
pub enum WeightFile {
    /// A GGUF file.
    Gguf(Gguf),
    /// A directory of safetensors.
    Checkpoint(Checkpoint),
}

/// Where the tensors of a model come from: its files, or numbers that are made up to measure with.
pub trait TensorSource {
    /// A matrix as it goes to a device.
    ///
    /// # Errors
    /// `model_malformed` or `model_unsupported`, naming the tensor.
    fn matrix(&self, name: &str) -> Result<StoredMatrix<'_>, Error>;

    /// A tensor of few values (a norm or a bias), decoded.
    ///
    /// # Errors
    /// `model_malformed` or `model_unsupported`, naming the tensor.
    fn vector(&self, name: &str) -> Result<Vec<f32>, Error>;

    /// The name under which a tensor is stored, for messages.
    fn stored_name(&self, name: &str) -> String;

    /// Bytes of all tensors as they are stored.
    fn stored_bytes(&self) -> u64;
}

impl TensorSource for WeightFile {
    fn matrix(&self, name: &str) -> Result<StoredMatrix<'_>, Error> {
        match self {
            WeightFile::Gguf(gguf) => {
                let view = gguf.tensor(name)?;
                let (format, rows, cols) = (view.format, view.rows, view.cols);
                Ok(StoredMatrix { format, rows, cols, bytes: Cow::Borrowed(view.bytes) })
            }
            WeightFile::Checkpoint(checkpoint) => Ok(checkpoint.matrix(name)?),
        }
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, Error> {
        match self {
            WeightFile::Gguf(gguf) => Ok(gguf.vector(name)?),
            WeightFile::Checkpoint(checkpoint) => Ok(checkpoint.vector(name)?),
        }
    }

    fn stored_name(&self, name: &str) -> String {
        match self {
            WeightFile::Gguf(_) => name.to_owned(),
            WeightFile::Checkpoint(checkpoint) => checkpoint.stored_name(name),
        }
    }

    fn stored_bytes(&self) -> u64 {
        self.file_bytes()
    }
}

impl WeightFile {
    /// Bytes of the weights as they are stored.
    pub fn file_bytes(&self) -> u64 {
        match self {
            WeightFile::Gguf(gguf) => gguf.file_bytes() as u64,
            WeightFile::Checkpoint(checkpoint) => checkpoint.file_bytes(),
        }
    }

    /// Number of values in all tensors.
    pub fn parameters(&self) -> u64 {
        match self {
            WeightFile::Gguf(gguf) => gguf.parameters(),
            WeightFile::Checkpoint(checkpoint) => checkpoint.parameters(),
        }
    }
}

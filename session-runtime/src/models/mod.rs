//! Models: files, shapes, tokenizers and templates.
//!
//! The only place that knows formats of model files. [`gguf`] and [`checkpoint`] read files; [`architecture`],
//! [`tokenizer`] and [`template`] say what is in it; [`catalog`] and [`download`] bring files here;
//! [`constraint`] restricts what may be generated. Knows no device, no session and no HTTP server;
//! the engine takes tensors from here as plain bytes.

pub mod architecture;
pub mod catalog;
pub mod checkpoint;
pub mod constraint;
pub mod digest;
pub mod download;
pub mod gguf;
mod load;
pub mod progress;
mod refusal;
pub mod template;
pub mod tokenizer;
mod weights;

pub use architecture::{Architecture, Gate, LayerKind, LayerTensors, ModelConfig};
pub use checkpoint::{Checkpoint, StoredMatrix};
pub use gguf::{Gguf, TensorView};
pub use load::{LoadedModel, Precision, digest_of, open, open_as};
pub use template::{ChatTemplate, Frames, Message, Role};
pub use tokenizer::{Piece, StreamDecoder, Tokenizer};
pub use weights::{TensorSource, WeightFile};

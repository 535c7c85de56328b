//! Models: files, shapes, tokenizers and templates.
//!
//! The only place that knows formats of model files. [`gguf`] reads the container; [`architecture`],
//! [`tokenizer`] and [`template`] say what is in it; [`catalog`] and [`download`] bring files here;
//! [`constraint`] restricts what may be generated. Knows no device, no session and no HTTP server;
//! the engine takes tensors from here as plain bytes.

pub mod architecture;
pub mod catalog;
pub mod constraint;
pub mod digest;
pub mod download;
pub mod gguf;
mod load;
pub mod progress;
mod refusal;
pub mod template;
pub mod tokenizer;

pub use architecture::{Architecture, LayerKind, LayerTensors, ModelConfig};
pub use gguf::{Gguf, TensorView};
pub use load::{LoadedModel, open};
pub use refusal::refusal;
pub use template::{ChatTemplate, Frames, Message, Role};
pub use tokenizer::{Piece, StreamDecoder, Tokenizer};

//! Models: files, shapes, tokenizers and templates.
//!
//! The only place that knows formats of model files. [`gguf`] reads the container, [`architecture`]
//! and [`tokenizer`] and [`template`] say what is in it. Knows no device, no session and no HTTP
//! server; the engine takes tensors from here as plain bytes.

pub mod architecture;
pub mod gguf;
pub mod template;
pub mod tokenizer;

pub use architecture::{Architecture, LayerKind, LayerTensors, ModelConfig};
pub use gguf::{Gguf, TensorView};
pub use template::{ChatTemplate, Frames, Message, Role};
pub use tokenizer::{Piece, StreamDecoder, Tokenizer};

//! Reading GGUF files (versions 2 and 3): metadata, tensor directory, tensor bytes.
//!
//! Owns the memory map of a model file and every check that makes a hostile file harmless: each
//! length is compared with the bytes that are left before anything is allocated, so a malformed
//! file is a [`GgufError`] that names the key or tensor, never a panic and never a huge allocation.
//! Knows nothing about what the keys and tensors mean; that is `architecture` and `tokenizer`.
//!
//! Format: the GGUF specification of the ggml project, `docs/gguf.md`.

mod parse;
mod value;

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use kernels::formats::TensorType;
use memmap2::Mmap;

pub use value::{Array, Value};

/// Why a GGUF file was refused.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file could not be opened, read or mapped.
    #[error("cannot read model file {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file does not start with the GGUF magic.
    #[error("not a GGUF file: {problem}; convert the model to GGUF first")]
    NotGguf {
        /// What was found instead.
        problem: String,
    },
    /// A version this reader does not know.
    #[error("GGUF version {found} is not supported (supported: 2, 3)")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// The file contradicts itself or ends early.
    #[error("malformed GGUF file: {place}: {problem}; download or convert it again")]
    Malformed {
        /// The key, tensor or header field.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// A key the caller needs is absent.
    #[error("GGUF metadata has no key `{key}`")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A key has another type than the caller needs.
    #[error("GGUF metadata key `{key}` is {found}, expected {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// The type needed.
        expected: &'static str,
        /// The type in the file.
        found: &'static str,
    },
    /// A tensor the caller needs is absent.
    #[error("model file has no tensor `{name}`")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor that must hold plain floats is quantised.
    #[error("tensor `{name}` is {format}, but a norm or bias must be F32, F16 or BF16")]
    NotFloats {
        /// The tensor.
        name: String,
        /// Its type.
        format: TensorType,
    },
    /// A tensor is stored in a format that this runtime has no kernels for.
    #[error("tensor `{name}` has unsupported type {found} (supported: {supported})")]
    TensorType {
        /// The tensor.
        name: String,
        /// Name of the type where the format has one, and its ggml id.
        found: String,
        /// What is supported, for people.
        supported: String,
    },
}

/// One tensor of a model file, as stored.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Storage type.
    pub format: TensorType,
    /// Outputs: the product of all dimensions but the first.
    pub rows: usize,
    /// Inputs: the first (contiguous) dimension.
    pub cols: usize,
    /// `format.tensor_bytes(rows, cols)` bytes, row after row.
    pub bytes: &'a [u8],
}

/// Where a tensor lies in the file.
#[derive(Clone, Debug)]
struct TensorInfo {
    name: String,
    type_id: u32,
    rows: usize,
    cols: usize,
    /// Offset from the start of the data section.
    offset: usize,
    /// Range in the file; `None` when the type is unknown, so its size is too.
    range: Option<Range<usize>>,
}

/// The bytes of a file: mapped, or owned (tests and files received over a wire).
enum Source {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            Source::Mapped(map) => map,
            Source::Owned(bytes) => bytes,
        }
    }
}

/// An open GGUF file.
pub struct Gguf {
    source: Source,
    version: u32,
    metadata: HashMap<String, Value>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gguf")
            .field("version", &self.version)
            .field("bytes", &self.source.bytes().len())
            .field("keys", &self.metadata.len())
            .field("tensors", &self.tensors.len())
            .finish()
    }
}

impl Gguf {
    /// Maps `path` and reads its header. The file must not be changed in place while it is open;
    /// replace it by renaming a new file over it.
    ///
    /// # Errors
    /// [`GgufError::Io`] when the file cannot be read, otherwise what is wrong with its content.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let io = |source| GgufError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(io(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file")));
        }
        // SAFETY: the map is read-only and only ever seen as `&[u8]` of plain bytes. Nobody in this
        // process writes to model files; downloads go to another name and are renamed when complete.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Gguf::from_source(Source::Mapped(map))
    }

    /// Reads a file that is already in memory.
    ///
    /// # Errors
    /// What is wrong with its content.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Gguf, GgufError> {
        Gguf::from_source(Source::Owned(bytes))
    }

    fn from_source(source: Source) -> Result<Gguf, GgufError> {
        let header = parse::header(source.bytes())?;
        let by_name = header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(Gguf {
            source,
            version: header.version,
            metadata: header.metadata,
            tensors: header.tensors,
            by_name,
        })
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Size of the file in bytes.
    pub fn file_bytes(&self) -> usize {
        self.source.bytes().len()
    }

    /// The whole file, for hashing.
    pub fn raw(&self) -> &[u8] {
        self.source.bytes()
    }

    /// Metadata keys, sorted.
    pub fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = self.metadata.keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    /// Names of the tensors in file order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|t| t.name.as_str())
    }

    /// Whether the file has a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`], or [`GgufError::TensorType`] for a type without kernels.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, GgufError> {
        let index = self.by_name.get(name);
        let info = index.and_then(|&i| self.tensors.get(i));
        let info = info.ok_or_else(|| GgufError::MissingTensor { name: name.to_string() })?;
        let unsupported = || GgufError::TensorType {
            name: name.to_string(),
            found: parse::type_name(info.type_id),
            supported: parse::supported_types(),
        };
        let format = TensorType::from_ggml_id(info.type_id).ok_or_else(unsupported)?;
        let range = info.range.clone().ok_or_else(unsupported)?;
        let bytes = self.source.bytes().get(range).ok_or_else(|| GgufError::Malformed {
            place: format!("tensor `{name}`"),
            problem: "its data lies outside the file".to_string(),
        })?;
        Ok(TensorView { name: &info.name, format, rows: info.rows, cols: info.cols, bytes })
    }

    /// A tensor of few values (a norm or a bias), decoded.
    ///
    /// # Errors
    /// Those of [`Gguf::tensor`]; [`GgufError::NotFloats`] for a quantised tensor.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, GgufError> {
        let view = self.tensor(name)?;
        let halves = || view.bytes.as_chunks::<2>().0.iter();
        match view.format {
            TensorType::F32 => {
                Ok(view.bytes.as_chunks::<4>().0.iter().map(|&value| f32::from_le_bytes(value)).collect())
            }
            TensorType::F16 => Ok(halves().map(|&value| half::f16::from_le_bytes(value).to_f32()).collect()),
            TensorType::BF16 => {
                Ok(halves().map(|&value| half::bf16::from_le_bytes(value).to_f32()).collect())
            }
            other => Err(GgufError::NotFloats { name: name.to_string(), format: other }),
        }
    }

    /// Number of values in all tensors.
    pub fn parameters(&self) -> u64 {
        self.tensors.iter().map(|info| (info.rows as u64).saturating_mul(info.cols as u64)).sum()
    }

    /// A metadata value, if the key is there.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// A metadata value.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`].
    pub fn require(&self, key: &str) -> Result<&Value, GgufError> {
        self.get(key).ok_or_else(|| GgufError::MissingKey { key: key.to_string() })
    }

    /// A whole number of any width that fits `u32`.
    ///
    /// # Errors
    /// Missing key, another type, or a value outside `u32`.
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        let value = self.require(key)?;
        value.as_u32().ok_or_else(|| wrong_type(key, "a whole number in 0..2^32", value))
    }

    /// Like [`Gguf::u32`], `None` when the key is absent.
    ///
    /// # Errors
    /// Another type, or a value outside `u32`.
    pub fn optional_u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        if self.get(key).is_none() { Ok(None) } else { self.u32(key).map(Some) }
    }

    /// A floating-point value.
    ///
    /// # Errors
    /// Missing key or another type.
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        let value = self.require(key)?;
        value.as_f32().ok_or_else(|| wrong_type(key, "a float", value))
    }

    /// A string.
    ///
    /// # Errors
    /// Missing key or another type.
    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        let value = self.require(key)?;
        value.as_str().ok_or_else(|| wrong_type(key, "a string", value))
    }

    /// An array of strings.
    ///
    /// # Errors
    /// Missing key or another type.
    pub fn strings(&self, key: &str) -> Result<&[String], GgufError> {
        match self.require(key)? {
            Value::Array(Array::String(strings)) => Ok(strings),
            other => Err(wrong_type(key, "an array of strings", other)),
        }
    }
}

fn wrong_type(key: &str, expected: &'static str, found: &Value) -> GgufError {
    GgufError::WrongType { key: key.to_string(), expected, found: found.type_name() }
}

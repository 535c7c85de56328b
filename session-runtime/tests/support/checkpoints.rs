//! The small checkpoints that `tests/fixtures/checkpoints.py` makes, and what is known of them.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// A checkpoint in a directory of its own, so that nothing is written beside the fixture.
pub struct TinyCheckpoint {
    directory: tempfile::TempDir,
    fixture: PathBuf,
}

impl TinyCheckpoint {
    /// Copies the checkpoint of `name`: `llama`, `qwen2`, `qwen3` or `gemma3`.
    pub fn new(name: &str) -> Self {
        let fixture =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/checkpoint_{name}"));
        let directory = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(&fixture).unwrap() {
            let path = entry.unwrap().path();
            let file = path.file_name().unwrap().to_str().unwrap();
            if file.ends_with(".json") || file.ends_with(".safetensors") {
                fs::copy(&path, directory.path().join(file)).unwrap();
            }
        }
        Self { directory, fixture }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The directory as a model's name.
    pub fn name(&self) -> String {
        self.path().to_str().unwrap().to_owned()
    }

    /// Changes a JSON file.
    pub fn edit(&self, file: &str, change: impl FnOnce(&mut serde_json::Value)) {
        let path = self.path().join(file);
        let mut json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        fs::write(path, json.to_string()).unwrap();
    }

    /// What the reference computes.
    pub fn logits(&self) -> ReferenceLogits {
        let data = fs::read(self.fixture.join("logits.bin")).unwrap();
        let words: Vec<u32> = data
            .strip_prefix(b"CHECKPT1")
            .unwrap()
            .as_chunks()
            .0
            .iter()
            .copied()
            .map(u32::from_le_bytes)
            .collect();
        let (header, rest) = words.split_at(3);
        let (tokens, positions, vocab) = (header[0] as usize, header[1] as usize, header[2] as usize);
        let (ids, rest) = rest.split_at(tokens);
        let (places, rest) = rest.split_at(positions);
        let (exact, rounded) = rest.split_at(positions * vocab);
        let floats = |words: &[u32]| words.iter().copied().map(f32::from_bits).collect();
        ReferenceLogits {
            ids: ids.to_vec(),
            positions: places.iter().map(|place| *place as usize).collect(),
            vocab,
            exact: floats(exact),
            rounded: floats(rounded),
        }
    }

    /// SHA-256 of matrices as the reference quantises them to Q8_0, by stored name.
    pub fn quantised(&self) -> std::collections::BTreeMap<String, String> {
        serde_json::from_slice(&fs::read(self.fixture.join("quantised.json")).unwrap()).unwrap()
    }

    /// Texts and their ids by the reference.
    pub fn encoded(&self) -> Vec<EncodedText> {
        serde_json::from_slice(&fs::read(self.fixture.join("encoded.json")).unwrap()).unwrap()
    }
}

/// Logits of some positions of one sequence.
pub struct ReferenceLogits {
    pub ids: Vec<u32>,
    pub positions: Vec<usize>,
    pub vocab: usize,
    /// In float32 throughout; a row for each position.
    pub exact: Vec<f32>,
    /// With K and V rounded to half precision, as pages hold them.
    pub rounded: Vec<f32>,
}

/// A text and its ids.
#[derive(Debug, Deserialize)]
pub struct EncodedText {
    pub text: String,
    pub ids: Vec<u32>,
}

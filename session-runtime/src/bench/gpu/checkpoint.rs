//! Two small checkpoints with logits that another program computed, inside of this one: they are there where no file is.

use std::path::{Path, PathBuf};

use crate::error::Error;

/// A checkpoint's files and its logits.
pub(super) struct Embedded {
    pub name: &'static str,
    files: &'static [(&'static str, &'static [u8])],
    logits: &'static [u8],
}

macro_rules! embedded {
    ($name:literal) => {
        Embedded {
            name: $name,
            files: &[
                (
                    "config.json",
                    include_bytes!(concat!("../../../tests/fixtures/checkpoint_", $name, "/config.json")),
                ),
                (
                    "tokenizer.json",
                    include_bytes!(concat!("../../../tests/fixtures/checkpoint_", $name, "/tokenizer.json")),
                ),
                (
                    "tokenizer_config.json",
                    include_bytes!(concat!(
                        "../../../tests/fixtures/checkpoint_",
                        $name,
                        "/tokenizer_config.json"
                    )),
                ),
                (
                    "generation_config.json",
                    include_bytes!(concat!(
                        "../../../tests/fixtures/checkpoint_",
                        $name,
                        "/generation_config.json"
                    )),
                ),
                (
                    "model.safetensors",
                    include_bytes!(concat!(
                        "../../../tests/fixtures/checkpoint_",
                        $name,
                        "/model.safetensors"
                    )),
                ),
            ],
            logits: include_bytes!(concat!("../../../tests/fixtures/checkpoint_", $name, "/logits.bin")),
        }
    };
}

/// One of full layers, one of window layers too.
pub(super) const CHECKPOINTS: [Embedded; 2] = [embedded!("llama"), embedded!("gemma3")];

/// What the other program computed: of some positions of one sequence.
pub(super) struct KnownLogits {
    pub ids: Vec<u32>,
    pub positions: Vec<usize>,
    pub vocab: usize,
    /// In float32 throughout; a row for each position.
    pub exact: Vec<f32>,
    /// With K and V rounded to f16.
    pub rounded: Vec<f32>,
}

impl Embedded {
    /// Writes the checkpoint below `folder`; its directory.
    ///
    /// # Errors
    /// The files cannot be written.
    pub(super) fn unpack(&self, folder: &Path) -> Result<PathBuf, Error> {
        let directory = folder.join(self.name);
        std::fs::create_dir_all(&directory).map_err(Error::internal)?;
        for (file, bytes) in self.files {
            std::fs::write(directory.join(file), bytes).map_err(Error::internal)?;
        }
        Ok(directory)
    }

    /// Its logits; `tests/fixtures/checkpoints.py` says how they are laid out.
    ///
    /// # Errors
    /// They are not laid out so.
    pub(super) fn logits(&self) -> Result<KnownLogits, Error> {
        parse(self.logits).ok_or_else(|| Error::internal(format!("the logits of {} are damaged", self.name)))
    }
}

fn parse(data: &[u8]) -> Option<KnownLogits> {
    let words = data.strip_prefix(b"CHECKPT1")?.as_chunks().0;
    let words: Vec<u32> = words.iter().copied().map(u32::from_le_bytes).collect();
    let (header, rest) = words.split_at_checked(3)?;
    let (tokens, positions, vocab) = (header[0] as usize, header[1] as usize, header[2] as usize);
    let (ids, rest) = rest.split_at_checked(tokens)?;
    let (places, rest) = rest.split_at_checked(positions)?;
    let (exact, rounded) = rest.split_at_checked(positions.checked_mul(vocab)?)?;
    let floats = |words: &[u32]| words.iter().copied().map(f32::from_bits).collect();
    Some(KnownLogits {
        ids: ids.to_vec(),
        positions: places.iter().map(|place| *place as usize).collect(),
        vocab,
        exact: floats(exact),
        rounded: floats(rounded),
    })
}

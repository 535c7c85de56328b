//! Text to token ids and back, as the model was trained.
//!
//! Owns the vocabulary of a model file and the rule that text from people and programs can never
//! become a control token: only [`Tokenizer::encode_with_specials`], which is for the frames of the
//! chat template, reads `<|im_start|>` and its like as tokens. Byte-pair encoding itself is the
//! `tokenizers` crate. Knows no templates and no sessions.

mod bytes;
mod json;
mod stream;

use std::collections::HashMap;

use sha2::{Digest as _, Sha256};
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

use super::checkpoint::CheckpointError;
use super::digest::Digest;
use super::gguf::{Gguf, GgufError, Value};

pub use stream::StreamDecoder;

/// Why a tokenizer was refused or a text could not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The metadata lacks something or has it in another type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file of the checkpoint is absent or malformed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A feature of `tokenizer.json` this version does not know.
    #[error("tokenizer.json: {feature} is not supported: {found} (supported: {supported})")]
    Feature {
        /// The feature.
        feature: &'static str,
        /// What the file asks for.
        found: String,
        /// What would work.
        supported: &'static str,
    },
    /// A kind of tokenizer this version does not know.
    #[error("tokenizer `{found}` is not supported (supported: gpt2, byte-level BPE)")]
    Model {
        /// `tokenizer.ggml.model` of the file.
        found: String,
    },
    /// A pre-tokenizer this version does not know; another one would give other tokens.
    #[error("pre-tokenizer `{found}` is not supported (supported: smollm, qwen2)")]
    PreTokenizer {
        /// `tokenizer.ggml.pre` of the file.
        found: String,
    },
    /// The vocabulary contradicts itself.
    #[error("vocabulary: {problem}")]
    Vocabulary {
        /// What is wrong, with the token.
        problem: String,
    },
    /// The text is longer than [`MAX_TEXT_BYTES`].
    #[error("a text of {bytes} bytes cannot be encoded at once (at most {MAX_TEXT_BYTES})")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// Encoding failed.
    #[error("cannot encode text: {problem}")]
    Encode {
        /// What the encoder said.
        problem: String,
    },
}

/// Longest text that is encoded at once, in bytes: far above any context, far below memory.
pub const MAX_TEXT_BYTES: usize = 64 << 20;
/// Most tokens of a vocabulary.
const MAX_VOCAB: usize = 1 << 21;

/// How text is cut into words before byte-pair merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PreTokenizer {
    /// Single digits, then the GPT-2 pattern.
    SmolLm,
    /// NFC, then the Qwen2 pattern.
    Qwen2,
}

/// Control tokens that end a turn whatever the file names as its end token.
const END_OF_TURN: [&str; 4] = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>"];

/// The pattern of Qwen2's pre-tokenizer, as published with the model.
const QWEN2_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What a token is for, from `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Made by merges; stands for bytes of text.
    Normal,
    /// Steers the model (`<|im_end|>`); never made from plain text and never shown as text.
    Control,
    /// A whole string added to the vocabulary (`<tool_call>`); matched in any text, shown as text.
    Added,
    /// Padding of the vocabulary; never made from text.
    Unused,
}

/// A part of a text by its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// From the model's chat template: names of control tokens in it are those tokens.
    Frame(&'a str),
    /// From anywhere else: never becomes a control token.
    Text(&'a str),
}

impl<'a> Piece<'a> {
    /// The characters, whatever their origin.
    pub fn as_str(self) -> &'a str {
        match self {
            Piece::Frame(text) | Piece::Text(text) => text,
        }
    }
}

/// The tokenizer of one model.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pre_tokenizer: String,
    /// Bytes of all tokens, one after another; token `i` ends at `ends[i]`.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
    /// Tokens matched as whole strings, by their first byte, longest first.
    whole: HashMap<u8, Vec<u32>>,
    /// Control and added tokens by their text.
    specials: HashMap<String, u32>,
    eos: u32,
    end_of_turn: Vec<u32>,
    digest: Digest,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("pre_tokenizer", &self.pre_tokenizer)
            .field("vocab", &self.ends.len())
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads the tokenizer of a model file.
    ///
    /// # Errors
    /// A kind of tokenizer or pre-tokenizer that is not supported, or a vocabulary that contradicts itself.
    pub fn from_gguf(gguf: &Gguf) -> Result<Tokenizer, TokenizerError> {
        let model = gguf.str("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(TokenizerError::Model { found: model.to_string() });
        }
        let pre = gguf.str("tokenizer.ggml.pre")?;
        let pre_tokenizer = match pre {
            "smollm" => PreTokenizer::SmolLm,
            "qwen2" => PreTokenizer::Qwen2,
            other => return Err(TokenizerError::PreTokenizer { found: other.to_string() }),
        };
        let tokens = gguf.strings("tokenizer.ggml.tokens")?;
        let merges = gguf.strings("tokenizer.ggml.merges")?;
        if tokens.is_empty() || tokens.len() > MAX_VOCAB {
            return Err(vocabulary(format!("{} tokens (1 to {MAX_VOCAB} allowed)", tokens.len())));
        }
        let kinds = token_kinds(gguf, tokens.len())?;
        let (bytes, ends) = token_bytes(tokens, &kinds);
        let (specials, whole) = whole_tokens(tokens, &kinds);
        let eos = gguf.u32("tokenizer.ggml.eos_token_id")?;
        if eos as usize >= tokens.len() {
            return Err(vocabulary(format!("eos_token_id {eos} is outside the {} tokens", tokens.len())));
        }
        let mut end_of_turn = vec![eos];
        for name in END_OF_TURN {
            end_of_turn
                .extend(specials.get(name).copied().filter(|&id| kinds[id as usize] == TokenKind::Control));
        }
        end_of_turn.sort_unstable();
        end_of_turn.dedup();
        Ok(Tokenizer {
            inner: build(pre_tokenizer, tokens, merges)?,
            pre_tokenizer: pre.to_string(),
            bytes,
            ends,
            digest: digest(pre, tokens, merges, &kinds),
            kinds,
            whole,
            specials,
            eos,
            end_of_turn,
        })
    }

    /// Encodes text that people, tools or models wrote. Names of control tokens in it stay plain
    /// text; added tokens (`<tool_call>`) are matched, as in the model's training.
    ///
    /// # Errors
    /// [`TokenizerError::TooLong`]; [`TokenizerError::Encode`] if the encoder fails.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_pieces(&[Piece::Text(text)])
    }

    /// Encodes a frame of the chat template: names of control tokens become those tokens. Never
    /// call it with text from outside.
    ///
    /// # Errors
    /// [`TokenizerError::TooLong`]; [`TokenizerError::Encode`] if the encoder fails.
    pub fn encode_with_specials(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_pieces(&[Piece::Frame(text)])
    }

    /// Encodes frames and the text between them as one run, so that tokens may cross the borders as
    /// they do when the whole is one string; only names inside a frame become control tokens.
    ///
    /// # Errors
    /// [`TokenizerError::TooLong`]; [`TokenizerError::Encode`] if the encoder fails.
    pub fn encode_pieces(&self, pieces: &[Piece<'_>]) -> Result<Vec<u32>, TokenizerError> {
        let length: usize = pieces.iter().map(|piece| piece.as_str().len()).sum();
        if length > MAX_TEXT_BYTES {
            return Err(TokenizerError::TooLong { bytes: length });
        }
        let mut ids = Vec::with_capacity(length / 3 + 1);
        let mut run = String::new();
        for piece in pieces {
            match *piece {
                Piece::Text(text) => run.push_str(text),
                Piece::Frame(text) => {
                    let mut rest = text;
                    while let Some((at, id)) = self.find_whole(rest, TokenKind::Control) {
                        run.push_str(&rest[..at]);
                        self.encode_run(&run, &mut ids)?;
                        run.clear();
                        ids.push(id);
                        rest = &rest[at + self.token_bytes(id).len()..];
                    }
                    run.push_str(rest);
                }
            }
        }
        self.encode_run(&run, &mut ids)?;
        Ok(ids)
    }

    /// Bytes a token stands for: UTF-8 only when several tokens are put together. Empty for an id
    /// outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        self.bytes.get(start as usize..end as usize).unwrap_or(&[])
    }

    /// What a token is for; [`TokenKind::Unused`] for an id outside the vocabulary.
    pub fn token_kind(&self, id: u32) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or(TokenKind::Unused)
    }

    /// The text of `ids`, control tokens included; bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id).iter().copied()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Tokens in the vocabulary, padding included.
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
    }

    /// The token that ends a generation.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// Tokens that end a turn, ascending: the end tokens and `<|im_end|>` and its like where the model has them.
    pub fn end_of_turn(&self) -> &[u32] {
        &self.end_of_turn
    }

    /// Whether `id` ends a turn.
    pub fn is_end_of_turn(&self, id: u32) -> bool {
        self.end_of_turn.binary_search(&id).is_ok()
    }

    /// A control or added token by its text, such as `<|im_start|>`.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.specials.get(text).copied()
    }

    /// Name of the pre-tokenizer, as in the model file.
    pub fn pre_tokenizer(&self) -> &str {
        &self.pre_tokenizer
    }

    /// SHA-256 over everything that decides which ids a text gets: vocabulary, kinds, merges, pre-tokenizer.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The first token of `kind` that occurs in `text` as a whole string, the longest at that place.
    fn find_whole(&self, text: &str, kind: TokenKind) -> Option<(usize, u32)> {
        let bytes = text.as_bytes();
        (0..bytes.len()).find_map(|at| {
            let candidates = self.whole.get(&bytes[at])?;
            let fits =
                |id: &u32| self.token_kind(*id) == kind && bytes[at..].starts_with(self.token_bytes(*id));
            candidates.iter().copied().find(fits).map(|id| (at, id))
        })
    }

    /// Encodes text without control tokens.
    fn encode_run(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let mut rest = text;
        while let Some((at, id)) = self.find_whole(rest, TokenKind::Added) {
            self.encode_plain(&rest[..at], ids)?;
            ids.push(id);
            rest = &rest[at + self.token_bytes(id).len()..];
        }
        self.encode_plain(rest, ids)
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let failed = |error: tokenizers::Error| TokenizerError::Encode { problem: error.to_string() };
        ids.extend_from_slice(self.inner.encode_fast(text, false).map_err(failed)?.get_ids());
        Ok(())
    }
}

/// Tokens matched as whole strings: by their text, and by their first byte, longest first.
fn whole_tokens(tokens: &[String], kinds: &[TokenKind]) -> (HashMap<String, u32>, HashMap<u8, Vec<u32>>) {
    let mut specials = HashMap::new();
    let mut whole: HashMap<u8, Vec<u32>> = HashMap::new();
    for (id, (token, &kind)) in (0u32..).zip(tokens.iter().zip(kinds)) {
        if matches!(kind, TokenKind::Control | TokenKind::Added)
            && let Some(&first) = token.as_bytes().first()
        {
            specials.insert(token.clone(), id);
            whole.entry(first).or_default().push(id);
        }
    }
    let length = |id: u32| tokens.get(id as usize).map_or(0, String::len);
    for ids in whole.values_mut() {
        ids.sort_by_key(|&id| (std::cmp::Reverse(length(id)), id));
    }
    (specials, whole)
}

fn vocabulary(problem: String) -> TokenizerError {
    TokenizerError::Vocabulary { problem }
}

fn token_kinds(gguf: &Gguf, count: usize) -> Result<Vec<TokenKind>, TokenizerError> {
    let key = "tokenizer.ggml.token_type";
    let integers = match gguf.require(key)? {
        Value::Array(array) => array.as_integers(),
        _ => None,
    };
    let integers = integers.ok_or_else(|| vocabulary(format!("`{key}` is not an array of integers")))?;
    if integers.len() != count {
        return Err(vocabulary(format!("{count} tokens, but {} token types", integers.len())));
    }
    let kind = |(id, &value): (usize, &i64)| match value {
        1 => Ok(TokenKind::Normal),
        2 | 3 => Ok(TokenKind::Control),
        4 => Ok(TokenKind::Added),
        5 => Ok(TokenKind::Unused),
        other => Err(vocabulary(format!("token {id} has type {other} (supported: 1 to 5)"))),
    };
    integers.iter().enumerate().map(kind).collect()
}

fn token_bytes(tokens: &[String], kinds: &[TokenKind]) -> (Vec<u8>, Vec<u32>) {
    let mut bytes = Vec::new();
    let mut ends = Vec::with_capacity(tokens.len());
    for (token, &kind) in tokens.iter().zip(kinds) {
        let decoded = if kind == TokenKind::Normal { bytes::decode(token) } else { None };
        match decoded {
            Some(decoded) => bytes.extend_from_slice(&decoded),
            None => bytes.extend_from_slice(token.as_bytes()),
        }
        ends.push(bytes.len() as u32);
    }
    (bytes, ends)
}

fn build(
    pre_tokenizer: PreTokenizer,
    tokens: &[String],
    merges: &[String],
) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let failed = |error: tokenizers::Error| vocabulary(error.to_string());
    let mut vocab = tokenizers::models::bpe::Vocab::default();
    for (id, token) in (0u32..).zip(tokens) {
        if let Some(first) = vocab.insert(token.clone(), id) {
            return Err(vocabulary(format!("tokens {first} and {id} are both {token:?}")));
        }
    }
    check_bytes(&|name| vocab.contains_key(name))?;
    let split = |merge: &String| {
        let pair = merge.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.is_empty());
        let pair = pair.map(|(left, right)| (left.to_string(), right.to_string()));
        pair.ok_or_else(|| vocabulary(format!("merge {merge:?} is not a pair")))
    };
    let merges = merges.iter().map(split).collect::<Result<Vec<_>, _>>()?;
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).build().map_err(failed)?;
    let mut inner = tokenizers::Tokenizer::new(bpe);
    let steps: Vec<PreTokenizerWrapper> = match pre_tokenizer {
        PreTokenizer::SmolLm => {
            vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()]
        }
        PreTokenizer::Qwen2 => {
            inner.with_normalizer(Some(NFC)).map_err(failed)?;
            let pattern = SplitPattern::Regex(QWEN2_PATTERN.to_string());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(failed)?;
            vec![split.into(), ByteLevel::new(false, false, false).into()]
        }
    };
    inner.with_pre_tokenizer(Some(Sequence::new(steps)));
    Ok(inner)
}

/// Refuses a vocabulary that would lose ordinary text. A few published ones lack control characters
/// and lead bytes of unassigned planes; their tokenizers drop those, and so does this one.
fn check_bytes(has: &dyn Fn(&str) -> bool) -> Result<(), TokenizerError> {
    let needed =
        (0..=0xF0u8).filter(|byte| matches!(byte, b'\t' | b'\n' | b' '..=b'~' | 0x80..=0xBF | 0xC2..));
    for byte in needed {
        if !has(bytes::encode(byte).encode_utf8(&mut [0; 4])) {
            return Err(vocabulary(format!("there is no token for byte 0x{byte:02x}")));
        }
    }
    Ok(())
}

fn digest(pre: &str, tokens: &[String], merges: &[String], kinds: &[TokenKind]) -> Digest {
    let mut hash = Sha256::new();
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(b"tokenizer-1");
    field(pre.as_bytes());
    for list in [tokens, merges] {
        field(&(list.len() as u64).to_le_bytes());
        list.iter().for_each(|item| field(item.as_bytes()));
    }
    let kinds: Vec<u8> = kinds.iter().map(|&kind| kind as u8).collect();
    field(&kinds);
    Digest(hash.finalize().into())
}

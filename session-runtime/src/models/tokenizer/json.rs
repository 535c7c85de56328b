//! The tokenizer of a checkpoint: `tokenizer.json`.
//!
//! The pipeline (normaliser, pre-tokenizer, byte-pair merges) runs as the file describes it. Its list of
//! added tokens is taken out of the pipeline and matched by [`Tokenizer`] itself, because only that
//! keeps control tokens out of plain text.

use std::collections::HashMap;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{END_OF_TURN, MAX_VOCAB, TokenKind, Tokenizer, TokenizerError, bytes, vocabulary, whole_tokens};
use crate::models::checkpoint::Checkpoint;
use crate::models::digest::Digest;

/// How tokens of text are written in the vocabulary.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    /// A printable character for each byte (GPT-2).
    ByteLevel,
    /// Characters with U+2581 for a space, and `<0xNN>` for bytes that are in no token.
    ByteFallback,
}

impl Tokenizer {
    /// Reads the tokenizer of a checkpoint whose logits have `vocab` entries.
    ///
    /// # Errors
    /// A kind of tokenizer that is not supported, or a vocabulary that contradicts itself.
    pub fn from_checkpoint(checkpoint: &Checkpoint, vocab: usize) -> Result<Tokenizer, TokenizerError> {
        if vocab == 0 || vocab > MAX_VOCAB {
            return Err(vocabulary(format!("{vocab} tokens (1 to {MAX_VOCAB} allowed)")));
        }
        let (json, raw) = checkpoint.tokenizer()?;
        let alphabet = alphabet(&json)?;
        let (tokens, kinds) = tokens(&json, vocab)?;
        let (specials, whole) = whole_tokens(&tokens, &kinds);
        let (bytes, ends) = token_bytes(&tokens, &kinds, alphabet);
        check_alphabet(&json, alphabet)?;
        let ends_of_turn = end_tokens(checkpoint, &specials, &kinds, vocab)?;
        let mut end_of_turn = ends_of_turn.clone();
        let is_control = |id: &u32| kinds.get(*id as usize) == Some(&TokenKind::Control);
        end_of_turn
            .extend(END_OF_TURN.iter().filter_map(|name| specials.get(*name)).filter(|id| is_control(id)));
        end_of_turn.sort_unstable();
        end_of_turn.dedup();
        let eos = ends_of_turn.first().copied();
        let eos =
            eos.ok_or_else(|| vocabulary("no end token: set eos_token_id in config.json".to_owned()))?;
        let mut hash = Sha256::new();
        hash.update(b"tokenizer-json-1");
        hash.update((vocab as u64).to_le_bytes());
        hash.update(&raw);
        Ok(Tokenizer {
            inner: pipeline(json)?,
            pre_tokenizer: "tokenizer.json".to_owned(),
            bytes,
            ends,
            kinds,
            whole,
            specials,
            eos,
            end_of_turn,
            digest: Digest(hash.finalize().into()),
        })
    }
}

/// The pipeline without added tokens and without what it would put around a text.
fn pipeline(mut json: Value) -> Result<tokenizers::Tokenizer, TokenizerError> {
    if let Some(object) = json.as_object_mut() {
        object.insert("added_tokens".to_owned(), json!([]));
        for name in ["post_processor", "truncation", "padding"] {
            object.insert(name.to_owned(), Value::Null);
        }
    }
    let text = json.to_string();
    drop(json);
    tokenizers::Tokenizer::from_bytes(text).map_err(|error| vocabulary(format!("tokenizer.json: {error}")))
}

fn alphabet(json: &Value) -> Result<Alphabet, TokenizerError> {
    let model = json.get("model").unwrap_or(&Value::Null);
    // Files of old versions leave the type out; byte-pair encoding is what has merges.
    let kind = model.get("type").and_then(Value::as_str);
    if kind.unwrap_or("BPE") != "BPE" || model.get("merges").is_none() {
        let found = kind.unwrap_or("a model without merges").to_owned();
        return Err(TokenizerError::Feature { feature: "model", found, supported: "BPE" });
    }
    let byte_level = |part: &str| json.get(part).is_some_and(|part| mentions(part, "ByteLevel"));
    if byte_level("pre_tokenizer") {
        Ok(Alphabet::ByteLevel)
    } else if model.get("byte_fallback").and_then(Value::as_bool) == Some(true) {
        Ok(Alphabet::ByteFallback)
    } else {
        Err(TokenizerError::Feature {
            feature: "an alphabet",
            found: "neither ByteLevel nor byte_fallback".to_owned(),
            supported: "those two, which lose no text",
        })
    }
}

/// Whether a step, or one inside a sequence of steps, is of this type.
fn mentions(step: &Value, kind: &str) -> bool {
    let inside = ["pretokenizers", "normalizers", "decoders"].iter().filter_map(|list| step.get(list));
    step.get("type").is_some_and(|found| found == kind)
        || inside.filter_map(Value::as_array).flatten().any(|step| {
            // One level is what the format has in practice; deeper nesting is refused by the pipeline's reader.
            step.get("type").is_some_and(|found| found == kind)
        })
}

/// Text and kind of every id up to `vocab`; ids without a token are padding.
fn tokens(json: &Value, vocab: usize) -> Result<(Vec<String>, Vec<TokenKind>), TokenizerError> {
    let mut tokens = vec![String::new(); vocab];
    let mut kinds = vec![TokenKind::Unused; vocab];
    let words = json.get("model").and_then(|model| model.get("vocab")).and_then(Value::as_object);
    let words = words.ok_or_else(|| vocabulary("tokenizer.json: model.vocab is not an object".to_owned()))?;
    let place = |text: &str, id: Option<u64>| {
        let id = id.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < vocab);
        id.ok_or_else(|| vocabulary(format!("token {text:?} has no id below the {vocab} of config.json")))
    };
    for (text, id) in words {
        let id = place(text, id.as_u64())?;
        if kinds[id] != TokenKind::Unused {
            return Err(vocabulary(format!("tokens {:?} and {text:?} are both {id}", tokens[id])));
        }
        tokens[id].clone_from(text);
        kinds[id] = TokenKind::Normal;
    }
    let added = json.get("added_tokens").and_then(Value::as_array);
    for token in added.into_iter().flatten() {
        let text = token.get("content").and_then(Value::as_str).unwrap_or_default();
        let id = place(text, token.get("id").and_then(Value::as_u64))?;
        if text.is_empty() || (kinds[id] != TokenKind::Unused && tokens[id] != text) {
            return Err(vocabulary(format!("added token {text:?} is empty or shares id {id} with another")));
        }
        for flag in ["lstrip", "rstrip", "single_word"] {
            if token.get(flag).and_then(Value::as_bool) == Some(true) {
                let found = format!("token {text:?} has `{flag}`");
                let feature = "an added token that depends on its neighbours";
                return Err(TokenizerError::Feature { feature, found, supported: "plain added tokens" });
            }
        }
        let special = token.get("special").and_then(Value::as_bool) == Some(true);
        tokens[id] = text.to_owned();
        kinds[id] = if special { TokenKind::Control } else { TokenKind::Added };
    }
    Ok((tokens, kinds))
}

fn token_bytes(tokens: &[String], kinds: &[TokenKind], alphabet: Alphabet) -> (Vec<u8>, Vec<u32>) {
    let mut all = Vec::new();
    let mut ends = Vec::with_capacity(tokens.len());
    for (token, &kind) in tokens.iter().zip(kinds) {
        match (kind, alphabet) {
            (TokenKind::Normal, Alphabet::ByteLevel) => {
                all.extend(bytes::decode(token).unwrap_or_else(|| token.clone().into_bytes()));
            }
            (TokenKind::Normal, Alphabet::ByteFallback) => match byte_of(token) {
                Some(byte) => all.push(byte),
                None => all.extend(token.replace('\u{2581}', " ").bytes()),
            },
            _ => all.extend(token.bytes()),
        }
        ends.push(all.len() as u32);
    }
    (all, ends)
}

/// The byte of a token `<0xNN>`.
fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// Refuses a vocabulary that would lose ordinary text.
fn check_alphabet(json: &Value, alphabet: Alphabet) -> Result<(), TokenizerError> {
    let words = json.get("model").and_then(|model| model.get("vocab")).and_then(Value::as_object);
    let has = |name: &str| words.is_some_and(|words| words.contains_key(name));
    match alphabet {
        Alphabet::ByteLevel => super::check_bytes(&has),
        Alphabet::ByteFallback => match (0..=255u8).find(|byte| !has(&format!("<0x{byte:02X}>"))) {
            Some(byte) => Err(vocabulary(format!("there is no token for byte 0x{byte:02x}"))),
            None => Ok(()),
        },
    }
}

/// Tokens that end a generation: of `generation_config.json`, else of `config.json`, else the named one.
fn end_tokens(
    checkpoint: &Checkpoint,
    specials: &HashMap<String, u32>,
    kinds: &[TokenKind],
    vocab: usize,
) -> Result<Vec<u32>, TokenizerError> {
    let generation = checkpoint.optional_json("generation_config.json")?.unwrap_or_default();
    let listed = [&generation, checkpoint.config()]
        .into_iter()
        .find_map(|json| json.get("eos_token_id").filter(|value| !value.is_null()).cloned());
    let ids = match listed {
        None => Vec::new(),
        Some(Value::Array(ids)) => ids,
        Some(id) => vec![id],
    };
    let mut ends = Vec::new();
    for id in ids {
        let known = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let known = known.filter(|id| kinds.get(*id as usize).is_some_and(|kind| *kind != TokenKind::Unused));
        let known =
            known.ok_or_else(|| vocabulary(format!("eos_token_id {id} is not one of {vocab} tokens")))?;
        ends.push(known);
    }
    let config = checkpoint.optional_json("tokenizer_config.json")?.unwrap_or_default();
    let named = config.get("eos_token");
    let named = named.and_then(|value| value.get("content").or(Some(value))).and_then(Value::as_str);
    if let Some(&id) = named.and_then(|name| specials.get(name)) {
        ends.retain(|other| *other != id);
        ends.insert(0, id);
    }
    Ok(ends)
}

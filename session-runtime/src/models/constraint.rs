//! Constrained decoding: which tokens may come next so that the text obeys a JSON schema, a regular
//! expression or a grammar.
//!
//! Owns the bridge from our vocabulary to `llguidance`, the limits on what a caller may ask for, and
//! the style of the JSON. Deterministic: limits count steps, never time, so a replay sees the same
//! masks. Knows nothing of sampling: it answers with a set of token ids.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use super::tokenizer::{TokenKind, Tokenizer};

/// Why a constraint could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ConstraintError {
    /// The schema, regular expression or grammar is longer than the limit.
    #[error("a {kind} of {bytes} bytes is too long (at most {limit})")]
    TooLong {
        /// What it is.
        kind: &'static str,
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The schema, regular expression or grammar is not valid, uses something that is not
    /// supported, or is too large once compiled.
    #[error("invalid {kind}: {reason}")]
    Invalid {
        /// What it is.
        kind: &'static str,
        /// The reason.
        reason: String,
    },
    /// The vocabulary cannot be used for constraints.
    #[error("cannot prepare the vocabulary for constraints: {reason}")]
    Vocabulary {
        /// The reason.
        reason: String,
    },
    /// A token was accepted that the constraint does not allow here.
    #[error("token {token} is not allowed by the constraint here")]
    NotAllowed {
        /// The token.
        token: u32,
    },
    /// Computing what may come next exceeded a limit; the constraint cannot go on.
    #[error("constraint failed: {reason}")]
    Failed {
        /// The reason.
        reason: String,
    },
}

/// Longest JSON schema in bytes.
pub const MAX_SCHEMA_BYTES: usize = 64 << 10;
/// Longest grammar in bytes.
pub const MAX_GRAMMAR_BYTES: usize = 64 << 10;
/// Longest regular expression in bytes.
pub const MAX_REGEX_BYTES: usize = 16 << 10;
/// Bytes of a reason that are kept.
const MAX_REASON_BYTES: usize = 400;

/// Makes constraints for one vocabulary. Costly to make (a trie of all tokens), cheap to share.
pub struct ConstraintFactory {
    parsers: ParserFactory,
    vocab: usize,
    eos: u32,
}

impl std::fmt::Debug for ConstraintFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConstraintFactory").field("vocab", &self.vocab).finish_non_exhaustive()
    }
}

impl ConstraintFactory {
    /// Prepares the vocabulary of `tokenizer`.
    ///
    /// # Errors
    /// [`ConstraintError::Vocabulary`].
    pub fn new(tokenizer: &Tokenizer) -> Result<ConstraintFactory, ConstraintError> {
        let vocab = tokenizer.vocab_size();
        let word = |id: u32| match tokenizer.token_kind(id) {
            TokenKind::Normal | TokenKind::Added => tokenizer.token_bytes(id).to_vec(),
            // A marker that no text contains: only a grammar that names the token allows it.
            TokenKind::Control => [&[TokTrie::SPECIAL_TOKEN_MARKER], tokenizer.token_bytes(id)].concat(),
            TokenKind::Unused => Vec::new(),
        };
        let words: Vec<Vec<u8>> = (0..vocab as u32).map(word).collect();
        let info = TokRxInfo::new(vocab as u32, tokenizer.eos());
        let made = catch_unwind(AssertUnwindSafe(|| {
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
            let slices = SlicedBiasComputer::general_slices();
            ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
        }));
        let mut parsers =
            made.map_err(|error| ConstraintError::Vocabulary { reason: reason(&error.to_string()) })?;
        parsers.quiet();
        parsers.limits_mut().verbose_errors = false;
        Ok(ConstraintFactory { parsers, vocab, eos: tokenizer.eos() })
    }

    /// Text that is JSON of this schema, written as `{"a": 1, "b": [2, 3]}`: one space after `:` and
    /// `,` and no other whitespace, which is how chat templates write JSON and which keeps a model
    /// from filling its budget with blanks. A schema may ask for another style with `x-guidance`.
    ///
    /// # Errors
    /// [`ConstraintError::TooLong`], or [`ConstraintError::Invalid`] with the reason.
    pub fn json_schema(&self, schema: &str) -> Result<Constraint, ConstraintError> {
        let schema = parse_schema(schema)?;
        self.constraint("JSON schema", TopLevelGrammar::from_json_schema(schema))
    }

    /// Text that is `open`, then JSON of this schema, then `close`: a tool call in the frame the model knows.
    ///
    /// # Errors
    /// [`ConstraintError::TooLong`], or [`ConstraintError::Invalid`] with the reason.
    pub fn json_schema_between(
        &self,
        open: &str,
        schema: &str,
        close: &str,
    ) -> Result<Constraint, ConstraintError> {
        let schema = parse_schema(schema)?;
        check_length("frame", open.len() + close.len(), MAX_REGEX_BYTES)?;
        let literal = |text: &str| if text.is_empty() { String::new() } else { json!(text).to_string() };
        let grammar = format!("start: {} body {}\nbody: %json {schema}\n", literal(open), literal(close));
        self.constraint("JSON schema", TopLevelGrammar::from_lark(grammar))
    }

    /// Text that matches this regular expression as a whole.
    ///
    /// # Errors
    /// [`ConstraintError::TooLong`], or [`ConstraintError::Invalid`] with the reason.
    pub fn regex(&self, pattern: &str) -> Result<Constraint, ConstraintError> {
        check_length("regular expression", pattern.len(), MAX_REGEX_BYTES)?;
        self.constraint("regular expression", TopLevelGrammar::from_regex(pattern))
    }

    /// Text of this grammar, in the Lark dialect of llguidance.
    ///
    /// # Errors
    /// [`ConstraintError::TooLong`], or [`ConstraintError::Invalid`] with the reason.
    pub fn lark(&self, grammar: &str) -> Result<Constraint, ConstraintError> {
        check_length("grammar", grammar.len(), MAX_GRAMMAR_BYTES)?;
        self.constraint("grammar", TopLevelGrammar::from_lark(grammar.to_string()))
    }

    fn constraint(
        &self,
        kind: &'static str,
        grammar: TopLevelGrammar,
    ) -> Result<Constraint, ConstraintError> {
        let invalid = |text: &str| ConstraintError::Invalid { kind, reason: reason(text) };
        let made = catch_unwind(AssertUnwindSafe(|| self.parsers.create_parser(grammar)));
        let mut matcher = Matcher::new(made);
        if let Some(error) = matcher.get_error() {
            return Err(invalid(&error));
        }
        // An unsatisfiable schema shows only when the first mask is computed.
        let mask = matcher.compute_mask_or_eos().map_err(|error| invalid(&error.to_string()))?;
        if mask.is_zero() {
            return Err(invalid("no text satisfies it"));
        }
        Ok(Constraint { matcher, vocab: self.vocab, eos: self.eos })
    }
}

/// A constraint and how far the text has come.
pub struct Constraint {
    matcher: Matcher,
    vocab: usize,
    eos: u32,
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraint").field("complete", &self.is_complete()).finish_non_exhaustive()
    }
}

impl Constraint {
    /// The tokens that may come next. The end token is among them exactly when the text may stop here;
    /// once it is complete, the end token is the only one.
    ///
    /// # Errors
    /// [`ConstraintError::Failed`].
    pub fn allowed(&mut self) -> Result<TokenMask, ConstraintError> {
        let bits = self.matcher.compute_mask_or_eos().map_err(|error| failed(&error.to_string()))?;
        Ok(TokenMask { bits, vocab: self.vocab })
    }

    /// Takes the token that was chosen.
    ///
    /// # Errors
    /// [`ConstraintError::NotAllowed`], which leaves the constraint as it was; [`ConstraintError::Failed`].
    pub fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if self.is_complete() {
            return if token == self.eos { Ok(()) } else { Err(ConstraintError::NotAllowed { token }) };
        }
        let known = (token as usize) < self.vocab;
        let valid =
            known && self.matcher.validate_tokens(&[token]).map_err(|error| failed(&error.to_string()))? == 1;
        if !valid {
            return Err(ConstraintError::NotAllowed { token });
        }
        self.matcher.consume_token(token).map_err(|error| failed(&error.to_string()))
    }

    /// Whether the text may stop here.
    pub fn may_stop(&mut self) -> bool {
        self.is_complete() || self.matcher.is_accepting().unwrap_or(false)
    }

    /// Whether nothing but the end token may follow.
    pub fn is_complete(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }

    /// A constraint at the same place that goes its own way.
    pub fn fork(&self) -> Constraint {
        Constraint { matcher: self.matcher.deep_clone(), vocab: self.vocab, eos: self.eos }
    }
}

/// A set of token ids.
#[derive(Clone)]
pub struct TokenMask {
    bits: SimpleVob,
    vocab: usize,
}

impl std::fmt::Debug for TokenMask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenMask({} of {})", self.count(), self.vocab)
    }
}

impl TokenMask {
    /// Whether `id` is in the set.
    pub fn is_allowed(&self, id: u32) -> bool {
        let word = self.bits.as_slice().get(id as usize / 32);
        (id as usize) < self.vocab && word.is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// The set as a bit an id, 32 to a word, the first in the lowest bit. Ids from the vocabulary's size on do not count.
    pub fn words(&self) -> &[u32] {
        self.bits.as_slice()
    }

    /// The ids in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.bits.iter().take_while(|&id| (id as usize) < self.vocab)
    }

    /// Number of ids in the set.
    pub fn count(&self) -> usize {
        self.iter().count()
    }
}

fn check_length(kind: &'static str, bytes: usize, limit: usize) -> Result<(), ConstraintError> {
    if bytes > limit { Err(ConstraintError::TooLong { kind, bytes, limit }) } else { Ok(()) }
}

/// Parses a schema and sets our JSON style where it does not ask for another.
fn parse_schema(schema: &str) -> Result<Value, ConstraintError> {
    check_length("JSON schema", schema.len(), MAX_SCHEMA_BYTES)?;
    let invalid = |reason: String| ConstraintError::Invalid { kind: "JSON schema", reason };
    let mut schema: Value =
        serde_json::from_str(schema).map_err(|error| invalid(format!("it is not JSON: {error}")))?;
    let style = json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
    match &mut schema {
        Value::Object(members) => {
            members.entry("x-guidance").or_insert(style);
        }
        Value::Bool(true) => schema = json!({ "x-guidance": style }),
        Value::Bool(false) => return Err(invalid("`false` allows nothing".to_string())),
        _ => return Err(invalid("a schema is an object or a boolean".to_string())),
    }
    Ok(schema)
}

fn failed(text: &str) -> ConstraintError {
    ConstraintError::Failed { reason: reason(text) }
}

/// The beginning of what went wrong, without a backtrace.
fn reason(text: &str) -> String {
    let text = text.split("<backtrace>").next().unwrap_or(text).trim();
    let end = text.char_indices().map(|(at, _)| at).find(|&at| at >= MAX_REASON_BYTES).unwrap_or(text.len());
    text[..end].to_string()
}

//! Turning a stream of tokens into text as it arrives.

use super::{TokenKind, Tokenizer};

/// Decodes tokens one at a time. Bytes that do not complete a character are held back until they
/// do, so the pieces put together are the text of all tokens and no piece ends inside a character.
/// What `push` returns depends on the tokens so far and on nothing else. Control tokens give no text.
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    /// At most 3 bytes: the start of a character.
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder at the start of a text.
    pub fn new() -> StreamDecoder {
        StreamDecoder::default()
    }

    /// Takes the next token and returns the text that is complete now, if there is any. Bytes that
    /// can never become a character are given as U+FFFD.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Option<String> {
        if matches!(tokenizer.token_kind(id), TokenKind::Control | TokenKind::Unused) {
            return None;
        }
        self.pending.extend_from_slice(tokenizer.token_bytes(id));
        let text = self.complete();
        (!text.is_empty()).then_some(text)
    }

    /// Ends the text: what is still held back is given as U+FFFD.
    pub fn finish(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.pending);
        (!rest.is_empty()).then(|| String::from_utf8_lossy(&rest).into_owned())
    }

    fn complete(&mut self) -> String {
        let mut text = String::new();
        let mut kept = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            kept += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                continue;
            }
            let at_end = kept + invalid.len() == self.pending.len();
            if at_end && could_continue(invalid) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            kept += invalid.len();
        }
        self.pending.drain(..kept);
        text
    }
}

/// Whether `bytes`, which are not a character, are the start of one.
fn could_continue(bytes: &[u8]) -> bool {
    // `error_len` is `None` exactly when the input ended inside a possible character.
    std::str::from_utf8(bytes).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}

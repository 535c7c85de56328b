//! Pseudonyms of tokens. A token's pseudonym is drawn from everything up to and with it under a key that is thrown away, so that
//! two histories have equal pseudonyms exactly as far as they agree, and nothing else can be read from them: not that a token
//! occurs again, nor which one it is.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Bits of a pseudonym: as many as four bytes of variable length hold.
const BITS: u32 = 28;

/// The key of one trace.
pub(super) struct Key([u8; 32]);

impl Key {
    /// A key of the system's randomness, which seeds every `RandomState`.
    pub(super) fn fresh() -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("session-runtime trace key 1");
        for _ in 0..4 {
            hasher.update(&RandomState::new().build_hasher().finish().to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The pseudonyms of a history from its token `start` on, and where its chain stands then.
    pub(super) fn history(&self, tokens: &[u32], start: usize) -> (Vec<u32>, Chain) {
        let mut chain = Chain::default();
        let all: Vec<u32> = tokens.iter().map(|token| chain.push(self, *token)).collect();
        (all[start.min(all.len())..].to_vec(), chain)
    }
}

/// Everything that a history has been, in one digest.
#[derive(Clone, Debug, Default)]
pub(super) struct Chain([u8; 32]);

impl Chain {
    /// The pseudonym of the next token.
    pub(super) fn push(&mut self, key: &Key, token: u32) -> u32 {
        let mut hasher = blake3::Hasher::new_keyed(&key.0);
        hasher.update(&self.0).update(&token.to_le_bytes());
        self.0 = *hasher.finalize().as_bytes();
        let [a, b, c, d, ..] = self.0;
        u32::from_le_bytes([a, b, c, d]) >> (u32::BITS - BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histories_have_equal_pseudonyms_exactly_as_far_as_they_agree() {
        let key = Key::fresh();
        let (left, right) = ([5, 6, 7, 5, 6, 7], [5, 6, 7, 5, 9, 7]);
        let [a, b] = [left, right].map(|tokens| key.history(&tokens, 0).0);
        assert_eq!(a[..4], b[..4]);
        assert!(a[4] != b[4] && a[5] != b[5], "what follows a difference differs");
        assert_ne!(a[0], a[3], "a token that occurs again does not show it");
        assert_ne!(a, Key::fresh().history(&left, 0).0, "another trace has others");
        assert_eq!(key.history(&left, 4).0, a[4..]);
        assert!(a.iter().all(|name| *name < 1 << BITS));
    }

    #[test]
    fn a_chain_goes_on_where_a_history_ended() {
        let key = Key::fresh();
        let (whole, _) = key.history(&[1, 2, 3], 0);
        let (_, mut chain) = key.history(&[1, 2], 0);
        assert_eq!(chain.push(&key, 3), whole[2]);
    }
}

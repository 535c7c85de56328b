//! The alphabet of byte-level BPE: a printable character for each of the 256 bytes.
//!
//! From GPT-2's `bytes_to_unicode`: printable bytes of Latin-1 stand for themselves, the other 68
//! are numbered from U+0100 in ascending order.

/// Whether `byte` stands for itself.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character for `byte`.
pub(super) fn encode(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !is_printable(other)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte for `character`, if it is in the alphabet.
fn decode_char(character: char) -> Option<u8> {
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => {
            let index = code.checked_sub(0x100)? as usize;
            (0..=255u8).filter(|&byte| !is_printable(byte)).nth(index)
        }
    }
}

/// The bytes a token of the alphabet stands for; `None` if a character is outside it.
pub(super) fn decode(token: &str) -> Option<Vec<u8>> {
    token.chars().map(decode_char).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        for byte in 0..=255u8 {
            assert_eq!(decode(&encode(byte).to_string()), Some(vec![byte]));
        }
        // Known values of GPT-2's table.
        assert_eq!(encode(b' '), 'Ġ');
        assert_eq!(encode(b'\n'), 'Ċ');
        assert_eq!(encode(0xAD), 'Ń');
        assert_eq!(encode(b'a'), 'a');
        assert_eq!(decode("\u{144}"), None);
        assert_eq!(decode(" "), None);
    }
}

//! One file's text, a window at a time.

use tools_sdk::ToolError;

use crate::place::Place;
use crate::{Operation, Output};

/// Most bytes of text one call gives.
pub(crate) const MAX_BYTES: u32 = 8_192;
/// Most bytes a UTF-8 character has.
const CHARACTER: u32 = 4;

/// Reads from `offset`, cut between characters, and says where the rest begins.
pub(crate) fn read(place: &Place, offset: u64) -> Result<Output, ToolError> {
    let bytes = place.bytes(offset, MAX_BYTES + CHARACTER)?;
    let text = text(&bytes, MAX_BYTES as usize);
    let Some(text) = text else {
        return Err(ToolError::invalid_input("not_text", format!("{} is not a text file", place.shown())));
    };
    let mut output = Output::new(Operation::Read, place);
    if text.len() < bytes.len() {
        let next = offset.saturating_add(text.len() as u64);
        output.next_offset = Some(next);
        output.left_out = format!("the file goes on at offset {next}");
    }
    output.text = Some(text.to_owned());
    Ok(output)
}

/// The longest text of at most `most` bytes that `bytes` begin with; `None` when they are not text. A character
/// cut off by the end of `bytes` does not count against them.
pub(crate) fn text(bytes: &[u8], most: usize) -> Option<&str> {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            let (valid, _) = bytes.split_at(error.valid_up_to());
            std::str::from_utf8(valid).ok()?
        }
        Err(_) => return None,
    };
    if text.contains('\0') {
        return None;
    }
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end)
}

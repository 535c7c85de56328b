//! The envelope of every value in sled: version, kind, length, sequence, CRC32C over key and all of it.

use super::MetaError;

/// Bytes in front of a value.
pub(crate) const ENVELOPE: usize = 20;
const VERSION: u8 = 1;

fn sum(key: &[u8], head: &[u8], value: &[u8]) -> u32 {
    let sum = crc32c::crc32c_append(crc32c::crc32c(key), head);
    crc32c::crc32c_append(sum, value)
}

/// Wraps a value. Its kind is the key's first byte.
pub(crate) fn seal(key: &[u8], value: &[u8], sequence: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(ENVELOPE + value.len());
    out.extend_from_slice(&[VERSION, key.first().copied().unwrap_or(0), 0, 0]);
    out.extend_from_slice(&(value.len() as u32).to_le_bytes());
    out.extend_from_slice(&sequence.to_le_bytes());
    let sum = sum(key, &out, value);
    out.extend_from_slice(&sum.to_le_bytes());
    out.extend_from_slice(value);
    out
}

/// The value and its sequence, if everything matches.
pub(crate) fn open<'a>(key: &[u8], bytes: &'a [u8]) -> Result<(&'a [u8], u64), MetaError> {
    let corrupt =
        |detail: &str| MetaError::Corrupt { key: key.escape_ascii().to_string(), detail: detail.to_owned() };
    let (head, value) = bytes.split_at_checked(ENVELOPE).ok_or_else(|| corrupt("it is too short"))?;
    if head[0] != VERSION || Some(&head[1]) != key.first() {
        return Err(corrupt("its version or kind is another"));
    }
    if head[4..8] != (value.len() as u32).to_le_bytes() {
        return Err(corrupt("its length is another"));
    }
    if head[16..20] != sum(key, &head[..16], value).to_le_bytes() {
        return Err(corrupt("its checksum is another"));
    }
    let mut sequence = [0; 8];
    sequence.copy_from_slice(&head[8..16]);
    Ok((value, u64::from_le_bytes(sequence)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_and_every_other_key_is_refused() {
        let sealed = seal(b"uname", b"value", 9);
        assert_eq!(open(b"uname", &sealed).unwrap(), (&b"value"[..], 9));
        assert!(open(b"unamf", &sealed).is_err());
        for bit in 0..sealed.len() * 8 {
            let mut bad = sealed.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(open(b"uname", &bad).is_err(), "bit {bit}");
        }
        for cut in 0..sealed.len() {
            assert!(open(b"uname", &sealed[..cut]).is_err());
        }
    }
}

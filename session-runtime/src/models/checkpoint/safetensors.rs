//! The header of a safetensors file: eight bytes of length, then a JSON object of that length that says
//! type, shape and range of every tensor; the ranges count from the end of the header.
//!
//! Format: the README of the safetensors project.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use kernels::formats::TensorType;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::{CheckpointError, malformed};

/// Longest header, as in the reference reader.
const MAX_HEADER_BYTES: usize = 100_000_000;
/// Most tensors of a file.
const MAX_TENSORS: usize = 1 << 20;
/// Longest name of a tensor in bytes.
const MAX_NAME_BYTES: usize = 1024;
/// Most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

/// Where a tensor lies in its file and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Type, as the file names it.
    pub(super) dtype: String,
    /// Outputs: the product of all dimensions but the last.
    pub(super) rows: usize,
    /// Inputs: the last (contiguous) dimension.
    pub(super) cols: usize,
    /// Range in the file.
    pub(super) range: Range<usize>,
}

impl Entry {
    /// The storage type, if it is supported.
    pub(super) fn format(&self) -> Option<TensorType> {
        match self.dtype.as_str() {
            "F32" => Some(TensorType::F32),
            "F16" => Some(TensorType::F16),
            "BF16" => Some(TensorType::BF16),
            _ => None,
        }
    }
}

#[derive(Deserialize)]
struct Raw {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Tensors in the order of the file; a name that appears twice stays twice.
struct Directory(Vec<(String, Raw)>);

impl<'de> Deserialize<'de> for Directory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Directory;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Directory, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if entries.len() == MAX_TENSORS || name.len() > MAX_NAME_BYTES {
                        return Err(serde::de::Error::custom("too many tensors, or a name too long"));
                    }
                    let raw = map.next_value::<Raw>().map_err(|error| {
                        serde::de::Error::custom(format_args!("tensor `{}`: {error}", name.escape_debug()))
                    })?;
                    entries.push((name, raw));
                }
                Ok(Directory(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Reads the header of a whole file.
pub(super) fn header(path: &Path, file: &[u8]) -> Result<Vec<(String, Entry)>, CheckpointError> {
    let bad = |problem: String| malformed(path, "header", problem);
    let Some((&length, rest)) = file.split_first_chunk::<8>() else {
        return Err(bad("the file is shorter than 8 bytes".to_owned()));
    };
    let length = u64::from_le_bytes(length);
    let text = usize::try_from(length).ok().filter(|length| *length <= MAX_HEADER_BYTES);
    let Some((text, data)) = text.and_then(|length| rest.split_at_checked(length)) else {
        let left = rest.len();
        return Err(bad(format!("{length} bytes of header do not fit the {left} bytes left, or the limit")));
    };
    let Directory(raw) = serde_json::from_slice(text).map_err(|error| bad(error.to_string()))?;
    let start = file.len() - data.len();
    let mut entries = Vec::with_capacity(raw.len());
    for (name, raw) in raw {
        let place = || format!("tensor `{}`", name.escape_debug());
        let entry = entry(&raw, start, data.len()).map_err(|problem| malformed(path, place(), problem))?;
        entries.push((name, entry));
    }
    let mut order: Vec<&(String, Entry)> = entries.iter().collect();
    order.sort_by(|a, b| a.0.cmp(&b.0));
    if let Some(pair) = order.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(malformed(path, format!("tensor `{}`", pair[0].0.escape_debug()), "it appears twice"));
    }
    order.sort_by_key(|(_, entry)| (entry.range.start, entry.range.end));
    if let Some(pair) = order.windows(2).find(|pair| pair[0].1.range.end > pair[1].1.range.start) {
        let place = format!("tensor `{}`", pair[1].0.escape_debug());
        return Err(malformed(path, place, format!("it overlaps tensor `{}`", pair[0].0.escape_debug())));
    }
    Ok(entries)
}

fn entry(raw: &Raw, start: usize, data: usize) -> Result<Entry, String> {
    if raw.shape.is_empty() || raw.shape.len() > MAX_DIMENSIONS {
        return Err(format!("{} dimensions (1 to {MAX_DIMENSIONS} allowed)", raw.shape.len()));
    }
    let size = |value: u64| usize::try_from(value).ok().filter(|size| *size > 0);
    let sizes: Option<Vec<usize>> = raw.shape.iter().map(|value| size(*value)).collect();
    let sizes = sizes.ok_or("a dimension is 0 or does not fit")?;
    let cols = sizes.last().copied().unwrap_or(1);
    let rows = sizes[..sizes.len() - 1].iter().try_fold(1_usize, |rows, size| rows.checked_mul(*size));
    let rows = rows.filter(|rows| rows.checked_mul(cols).is_some()).ok_or("its size overflows")?;
    let (begin, end) = raw.data_offsets;
    let fits = begin <= end && end <= data as u64;
    if !fits {
        return Err(format!("its data {begin}..{end} is not inside the {data} bytes of data"));
    }
    // Both are at most the length of a slice.
    let range = start + begin as usize..start + end as usize;
    let entry = Entry { dtype: raw.dtype.clone(), rows, cols, range };
    if let Some(format) = entry.format()
        && format.tensor_bytes(rows, cols) != Some(entry.range.len())
    {
        return Err(format!(
            "{rows} x {cols} values of {} do not fit {} bytes",
            raw.dtype,
            entry.range.len()
        ));
    }
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
    }

    fn read(bytes: &[u8]) -> Result<Vec<(String, Entry)>, String> {
        header(Path::new("m.safetensors"), bytes).map_err(|error| error.to_string())
    }

    const GOOD: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]},
        "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"i":{"dtype":"I64","shape":[1],"data_offsets":[30,38]}}"#;

    #[test]
    fn what_was_written_is_read() {
        let entries = read(&file(GOOD, 38)).unwrap();
        let names: Vec<&str> = entries.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["b", "a", "i"]);
        let start = 8 + GOOD.len();
        assert_eq!(entries[0].1.range, start + 24..start + 30);
        assert_eq!((entries[1].1.rows, entries[1].1.cols), (2, 3));
        assert_eq!(entries[1].1.format(), Some(TensorType::F32));
        assert_eq!(entries[2].1.format(), None);
    }

    #[test]
    fn bad_headers_are_refused_by_name() {
        let one = |entry: &str| file(&format!(r#"{{"w":{entry}}}"#), 16);
        for (bytes, part) in [
            (b"1234567".to_vec(), "shorter than 8 bytes"),
            (u64::MAX.to_le_bytes().to_vec(), "do not fit"),
            (file("[1]", 0), "object of tensors"),
            (file("{", 0), "header"),
            (one(r#"{"dtype":"F32","shape":[4]}"#), "`w`: missing field `data_offsets`"),
            (one(r#"{"dtype":"F32","shape":[4],"data_offsets":[0,20]}"#), "`w`: its data 0..20"),
            (one(r#"{"dtype":"F32","shape":[4],"data_offsets":[8,4]}"#), "`w`: its data 8..4"),
            (one(r#"{"dtype":"F32","shape":[5],"data_offsets":[0,16]}"#), "`w`: 1 x 5 values of F32"),
            (one(r#"{"dtype":"F32","shape":[0,4],"data_offsets":[0,0]}"#), "`w`: a dimension is 0"),
            (one(r#"{"dtype":"F32","shape":[],"data_offsets":[0,4]}"#), "`w`: 0 dimensions"),
            (
                one(r#"{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,16]}"#),
                "`w`: its size overflows",
            ),
            (
                file(
                    r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                        "v":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
                    16,
                ),
                "`v`: it overlaps tensor `w`",
            ),
            (
                file(
                    r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
                        "w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
                    16,
                ),
                "`w`: it appears twice",
            ),
        ] {
            let error = read(&bytes).unwrap_err();
            assert!(error.contains(part) && error.contains("m.safetensors"), "{part}: {error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn spoiled_headers_never_panic_and_ranges_stay_inside(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(), whole in any::<bool>(),
        ) {
            let mut bytes = file(GOOD, 38);
            for (index, byte) in edits {
                let at = index.index(bytes.len());
                bytes[at] = byte;
            }
            if !whole {
                bytes.truncate(cut.index(bytes.len()));
            }
            for (_, entry) in read(&bytes).unwrap_or_default() {
                prop_assert!(entry.range.end <= bytes.len());
                if let Some(format) = entry.format() {
                    prop_assert_eq!(format.tensor_bytes(entry.rows, entry.cols), Some(entry.range.len()));
                }
            }
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
            let _ = read(&file(&String::from_utf8_lossy(&bytes), 8));
        }
    }
}

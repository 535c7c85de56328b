//! The byte-level reader of GGUF headers: a cursor that refuses to run past the end, and limits.
//!
//! Every count in the file is checked against the bytes that are left, using the smallest encoding
//! of one element, before a vector of that count is reserved.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use kernels::formats::TensorType;

use super::value::{Array, Value};
use super::{GgufError, TensorInfo};

/// `GGUF` in file order.
const MAGIC: [u8; 4] = *b"GGUF";
/// Most metadata keys and tensors a file may have.
const MAX_ENTRIES: u64 = 1 << 20;
/// Longest key or tensor name in bytes (the specification allows 65,535 and 64).
const MAX_NAME_BYTES: usize = 1024;
/// Most elements of one array.
const MAX_ARRAY_ELEMENTS: u64 = 1 << 22;
/// Deepest nesting of arrays.
const MAX_ARRAY_DEPTH: usize = 4;
/// Most bytes of metadata and tensor directory together.
const MAX_HEADER_BYTES: usize = 1 << 27;
/// Most dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;
/// Smallest tensor directory entry: name length, one-byte name, dimension count, one dimension, type, offset.
const MIN_TENSOR_ENTRY: usize = 8 + 1 + 4 + 8 + 4 + 8;
/// Smallest metadata entry: key length, one-byte key, type, one-byte value.
const MIN_KEY_ENTRY: usize = 8 + 1 + 4 + 1;

/// What the header of a file says.
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) metadata: HashMap<String, Value>,
    pub(super) tensors: Vec<TensorInfo>,
}

/// Reads magic, version, metadata and tensor directory of a whole file.
pub(super) fn header(file: &[u8]) -> Result<Header, GgufError> {
    let mut cursor = Cursor { bytes: file, at: 0 };
    let magic = cursor
        .array::<4>("magic")
        .map_err(|_| GgufError::NotGguf { problem: "the file is shorter than 4 bytes".to_string() })?;
    if magic != MAGIC {
        return Err(GgufError::NotGguf { problem: format!("it starts with {}", magic.escape_ascii()) });
    }
    let version = cursor.u32("version")?;
    if !(version == 2 || version == 3) {
        return Err(GgufError::Version { found: version });
    }
    let tensor_count = cursor.count("tensor count", MAX_ENTRIES, MIN_TENSOR_ENTRY)?;
    let key_count = cursor.count("metadata count", MAX_ENTRIES, MIN_KEY_ENTRY)?;
    let metadata = read_metadata(&mut cursor, key_count)?;
    let alignment = alignment(&metadata)?;
    let mut tensors = Vec::with_capacity(tensor_count.min(1 << 16));
    let mut names = HashSet::new();
    for index in 0..tensor_count {
        let info = read_tensor_info(&mut cursor, index, alignment)?;
        if !names.insert(info.name.clone()) {
            return Err(malformed(format!("tensor `{}`", info.name), "it appears twice"));
        }
        tensors.push(info);
    }
    // A file without tensors may end before the padding.
    let data_start = cursor.at.next_multiple_of(alignment).min(file.len());
    for info in &mut tensors {
        info.range = data_range(info, data_start, file.len())?;
    }
    Ok(Header { version, metadata, tensors })
}

fn read_metadata(cursor: &mut Cursor<'_>, count: usize) -> Result<HashMap<String, Value>, GgufError> {
    let mut metadata = HashMap::with_capacity(count.min(1 << 12));
    for index in 0..count {
        let key = cursor.name(&format!("metadata key {index}"))?;
        let place = format!("key `{key}`");
        let type_id = cursor.u32(&place)?;
        let value = read_value(cursor, &place, type_id)?;
        if cursor.at > MAX_HEADER_BYTES {
            return Err(malformed(place, format!("the metadata is larger than {MAX_HEADER_BYTES} bytes")));
        }
        if metadata.insert(key, value).is_some() {
            return Err(malformed(place, "it appears twice"));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &HashMap<String, Value>) -> Result<usize, GgufError> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(32) };
    match value.as_u32() {
        Some(alignment) if alignment.is_power_of_two() && alignment <= 1 << 16 => Ok(alignment as usize),
        _ => Err(malformed("key `general.alignment`", "it must be a power of two of at most 65536")),
    }
}

fn read_value(cursor: &mut Cursor<'_>, place: &str, type_id: u32) -> Result<Value, GgufError> {
    Ok(match type_id {
        0 => Value::U8(u8::from_le_bytes(cursor.array(place)?)),
        1 => Value::I8(i8::from_le_bytes(cursor.array(place)?)),
        2 => Value::U16(u16::from_le_bytes(cursor.array(place)?)),
        3 => Value::I16(i16::from_le_bytes(cursor.array(place)?)),
        4 => Value::U32(u32::from_le_bytes(cursor.array(place)?)),
        5 => Value::I32(i32::from_le_bytes(cursor.array(place)?)),
        6 => Value::F32(f32::from_le_bytes(cursor.array(place)?)),
        7 => Value::Bool(cursor.boolean(place)?),
        8 => Value::String(cursor.string(place, MAX_HEADER_BYTES)?),
        9 => Value::Array(read_array(cursor, place, 0)?),
        10 => Value::U64(u64::from_le_bytes(cursor.array(place)?)),
        11 => Value::I64(i64::from_le_bytes(cursor.array(place)?)),
        12 => Value::F64(f64::from_le_bytes(cursor.array(place)?)),
        other => return Err(malformed(place, format!("unknown value type {other}"))),
    })
}

fn read_array(cursor: &mut Cursor<'_>, place: &str, depth: usize) -> Result<Array, GgufError> {
    if depth == MAX_ARRAY_DEPTH {
        return Err(malformed(place, format!("arrays are nested deeper than {MAX_ARRAY_DEPTH}")));
    }
    let type_id = cursor.u32(place)?;
    Ok(match type_id {
        0 => Array::U8(cursor.numbers(place, u8::from_le_bytes)?),
        1 => Array::I8(cursor.numbers(place, i8::from_le_bytes)?),
        2 => Array::U16(cursor.numbers(place, u16::from_le_bytes)?),
        3 => Array::I16(cursor.numbers(place, i16::from_le_bytes)?),
        4 => Array::U32(cursor.numbers(place, u32::from_le_bytes)?),
        5 => Array::I32(cursor.numbers(place, i32::from_le_bytes)?),
        6 => Array::F32(cursor.numbers(place, f32::from_le_bytes)?),
        7 => {
            let count = cursor.count(place, MAX_ARRAY_ELEMENTS, 1)?;
            Array::Bool((0..count).map(|_| cursor.boolean(place)).collect::<Result<_, _>>()?)
        }
        8 => {
            let count = cursor.count(place, MAX_ARRAY_ELEMENTS, 8)?;
            Array::String(
                (0..count).map(|_| cursor.string(place, MAX_HEADER_BYTES)).collect::<Result<_, _>>()?,
            )
        }
        9 => {
            let count = cursor.count(place, MAX_ARRAY_ELEMENTS, 12)?;
            Array::Array((0..count).map(|_| read_array(cursor, place, depth + 1)).collect::<Result<_, _>>()?)
        }
        10 => Array::U64(cursor.numbers(place, u64::from_le_bytes)?),
        11 => Array::I64(cursor.numbers(place, i64::from_le_bytes)?),
        12 => Array::F64(cursor.numbers(place, f64::from_le_bytes)?),
        other => return Err(malformed(place, format!("unknown array element type {other}"))),
    })
}

fn read_tensor_info(
    cursor: &mut Cursor<'_>,
    index: usize,
    alignment: usize,
) -> Result<TensorInfo, GgufError> {
    let name = cursor.name(&format!("tensor {index}"))?;
    let place = format!("tensor `{name}`");
    let dimensions = cursor.u32(&place)?;
    if dimensions == 0 || dimensions > MAX_DIMENSIONS {
        return Err(malformed(place, format!("{dimensions} dimensions (1 to {MAX_DIMENSIONS} allowed)")));
    }
    let mut cols = 0;
    let mut rows: usize = 1;
    for dimension in 0..dimensions {
        let size = usize::try_from(cursor.u64(&place)?).ok().filter(|&size| size > 0);
        let size = size.ok_or_else(|| malformed(&place, "a dimension is 0 or does not fit"))?;
        if dimension == 0 {
            cols = size;
        } else {
            rows = rows.checked_mul(size).ok_or_else(|| malformed(&place, "its size overflows"))?;
        }
    }
    let type_id = cursor.u32(&place)?;
    let offset = usize::try_from(cursor.u64(&place)?).ok().filter(|offset| offset.is_multiple_of(alignment));
    let offset =
        offset.ok_or_else(|| malformed(&place, format!("its offset is not a multiple of {alignment}")))?;
    if cursor.at > MAX_HEADER_BYTES {
        return Err(malformed(place, format!("the header is larger than {MAX_HEADER_BYTES} bytes")));
    }
    Ok(TensorInfo { name, type_id, rows, cols, offset, range: None })
}

/// Where the data of `info` lies; `None` for a type whose size is not known.
fn data_range(
    info: &TensorInfo,
    data_start: usize,
    file_bytes: usize,
) -> Result<Option<Range<usize>>, GgufError> {
    let place = || format!("tensor `{}`", info.name);
    let Some(format) = TensorType::from_ggml_id(info.type_id) else { return Ok(None) };
    let bytes = format.tensor_bytes(info.rows, info.cols).ok_or_else(|| {
        malformed(place(), format!("{} x {} values do not fit its type", info.rows, info.cols))
    })?;
    let start = data_start.checked_add(info.offset);
    let end = start.and_then(|start| start.checked_add(bytes));
    match (start, end) {
        (Some(start), Some(end)) if end <= file_bytes => Ok(Some(start..end)),
        _ => Err(malformed(place(), format!("its {bytes} bytes end after the file ({file_bytes} bytes)"))),
    }
}

/// Names of tensor types without kernels, by ggml id, as the format's document lists them.
const OTHER_TYPES: [(u32, &str); 23] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (4, "Q4_2"),
    (5, "Q4_3"),
];

/// The name of a tensor type for people.
pub(super) fn type_name(id: u32) -> String {
    let known = TensorType::from_ggml_id(id).map(TensorType::name);
    match known.or_else(|| OTHER_TYPES.iter().find(|(other, _)| *other == id).map(|(_, name)| *name)) {
        Some(name) => format!("{name} (ggml type {id})"),
        None => format!("ggml type {id}"),
    }
}

/// Names of the supported tensor types.
pub(super) fn supported_types() -> String {
    let names: Vec<String> =
        (0..64).filter_map(TensorType::from_ggml_id).map(|format| format.to_string()).collect();
    names.join(", ")
}

fn malformed(place: impl Into<String>, problem: impl Into<String>) -> GgufError {
    GgufError::Malformed { place: place.into(), problem: problem.into() }
}

/// Reads forward through the header.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, place: &str, count: usize) -> Result<&'a [u8], GgufError> {
        let end = self.at.checked_add(count);
        match end.and_then(|end| self.bytes.get(self.at..end)) {
            Some(taken) => {
                self.at += count;
                Ok(taken)
            }
            None => Err(malformed(
                place,
                format!("the file ends early ({count} bytes wanted, {} left)", self.left()),
            )),
        }
    }

    fn array<const N: usize>(&mut self, place: &str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(place, N)?);
        Ok(out)
    }

    fn u32(&mut self, place: &str) -> Result<u32, GgufError> {
        self.array(place).map(u32::from_le_bytes)
    }

    fn u64(&mut self, place: &str) -> Result<u64, GgufError> {
        self.array(place).map(u64::from_le_bytes)
    }

    fn boolean(&mut self, place: &str) -> Result<bool, GgufError> {
        match self.array::<1>(place)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(malformed(place, format!("boolean byte {other}"))),
        }
    }

    /// A count of elements of at least `smallest` bytes each, at most `limit`.
    fn count(&mut self, place: &str, limit: u64, smallest: usize) -> Result<usize, GgufError> {
        let count = self.u64(place)?;
        let fits = usize::try_from(count).ok().filter(|&n| count <= limit && n <= self.left() / smallest);
        fits.ok_or_else(|| {
            malformed(place, format!("{count} elements do not fit the {} bytes left", self.left()))
        })
    }

    fn numbers<T, const N: usize>(
        &mut self,
        place: &str,
        decode: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        let count = self.count(place, MAX_ARRAY_ELEMENTS, N)?;
        let (elements, _) = self.take(place, count * N)?.as_chunks::<N>();
        Ok(elements.iter().map(|&element| decode(element)).collect())
    }

    fn string(&mut self, place: &str, limit: usize) -> Result<String, GgufError> {
        let length = self.u64(place)?;
        let fits = usize::try_from(length).ok().filter(|&n| n <= limit && n <= self.left());
        let length = fits.ok_or_else(|| {
            malformed(
                place,
                format!("a string of {length} bytes does not fit ({} left, at most {limit})", self.left()),
            )
        })?;
        let bytes = self.take(place, length)?;
        let text = std::str::from_utf8(bytes).map_err(|_| malformed(place, "a string is not UTF-8"))?;
        Ok(text.to_string())
    }

    fn name(&mut self, place: &str) -> Result<String, GgufError> {
        let name = self.string(place, MAX_NAME_BYTES)?;
        if name.is_empty() {
            return Err(malformed(place, "its name is empty"));
        }
        Ok(name)
    }
}

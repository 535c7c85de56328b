//! Typed metadata values. Owns the widening rules between the integer types of the format.

/// A metadata value with the type it has in the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// 8-bit unsigned.
    U8(u8),
    /// 8-bit signed.
    I8(i8),
    /// 16-bit unsigned.
    U16(u16),
    /// 16-bit signed.
    I16(i16),
    /// 32-bit unsigned.
    U32(u32),
    /// 32-bit signed.
    I32(i32),
    /// 32-bit float.
    F32(f32),
    /// Boolean.
    Bool(bool),
    /// UTF-8 string.
    String(String),
    /// Homogeneous array.
    Array(Array),
    /// 64-bit unsigned.
    U64(u64),
    /// 64-bit signed.
    I64(i64),
    /// 64-bit float.
    F64(f64),
}

/// A homogeneous array of metadata values.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// 8-bit unsigned.
    U8(Vec<u8>),
    /// 8-bit signed.
    I8(Vec<i8>),
    /// 16-bit unsigned.
    U16(Vec<u16>),
    /// 16-bit signed.
    I16(Vec<i16>),
    /// 32-bit unsigned.
    U32(Vec<u32>),
    /// 32-bit signed.
    I32(Vec<i32>),
    /// 32-bit float.
    F32(Vec<f32>),
    /// Booleans.
    Bool(Vec<bool>),
    /// UTF-8 strings.
    String(Vec<String>),
    /// Arrays.
    Array(Vec<Array>),
    /// 64-bit unsigned.
    U64(Vec<u64>),
    /// 64-bit signed.
    I64(Vec<i64>),
    /// 64-bit float.
    F64(Vec<f64>),
}

impl Value {
    /// The value as `u32`, when it is a whole number that fits.
    pub fn as_u32(&self) -> Option<u32> {
        match *self {
            Value::U8(v) => Some(u32::from(v)),
            Value::U16(v) => Some(u32::from(v)),
            Value::U32(v) => Some(v),
            Value::U64(v) => u32::try_from(v).ok(),
            Value::I8(v) => u32::try_from(v).ok(),
            Value::I16(v) => u32::try_from(v).ok(),
            Value::I32(v) => u32::try_from(v).ok(),
            Value::I64(v) => u32::try_from(v).ok(),
            _ => None,
        }
    }

    /// The value as `f32`, when it is a float (a double is rounded).
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// The string, when it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(v) => Some(v),
            _ => None,
        }
    }

    /// The boolean, when it is one.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// Name of the type, for errors.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::F32(_) => "f32",
            Value::Bool(_) => "bool",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F64(_) => "f64",
        }
    }
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as `i64`, when they are whole numbers of at most 32 bits.
    pub fn as_integers(&self) -> Option<Vec<i64>> {
        match self {
            Array::U8(v) => Some(v.iter().map(|&x| i64::from(x)).collect()),
            Array::I8(v) => Some(v.iter().map(|&x| i64::from(x)).collect()),
            Array::U16(v) => Some(v.iter().map(|&x| i64::from(x)).collect()),
            Array::I16(v) => Some(v.iter().map(|&x| i64::from(x)).collect()),
            Array::U32(v) => Some(v.iter().map(|&x| i64::from(x)).collect()),
            Array::I32(v) => Some(v.iter().map(|&x| i64::from(x)).collect()),
            _ => None,
        }
    }
}

//! Values of metadata.

use std::fmt::{self, Display, Formatter};

use crate::cursor::Cursor;
use crate::error::shown;
use crate::{Error, ReadAt};

/// Most bytes that are shown of a text.
const SHOWN: usize = 60;

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the format's own types, by their names")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(Box<str>),
    Array(Array),
}

/// Values of one type. The format also has arrays of arrays. No model in use has them, and they are refused.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the format's own types, by their names")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Text(Texts),
}

/// Many short texts, such as the tokens of a vocabulary, in one allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Texts {
    joined: String,
    /// Where each text ends. The next text begins there.
    ends: Vec<u32>,
}

impl Texts {
    /// The number of texts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The text at an index.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&str> {
        let start = match index.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => 0,
        };
        self.joined.get(start as usize..*self.ends.get(index)? as usize)
    }

    /// All texts in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }
}

/// Numbers of the types in a file.
mod code {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const TEXT: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

impl Value {
    /// Reads a type and a value of it.
    pub(crate) fn read<S: ReadAt>(cursor: &mut Cursor<'_, S>, key: &str) -> Result<Self, Error> {
        let what = &|| format!("key {}", shown(key));
        Ok(match cursor.u32(what)? {
            code::U8 => Self::U8(u8::from_le_bytes(cursor.take(what)?)),
            code::I8 => Self::I8(i8::from_le_bytes(cursor.take(what)?)),
            code::U16 => Self::U16(u16::from_le_bytes(cursor.take(what)?)),
            code::I16 => Self::I16(i16::from_le_bytes(cursor.take(what)?)),
            code::U32 => Self::U32(u32::from_le_bytes(cursor.take(what)?)),
            code::I32 => Self::I32(i32::from_le_bytes(cursor.take(what)?)),
            code::U64 => Self::U64(u64::from_le_bytes(cursor.take(what)?)),
            code::I64 => Self::I64(i64::from_le_bytes(cursor.take(what)?)),
            code::F32 => Self::F32(f32::from_le_bytes(cursor.take(what)?)),
            code::F64 => Self::F64(f64::from_le_bytes(cursor.take(what)?)),
            code::BOOL => Self::Bool(flag(cursor.take(what)?, key)?),
            code::TEXT => {
                let length = cursor.u64(what)?;
                let mut bytes = Vec::new();
                cursor.append(length, &mut bytes, what)?;
                Self::Text(utf8(bytes, key)?.into_boxed_str())
            }
            code::ARRAY => Self::Array(Array::read(cursor, key)?),
            other => return Err(Error::damaged(what(), format!("its type is {other}, which is none"))),
        })
    }
}

impl Array {
    fn read<S: ReadAt>(cursor: &mut Cursor<'_, S>, key: &str) -> Result<Self, Error> {
        let what = &|| format!("key {}", shown(key));
        let kind = cursor.u32(what)?;
        let count = cursor.u64(what)?;
        Ok(match kind {
            code::U8 => Self::U8(numbers(cursor, count, key, u8::from_le_bytes)?),
            code::I8 => Self::I8(numbers(cursor, count, key, i8::from_le_bytes)?),
            code::U16 => Self::U16(numbers(cursor, count, key, u16::from_le_bytes)?),
            code::I16 => Self::I16(numbers(cursor, count, key, i16::from_le_bytes)?),
            code::U32 => Self::U32(numbers(cursor, count, key, u32::from_le_bytes)?),
            code::I32 => Self::I32(numbers(cursor, count, key, i32::from_le_bytes)?),
            code::U64 => Self::U64(numbers(cursor, count, key, u64::from_le_bytes)?),
            code::I64 => Self::I64(numbers(cursor, count, key, i64::from_le_bytes)?),
            code::F32 => Self::F32(numbers(cursor, count, key, f32::from_le_bytes)?),
            code::F64 => Self::F64(numbers(cursor, count, key, f64::from_le_bytes)?),
            code::BOOL => {
                let bytes = numbers(cursor, count, key, |byte: [u8; 1]| byte)?;
                Self::Bool(bytes.into_iter().map(|byte| flag(byte, key)).collect::<Result<_, _>>()?)
            }
            code::TEXT => Self::Text(texts(cursor, count, key)?),
            code::ARRAY => return Err(Error::damaged(what(), "an array of arrays, which is not read")),
            other => return Err(Error::damaged(what(), format!("an array of type {other}, which is none"))),
        })
    }

    /// The number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::U8(values) => values.len(),
            Self::I8(values) => values.len(),
            Self::U16(values) => values.len(),
            Self::I16(values) => values.len(),
            Self::U32(values) => values.len(),
            Self::I32(values) => values.len(),
            Self::U64(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::Bool(values) => values.len(),
            Self::Text(values) => values.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name of the type of its values.
    fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Bool(_) => "bool",
            Self::Text(_) => "text",
        }
    }
}

/// The form for messages: a number in full, a text cut short, an array as its length and type.
impl Display for Value {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(value) => value.fmt(out),
            Self::I8(value) => value.fmt(out),
            Self::U16(value) => value.fmt(out),
            Self::I16(value) => value.fmt(out),
            Self::U32(value) => value.fmt(out),
            Self::I32(value) => value.fmt(out),
            Self::U64(value) => value.fmt(out),
            Self::I64(value) => value.fmt(out),
            Self::F32(value) => value.fmt(out),
            Self::F64(value) => value.fmt(out),
            Self::Bool(value) => value.fmt(out),
            Self::Text(value) if value.len() <= SHOWN => write!(out, "{value:?}"),
            Self::Text(value) => {
                let shown = &value[..value.floor_char_boundary(SHOWN)];
                write!(out, "{shown:?} and {} bytes more", value.len() - shown.len())
            }
            Self::Array(array) => write!(out, "an array of {} {}", array.len(), array.type_name()),
        }
    }
}

fn numbers<S: ReadAt, T, const N: usize>(
    cursor: &mut Cursor<'_, S>,
    count: u64,
    key: &str,
    number: impl Fn([u8; N]) -> T,
) -> Result<Vec<T>, Error> {
    let what = &|| format!("key {}, an array of {count}", shown(key));
    cursor.expect(count, N as u64, what)?;
    let mut values = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
    for _ in 0..count {
        values.push(number(cursor.take(what)?));
    }
    Ok(values)
}

fn texts<S: ReadAt>(cursor: &mut Cursor<'_, S>, count: u64, key: &str) -> Result<Texts, Error> {
    let what = &|| format!("key {}, an array of {count}", shown(key));
    // Each text has its length of 8 bytes in front.
    cursor.expect(count, 8, what)?;
    let mut ends = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
    let mut joined = Vec::new();
    for _ in 0..count {
        let length = cursor.u64(what)?;
        cursor.append(length, &mut joined, what)?;
        // This cannot fail: `MAX_HEADER` is less than the largest u32.
        let end = u32::try_from(joined.len());
        ends.push(end.map_err(|error| Error::damaged(what(), error.to_string()))?);
    }
    let texts = Texts { joined: utf8(joined, key)?, ends };
    match texts.ends.iter().position(|end| !texts.joined.is_char_boundary(*end as usize)) {
        Some(index) => Err(Error::damaged(format!("key {}, text {index}", shown(key)), "it is not UTF-8")),
        None => Ok(texts),
    }
}

fn flag([byte]: [u8; 1], key: &str) -> Result<bool, Error> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::damaged(format!("key {}", shown(key)), format!("a bool of value {other}"))),
    }
}

fn utf8(bytes: Vec<u8>, key: &str) -> Result<String, Error> {
    String::from_utf8(bytes).map_err(|error| {
        Error::damaged(format!("key {}", shown(key)), format!("it is not UTF-8: {}", error.utf8_error()))
    })
}

//! The keys and values with which a file describes its model.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::cursor::Cursor;
use crate::error::shown;
use crate::{Array, Error, ReadAt, Texts, Value};

/// Most keys of a file. Models have about 40.
const MAX_KEYS: u64 = 1 << 16;
/// Most bytes of a key, by the format.
const MAX_KEY: u64 = (1 << 16) - 1;
/// Least bytes of a key with its value: a length, a byte of name, a type and a byte of value.
const LEAST_ENTRY: u64 = 8 + 1 + 4 + 1;

/// Keys and their values.
///
/// A getter for a type returns `None` if the key is absent, and an error if its value is of another type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(BTreeMap<String, Value>);

impl Metadata {
    pub(crate) fn read<S: ReadAt>(cursor: &mut Cursor<'_, S>, count: u64) -> Result<Self, Error> {
        if count > MAX_KEYS {
            return Err(Error::Limit { what: "metadata keys".to_owned(), found: count, most: MAX_KEYS });
        }
        cursor.expect(count, LEAST_ENTRY, &|| format!("metadata of {count} keys"))?;
        let mut values = BTreeMap::new();
        for index in 0..count {
            let key = cursor.name(MAX_KEY, &|| format!("the name of key {index}"))?;
            let value = Value::read(cursor, &key)?;
            match values.entry(key) {
                Entry::Vacant(entry) => drop(entry.insert(value)),
                Entry::Occupied(entry) => {
                    return Err(Error::damaged(
                        format!("key {}", shown(entry.key())),
                        "it stands there twice",
                    ));
                }
            }
        }
        Ok(Self(values))
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// All keys and values, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// A text.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>, Error> {
        self.read_as(key, "a text", |value| match value {
            Value::Text(text) => Some(&**text),
            _ => None,
        })
    }

    /// A whole number, not negative, of any integer type.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, Error> {
        self.read_as(key, "a whole number that is not negative", |value| match *value {
            Value::U8(number) => Some(number.into()),
            Value::U16(number) => Some(number.into()),
            Value::U32(number) => Some(number.into()),
            Value::U64(number) => Some(number),
            Value::I8(number) => number.try_into().ok(),
            Value::I16(number) => number.try_into().ok(),
            Value::I32(number) => number.try_into().ok(),
            Value::I64(number) => number.try_into().ok(),
            _ => None,
        })
    }

    /// A number of any type that `f64` holds exactly: floats, and whole numbers of up to 32 bits. It may be infinite or NaN.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.read_as(key, "a number", |value| match *value {
            Value::F32(number) => Some(number.into()),
            Value::F64(number) => Some(number),
            Value::U8(number) => Some(number.into()),
            Value::U16(number) => Some(number.into()),
            Value::U32(number) => Some(number.into()),
            Value::I8(number) => Some(number.into()),
            Value::I16(number) => Some(number.into()),
            Value::I32(number) => Some(number.into()),
            _ => None,
        })
    }

    /// A bool.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, Error> {
        self.read_as(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// An array of texts.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn texts(&self, key: &str) -> Result<Option<&Texts>, Error> {
        self.read_as(key, "an array of texts", |value| match value {
            Value::Array(Array::Text(texts)) => Some(texts),
            _ => None,
        })
    }

    /// An array of floats.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, Error> {
        self.read_as(key, "an array of floats", |value| match value {
            Value::Array(Array::F32(numbers)) => Some(widened(numbers)),
            Value::Array(Array::F64(numbers)) => Some(numbers.clone()),
            _ => None,
        })
    }

    /// An array of whole numbers.
    ///
    /// # Errors
    /// When the key holds something else, or a number is beyond `i64`.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, Error> {
        self.read_as(key, "an array of whole numbers", |value| match value {
            Value::Array(Array::U8(numbers)) => Some(widened(numbers)),
            Value::Array(Array::I8(numbers)) => Some(widened(numbers)),
            Value::Array(Array::U16(numbers)) => Some(widened(numbers)),
            Value::Array(Array::I16(numbers)) => Some(widened(numbers)),
            Value::Array(Array::U32(numbers)) => Some(widened(numbers)),
            Value::Array(Array::I32(numbers)) => Some(widened(numbers)),
            Value::Array(Array::I64(numbers)) => Some(numbers.clone()),
            Value::Array(Array::U64(numbers)) => {
                numbers.iter().map(|number| i64::try_from(*number).ok()).collect()
            }
            _ => None,
        })
    }

    /// An array of bools.
    ///
    /// # Errors
    /// When the key holds something else.
    pub fn flags(&self, key: &str) -> Result<Option<&[bool]>, Error> {
        self.read_as(key, "an array of true and false", |value| match value {
            Value::Array(Array::Bool(flags)) => Some(flags.as_slice()),
            _ => None,
        })
    }

    fn read_as<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(Error::Type { key: key.to_owned(), found: value.to_string(), expected }),
        }
    }
}

fn widened<T: Copy + Into<U>, U>(numbers: &[T]) -> Vec<U> {
    numbers.iter().map(|number| (*number).into()).collect()
}

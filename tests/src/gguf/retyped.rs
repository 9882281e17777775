//! A real model in another type of elements.

use std::path::Path;

use host_gguf::{Array, Gguf, Value};

use super::{GgufFile, text, value};
use crate::stored::Stored;

/// The model of a file, with all its matrices in this type and vectors in f32, as llama.cpp's converter writes them. Quantized
/// matrices are expanded, and values are rounded where the type is narrower.
///
/// # Panics
/// When the file cannot be read.
#[must_use]
pub fn retyped(source: &Path, stored: Stored) -> GgufFile {
    let gguf = Gguf::open(source).expect("a GGUF file");
    let mut file = GgufFile::default();
    for (key, value) in gguf.metadata().iter() {
        // These keys describe the source file.
        if !["general.alignment", "general.file_type", "general.quantization_version"].contains(&key) {
            let (kind, bytes) = encoded(value);
            file.raw(key, kind, &bytes);
        }
    }
    for tensor in gguf.tensors() {
        let elements: u64 = tensor.dimensions().iter().product();
        let mut values = vec![0.0; usize::try_from(elements).expect("a tensor that fits into memory")];
        gguf.read_rows(tensor, 0, &mut values).expect("a tensor of the file");
        let stored = if tensor.dimensions().len() == 1 { Stored::F32 } else { stored };
        let mut data = Vec::with_capacity(4 * values.len());
        values.into_iter().for_each(|value| stored.append(stored.rounded(value), &mut data));
        file.tensor(tensor.name(), tensor.dimensions(), stored.gguf_kind(), data);
    }
    file
}

/// The number of a value's type, and the value as it is written.
fn encoded(value: &Value) -> (u32, Vec<u8>) {
    match value {
        Value::U8(value) => (value::U8, value.to_le_bytes().to_vec()),
        Value::I8(value) => (value::I8, value.to_le_bytes().to_vec()),
        Value::U16(value) => (value::U16, value.to_le_bytes().to_vec()),
        Value::I16(value) => (value::I16, value.to_le_bytes().to_vec()),
        Value::U32(value) => (value::U32, value.to_le_bytes().to_vec()),
        Value::I32(value) => (value::I32, value.to_le_bytes().to_vec()),
        Value::U64(value) => (value::U64, value.to_le_bytes().to_vec()),
        Value::I64(value) => (value::I64, value.to_le_bytes().to_vec()),
        Value::F32(value) => (value::F32, value.to_le_bytes().to_vec()),
        Value::F64(value) => (value::F64, value.to_le_bytes().to_vec()),
        Value::Bool(value) => (value::BOOL, vec![u8::from(*value)]),
        Value::Text(value) => (value::TEXT, text(value.as_bytes())),
        Value::Array(array) => {
            let (kind, count, bytes) = elements(array);
            (value::ARRAY, [&kind.to_le_bytes()[..], &(count as u64).to_le_bytes(), &bytes].concat())
        }
    }
}

/// The number of the type of an array's elements, how many there are, and all of them as they are written.
fn elements(array: &Array) -> (u32, usize, Vec<u8>) {
    macro_rules! numbers {
        ($kind:expr, $values:expr) => {
            ($kind, $values.len(), $values.iter().flat_map(|value| value.to_le_bytes()).collect())
        };
    }
    match array {
        Array::U8(values) => numbers!(value::U8, values),
        Array::I8(values) => numbers!(value::I8, values),
        Array::U16(values) => numbers!(value::U16, values),
        Array::I16(values) => numbers!(value::I16, values),
        Array::U32(values) => numbers!(value::U32, values),
        Array::I32(values) => numbers!(value::I32, values),
        Array::U64(values) => numbers!(value::U64, values),
        Array::I64(values) => numbers!(value::I64, values),
        Array::F32(values) => numbers!(value::F32, values),
        Array::F64(values) => numbers!(value::F64, values),
        Array::Bool(values) => {
            (value::BOOL, values.len(), values.iter().map(|flag| u8::from(*flag)).collect())
        }
        Array::Text(values) => {
            (value::TEXT, values.len(), values.iter().flat_map(|value| text(value.as_bytes())).collect())
        }
    }
}

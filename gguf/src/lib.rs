//! Reads GGUF files, the format that llama.cpp keeps models in.
//!
//! ```text
//! magic, version, counts | metadata: key, type, value | tensor table | padding | data of the tensors
//! '------------------------------ header -----------------------------'
//! ```
//!
//! [`Gguf::open`] reads the header and checks all of it. Data is read row by row on request: [`Gguf::read_rows`]
//! expands to `f32`, [`Gguf::read_raw_rows`] copies. Everything is little-endian.
//!
//! A file is not trusted. Every length is checked against the file's size before memory is allocated, so the file's size
//! bounds the memory. The data of a tensor lies inside the file and overlaps no other tensor. Reading never panics. Errors
//! name the key or the tensor, but not the file: only the caller knows its path.
#![forbid(unsafe_code)]

mod cursor;
mod dequantize;
mod error;
mod file;
mod kind;
mod metadata;
mod source;
mod tensor;
mod value;

pub use error::Error;
pub use file::Gguf;
pub use kind::Kind;
pub use metadata::Metadata;
pub use source::ReadAt;
pub use tensor::TensorInfo;
pub use value::{Array, Texts, Value};

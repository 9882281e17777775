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
//! A file is not trusted. No length is believed before the file was seen to be that long, so that memory is bounded by
//! the file's size. What a tensor claims lies inside the file and overlaps nothing. Reading never panics. Errors name the
//! key or the tensor. They do not name the file, which only the caller knows the path of.
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

//! The stable boundary between `host` and its plugins.
//!
//! A plugin is a shared library that plays one or more *roles*. Each role is a plain Rust trait in this crate; the
//! export macro turns an implementation into the checked ABI that the host loads.

pub mod error;
pub mod transfer;

pub use error::{Error, ErrorCode, Result};

//! A GGUF file, read as a model's is.

#[path = "../../../gguf/tests/damage/exercise.rs"]
mod exercised;

pub use exercised::exercise;

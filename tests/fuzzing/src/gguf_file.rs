//! Reads a GGUF file like that of a model.

#[path = "../../../gguf/tests/damage/exercise.rs"]
mod exercised;

pub use exercised::exercise;

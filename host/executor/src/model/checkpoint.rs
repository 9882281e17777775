//! The weights of a model, in either format. Callers name a tensor as Hugging Face's files do.

mod gguf;
mod safetensors;

use std::path::Path;

use host_kernels::math::Element;

pub(crate) use self::gguf::GgufWeights;
pub(crate) use self::safetensors::{Safetensors, header_of_bytes as safetensors_header, parse_index};
use super::error::LoadError;

/// The weights of a model.
pub(crate) enum Checkpoint {
    /// Files of a directory.
    Safetensors(Safetensors),
    /// One file.
    Gguf(GgufWeights),
}

/// A tensor whose shape and element type have been checked.
pub(crate) struct Tensor<'a>(Rows<'a>);

enum Rows<'a> {
    Safetensors(safetensors::Rows<'a>),
    Gguf(gguf::Rows<'a>),
}

impl Checkpoint {
    /// Finds a tensor and checks that it has this shape and an element type that we read.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, LoadError> {
        Ok(Tensor(match self {
            Self::Safetensors(weights) => Rows::Safetensors(weights.tensor(name, shape)?),
            Self::Gguf(weights) => Rows::Gguf(weights.tensor(name, shape)?),
        }))
    }
}

impl Tensor<'_> {
    /// The file that holds it.
    pub fn path(&self) -> &Path {
        match &self.0 {
            Rows::Safetensors(rows) => rows.path(),
            Rows::Gguf(rows) => rows.path(),
        }
    }

    /// The type that it is read as: the stored type, or f32 if the stored type is quantized.
    pub fn element(&self) -> Element {
        match &self.0 {
            Rows::Safetensors(rows) => rows.element,
            Rows::Gguf(rows) => rows.element,
        }
    }

    /// Elements of one row.
    fn width(&self) -> usize {
        match &self.0 {
            Rows::Safetensors(rows) => rows.width,
            Rows::Gguf(rows) => rows.width,
        }
    }

    /// Fills `bytes` with rows from `first` on, as `element`: the tensor's own type, or f32.
    pub fn read_rows(&self, first: usize, element: Element, bytes: &mut [u8]) -> Result<(), LoadError> {
        let own = self.element();
        if element == own {
            return self.read(first, bytes);
        }
        let count = bytes.len() / element.bytes();
        let mut stored = vec![0; count * own.bytes()];
        self.read(first, &mut stored)?;
        let mut wide = vec![0.0; count];
        own.widen(&stored, &mut wide);
        write_floats(&wide, bytes);
        Ok(())
    }

    /// Reads a vector.
    pub fn read_vector(&self) -> Result<Vec<f32>, LoadError> {
        let mut bytes = vec![0; self.width() * self.element().bytes()];
        self.read(0, &mut bytes)?;
        let mut vector = vec![0.0; self.width()];
        self.element().widen(&bytes, &mut vector);
        Ok(vector)
    }

    fn read(&self, first: usize, bytes: &mut [u8]) -> Result<(), LoadError> {
        match &self.0 {
            Rows::Safetensors(rows) => rows.read(first, bytes),
            Rows::Gguf(rows) => rows.read(first, bytes),
        }
    }
}

fn write_floats(floats: &[f32], bytes: &mut [u8]) {
    for (bytes, float) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(floats) {
        *bytes = float.to_le_bytes();
    }
}

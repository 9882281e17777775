//! Weights in memory, packed for the CPU's products.

use host_kernels::math::{Math, PackError, Panels};

use crate::model::{Layer, LoadError, MatrixSource, WeightMemory, Weights};

/// A rank's weights.
pub(super) type PackedWeights = Weights<Panels, Vec<f32>>;
/// The weights of a layer.
pub(super) type PackedLayer = Layer<Panels, Vec<f32>>;

/// Packs matrices in panels.
pub(super) struct Packed<'a> {
    pub math: &'a Math,
    /// Whether bf16 is widened to f32 in memory.
    pub widen: bool,
}

impl WeightMemory for Packed<'_> {
    type Matrix = Panels;
    type Vector = Vec<f32>;

    fn matrix(&self, source: &MatrixSource<'_>) -> Result<Panels, LoadError> {
        let (outputs, inputs) = (source.outputs, source.inputs);
        let packed = Panels::pack(self.math, outputs, inputs, source.element, self.widen, |rows, bytes| {
            source.read(rows, bytes)
        });
        packed.map_err(|error| match error {
            PackError::Read(error) => error,
            PackError::TooLarge => source.too_large(),
        })
    }

    fn vector(&self, values: Vec<f32>) -> Result<Vec<f32>, LoadError> {
        Ok(values)
    }
}

/// Bytes of the matrices.
pub(super) fn bytes(weights: &PackedWeights) -> usize {
    let layer = |layer: &PackedLayer| {
        let Layer { query_key_value, attention_output, gate_up, down, .. } = layer;
        [query_key_value, attention_output, gate_up, down].map(Panels::bytes).iter().sum::<usize>()
    };
    weights.embedding.bytes()
        + weights.output.as_ref().map_or(0, Panels::bytes)
        + weights.layers.iter().map(layer).sum::<usize>()
}

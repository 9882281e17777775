//! Weight matrices, packed for the matrix product.

use std::ops::Range;

use rayon::prelude::*;

use super::Math;
use super::convert::{Element, f32_from_bf16};

/// Output columns of one panel: two registers of 8 lanes.
pub(super) const PANEL: usize = 16;

/// A weight matrix of `outputs` rows and `inputs` columns (as checkpoints store it), packed in panels of 16 outputs.
///
/// Panel p holds outputs 16p .. 16p+16 as `[input][16]`, so that the product reads memory in one direction. The last
/// panel is filled up with zeros. Elements are `f32`, or bf16 that is widened (exactly) when used: both give the same
/// bits.
pub struct Panels {
    outputs: usize,
    inputs: usize,
    pub(super) data: PanelData,
}

pub(super) enum PanelData {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

/// Why a matrix could not be packed.
#[derive(Debug)]
pub enum PackError<E> {
    /// The caller's reader failed.
    Read(E),
    /// The packed matrix would not fit in the address space.
    TooLarge,
}

impl Panels {
    /// Packs a matrix whose rows `read` delivers as little-endian `source` elements: `read(rows, bytes)` fills `bytes`
    /// with the rows of that range, at most 16 of them, and is called from several threads.
    ///
    /// bf16 sources stay bf16 unless `widen` is set. All others become `f32`. Nothing is rounded.
    ///
    /// # Errors
    /// The first error of `read`, or a matrix too large for this machine's addresses.
    pub fn pack<E: Send>(
        math: &Math,
        outputs: usize,
        inputs: usize,
        source: Element,
        widen: bool,
        read: impl Fn(Range<usize>, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<Self, PackError<E>> {
        let panel = inputs.checked_mul(PANEL).ok_or(PackError::TooLarge)?;
        let elements = outputs
            .div_ceil(PANEL)
            .checked_mul(panel)
            .filter(|&elements| elements <= isize::MAX as usize / 4)
            .ok_or(PackError::TooLarge)?;
        let fetch = |index: usize| {
            let rows = index * PANEL..outputs.min((index + 1) * PANEL);
            let mut bytes = vec![0; rows.len() * inputs * source.bytes()];
            read(rows, &mut bytes).map(|()| bytes).map_err(PackError::Read)
        };
        let data = if source == Element::Bf16 && !widen {
            let mut packed = vec![0u16; elements];
            math.run(|| {
                packed.par_chunks_mut(panel.max(1)).enumerate().try_for_each(|(index, target)| {
                    fetch(index).map(|bytes| transpose_bf16(&bytes, inputs, target))
                })
            })?;
            PanelData::Bf16(packed)
        } else {
            let mut packed = vec![0f32; elements];
            math.run(|| {
                packed.par_chunks_mut(panel.max(1)).enumerate().try_for_each(|(index, target)| {
                    fetch(index).map(|bytes| transpose_wide(&bytes, source, inputs, target))
                })
            })?;
            PanelData::F32(packed)
        };
        Ok(Self { outputs, inputs, data })
    }

    /// Packs a matrix that lies in memory, row by row.
    ///
    /// # Panics
    /// When `rows` is not `outputs * inputs` long.
    #[must_use]
    pub fn from_rows(math: &Math, outputs: usize, inputs: usize, rows: &[f32]) -> Self {
        assert_eq!(rows.len(), outputs * inputs, "a matrix of {outputs} rows and {inputs} columns");
        let packed = Self::pack(math, outputs, inputs, Element::F32, true, |range, bytes| {
            let rows = &rows[range.start * inputs..range.end * inputs];
            for (target, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(rows) {
                *target = value.to_le_bytes();
            }
            Ok::<(), std::convert::Infallible>(())
        });
        match packed {
            Ok(panels) => panels,
            Err(PackError::Read(never)) => match never {},
            Err(PackError::TooLarge) => unreachable!("the matrix is in memory already"),
        }
    }

    /// Rows of the matrix: elements of a product's output row.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of the matrix: elements of a product's input row.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes of the packed elements.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.data {
            PanelData::F32(data) => data.len() * 4,
            PanelData::Bf16(data) => data.len() * 2,
        }
    }

    /// Reads row `output` of the matrix back. A tied embedding is looked up in this way.
    ///
    /// # Panics
    /// When there is no such row, or `target` is not `inputs` long.
    pub fn row(&self, output: usize, target: &mut [f32]) {
        assert!(output < self.outputs, "row {output} of a matrix of {} rows", self.outputs);
        assert_eq!(target.len(), self.inputs, "a row of {} elements", self.inputs);
        let start = output / PANEL * PANEL * self.inputs + output % PANEL;
        match &self.data {
            PanelData::F32(data) => {
                for (target, value) in target.iter_mut().zip(data[start..].iter().step_by(PANEL)) {
                    *target = *value;
                }
            }
            PanelData::Bf16(data) => {
                for (target, value) in target.iter_mut().zip(data[start..].iter().step_by(PANEL)) {
                    *target = f32_from_bf16(*value);
                }
            }
        }
    }
}

fn transpose_bf16(bytes: &[u8], inputs: usize, target: &mut [u16]) {
    for (lane, row) in bytes.chunks_exact((inputs * 2).max(1)).enumerate() {
        for (source, target) in row.as_chunks::<2>().0.iter().zip(target[lane..].iter_mut().step_by(PANEL)) {
            *target = u16::from_le_bytes(*source);
        }
    }
}

fn transpose_wide(bytes: &[u8], element: Element, inputs: usize, target: &mut [f32]) {
    let mut wide = vec![0.0; inputs];
    for (lane, row) in bytes.chunks_exact((inputs * element.bytes()).max(1)).enumerate() {
        element.widen(row, &mut wide);
        for (source, target) in wide.iter().zip(target[lane..].iter_mut().step_by(PANEL)) {
            *target = *source;
        }
    }
}

//! A batch on the device: tokens, positions, page tables and angles, in one copy.

use std::sync::Arc;

use host_core::Sequence;
use host_kernels::cuda::batch::Rows;
use host_kernels::cuda::{Array, CudaError, CudaStream, Device, Pinned};

use crate::model::{Angles, Rotation};
use crate::window::LayerPlace;

/// Memory for batches, kept between batches. It is as large as the largest batch so far.
pub(super) struct BatchMemory {
    words: Vec<u32>,
    pinned: Pinned<u32>,
    memory: Array<u32>,
    angles: Angles,
}

/// The arrays that describe a batch to kernels.
pub(super) struct BatchArrays {
    /// All arrays one behind the other, in the host's memory.
    pub source: Array<u32>,
    /// All arrays one behind the other, on the device.
    pub all: Array<u32>,
    /// Words of all arrays together, a multiple of 4.
    pub words: usize,
    pub rows: Rows,
    /// Cosines and sines of each row's position, `[row][pair of dimensions]`.
    pub cosines: Array<f32>,
    pub sines: Array<f32>,
    /// The rows whose logits are wanted.
    pub wanted: Array<u32>,
    /// Number of the wanted rows.
    pub outputs: usize,
}

impl BatchMemory {
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        const WORDS: usize = 1 << 12;
        Ok(Self {
            words: Vec::new(),
            pinned: Pinned::new(device, WORDS)?,
            memory: Array::new(device, WORDS)?,
            angles: Angles::default(),
        })
    }

    /// Lays a batch out for the device: the rows of the sequences in the order `order`, which names each sequence once. The logits
    /// of the last `wanted` rows of each sequence are wanted, in the order of the batch. The caller fills the arrays by a copy from
    /// [`BatchArrays::source`] to [`BatchArrays::all`].
    pub fn lay_out(
        &mut self,
        stream: &CudaStream,
        sequences: &[Sequence],
        order: &[usize],
        rotation: &Rotation,
        wanted: impl Fn(&Sequence) -> usize,
    ) -> Result<BatchArrays, CudaError> {
        let placed = || order.iter().map(|index| &sequences[*index]);
        let rows: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        rotation.angles(placed().flat_map(|s| s.start as usize..s.end()), rows, &mut self.angles);
        let (cosines, sines) = self.angles.of(LayerPlace::Full { layer: 0 });
        let mut packed = Packed { words: &mut self.words };
        packed.words.clear();
        let token = packed.add(placed().flat_map(|sequence| sequence.tokens.iter().copied()));
        let position = packed.add(placed().flat_map(|s| s.start..s.start + s.tokens.len() as u32));
        let mut first = 0;
        let table = packed.add(placed().flat_map(|sequence| {
            first += sequence.pages.len() as u32;
            std::iter::repeat_n(first - sequence.pages.len() as u32, sequence.tokens.len())
        }));
        let mut ends = vec![0; sequences.len()];
        let mut end = 0;
        for (index, sequence) in order.iter().zip(placed()) {
            end += sequence.tokens.len() as u32;
            ends[*index] = end;
        }
        let chosen = packed
            .add(sequences.iter().zip(&ends).flat_map(|(sequence, end)| end - wanted(sequence) as u32..*end));
        let cosines = packed.add(cosines.iter().map(|cosine| cosine.to_bits()));
        let sines = packed.add(sines.iter().map(|sine| sine.to_bits()));
        // The pages come last, so that the places of the other arrays depend on the numbers of rows and wanted rows alone.
        let pages = packed.add(placed().flat_map(|s| s.pages.iter().map(|page| page.0)));
        let length = self.words.len().next_multiple_of(4);
        // An earlier batch that failed may still be under way.
        self.memory.device().wait(stream)?;
        self.pinned.reserve(length)?;
        self.memory.reserve(length)?;
        // SAFETY: the stream was waited for, and nothing else reads the memory.
        let words = unsafe { self.pinned.elements_mut() };
        words[..self.words.len()].copy_from_slice(&self.words);
        let part = |range: std::ops::Range<usize>| self.memory.part(range.start, range.len());
        Ok(BatchArrays {
            rows: Rows {
                rows,
                sequences: sequences.len(),
                token: part(token),
                position: part(position),
                table: part(table),
                pages: part(pages),
            },
            cosines: part(cosines).cast(),
            sines: part(sines).cast(),
            source: self.pinned.array(),
            all: self.memory.part(0, self.memory.len()),
            words: length,
            outputs: chosen.len(),
            wanted: part(chosen),
        })
    }
}

/// The words of several arrays, one array behind the other.
struct Packed<'a> {
    words: &'a mut Vec<u32>,
}

impl Packed<'_> {
    /// Appends an array, at a multiple of 16 bytes. Returns its place.
    fn add(&mut self, values: impl Iterator<Item = u32>) -> std::ops::Range<usize> {
        self.words.resize(self.words.len().next_multiple_of(4), 0);
        let start = self.words.len();
        self.words.extend(values);
        start..self.words.len()
    }
}

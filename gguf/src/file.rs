//! A GGUF file: its header is in memory, its data stays in the file.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use crate::cursor::Cursor;
use crate::dequantize::expand;
use crate::{Error, Metadata, ReadAt, TensorInfo, tensor};

const MAGIC: [u8; 4] = *b"GGUF";
/// The first bytes of the pointer that Git LFS leaves in place of a file that was not fetched.
const POINTER: [u8; 4] = *b"vers";
/// Alignment of the data in files that do not name one.
const ALIGNMENT: u64 = 32;
/// Bytes of stored rows that are expanded at once.
const CHUNK: u64 = 256 << 10;

/// A GGUF file whose header has been read and checked.
#[derive(Debug)]
pub struct Gguf<S = File> {
    source: S,
    size: u64,
    data_start: u64,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<Box<str>, usize>,
}

impl Gguf {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// When the file cannot be read, is no GGUF file, is damaged or truncated, is one of several that make up a model, or
    /// has a tensor of a type that is not read.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::read(File::open(path)?)
    }
}

impl<S: ReadAt> Gguf<S> {
    /// Reads the header of a file from any source.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn read(source: S) -> Result<Self, Error> {
        let mut cursor = Cursor::new(&source)?;
        let start = &|| "the start of the header".to_owned();
        let magic: [u8; 4] = cursor.take(start)?;
        if magic != MAGIC {
            let found = match magic {
                POINTER => {
                    "text, as the pointers do that Git LFS leaves for files not yet fetched".to_owned()
                }
                bytes => format!("bytes {bytes:02x?}"),
            };
            return Err(Error::NotGguf { found });
        }
        let version = cursor.u32(start)?;
        if version.swap_bytes() <= 0xff && version > 0xff {
            return Err(Error::BigEndian);
        }
        if !(2..=3).contains(&version) {
            return Err(Error::Version { found: version });
        }
        let tensor_count = cursor.u64(start)?;
        let key_count = cursor.u64(start)?;
        let metadata = Metadata::read(&mut cursor, key_count)?;
        let count = metadata.unsigned("split.count")?.unwrap_or(1);
        if count > 1 {
            return Err(Error::Split { count });
        }
        let alignment = metadata.unsigned("general.alignment")?.unwrap_or(ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > u64::from(u32::MAX) {
            let place = "key general.alignment";
            return Err(Error::damaged(place, format!("it is {alignment}, expected a power of two")));
        }
        let mut tensors = tensor::read(&mut cursor, tensor_count)?;
        let (size, data_start) = (cursor.size, cursor.position.next_multiple_of(alignment));
        tensor::place(&mut tensors, data_start, alignment, size)?;
        let by_name = tensors.iter().enumerate().map(|(index, tensor)| (tensor.name().into(), index));
        Ok(Self { by_name: by_name.collect(), source, size, data_start, metadata, tensors })
    }

    /// The keys and values that describe the model.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, in the order of the file's table.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// A tensor by its name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).and_then(|index| self.tensors.get(*index))
    }

    /// The source that the file is read from.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Bytes of the file.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Position of the first byte of data. All bytes before it are the header and its padding. In a file without tensors the
    /// position may lie behind the end.
    #[must_use]
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Fills `bytes` from the file, from `offset` on.
    ///
    /// # Errors
    /// When the file ends too early, or cannot be read.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        Ok(self.source.read_at(offset, bytes)?)
    }

    /// Fills `target` with rows of a tensor from `first` on, expanded to `f32`.
    ///
    /// Widening is exact. Quantized types are expanded by the operations of the `gguf` package of PyPI in their order, each
    /// rounded to `f32`, so that the result has the same bits.
    ///
    /// # Errors
    /// When `target` does not hold whole rows, the tensor has fewer rows, or the file cannot be read.
    pub fn read_rows(&self, tensor: &TensorInfo, first: u64, target: &mut [f32]) -> Result<(), Error> {
        let row = usize::try_from(tensor.row_elements()).unwrap_or(usize::MAX);
        self.check_rows(tensor, first, target.len(), row)?;
        let kind = tensor.kind();
        let chunk = usize::try_from(CHUNK).unwrap_or(usize::MAX) / kind.block_bytes();
        let mut offset = tensor.offset() + first * tensor.row_bytes();
        let mut stored = Vec::new();
        for target in target.chunks_mut(chunk * kind.block_elements()) {
            let bytes = target.len() / kind.block_elements() * kind.block_bytes();
            stored.resize(bytes, 0);
            self.read_at(offset, &mut stored)?;
            expand(kind, &stored, target);
            offset += bytes as u64;
        }
        Ok(())
    }

    /// Fills `target` with rows of a tensor from `first` on, as they are stored.
    ///
    /// # Errors
    /// As [`Gguf::read_rows`].
    pub fn read_raw_rows(&self, tensor: &TensorInfo, first: u64, target: &mut [u8]) -> Result<(), Error> {
        let row = usize::try_from(tensor.row_bytes()).unwrap_or(usize::MAX);
        self.check_rows(tensor, first, target.len(), row)?;
        self.read_at(tensor.offset() + first * tensor.row_bytes(), target)
    }

    fn check_rows(&self, tensor: &TensorInfo, first: u64, length: usize, row: usize) -> Result<(), Error> {
        let rows = tensor.rows();
        let refused = |requested: String| Error::Rows { tensor: tensor.name().to_owned(), rows, requested };
        if row == 0 || !length.is_multiple_of(row) {
            return Err(refused(format!("{length} of {row} per row")));
        }
        let count = (length / row) as u64;
        match first.checked_add(count) {
            Some(end) if end <= rows => Ok(()),
            _ => Err(refused(format!("{count} from row {first} on"))),
        }
    }
}

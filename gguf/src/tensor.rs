//! The table of tensors.

use std::collections::HashSet;

use crate::cursor::Cursor;
use crate::error::shown;
use crate::{Error, Kind, ReadAt};

/// Most tensors of a file. Large models have about 2,000.
const MAX_TENSORS: u64 = 1 << 16;
/// Most bytes of a tensor's name, by the format.
const MAX_NAME: u64 = 64;
/// Most dimensions, by the format.
const MAX_DIMENSIONS: u32 = 4;
/// Least bytes of an entry: length and a byte of name, a count and a dimension, a type and an offset.
const LEAST_ENTRY: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// A tensor: rows of elements, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    name: Box<str>,
    /// In the order of the file.
    dimensions: Vec<u64>,
    kind: Kind,
    /// Counts from the start of the data until [`place`] has checked the table, then from the start of the file.
    offset: u64,
    bytes: u64,
}

impl TensorInfo {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its dimensions in ggml's order: the elements of a row come first. In a safetensors shape they come last. There are one
    /// to four dimensions, and none is 0.
    #[must_use]
    pub fn dimensions(&self) -> &[u64] {
        &self.dimensions
    }

    /// How it is stored.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Elements of a row.
    #[must_use]
    pub fn row_elements(&self) -> u64 {
        self.dimensions.first().copied().unwrap_or(1)
    }

    /// The number of rows.
    #[must_use]
    pub fn rows(&self) -> u64 {
        // This cannot overflow: `read_entry` has checked the product of all dimensions.
        self.dimensions.iter().skip(1).product()
    }

    /// Bytes of a row as it is stored.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.row_elements() / self.kind.block_elements() as u64 * self.kind.block_bytes() as u64
    }

    /// Bytes of all rows as they are stored.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Place of its first byte in the file.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

/// Reads the table. Offsets count from the start of the data until [`place`] changes them.
pub(crate) fn read<S: ReadAt>(cursor: &mut Cursor<'_, S>, count: u64) -> Result<Vec<TensorInfo>, Error> {
    if count > MAX_TENSORS {
        return Err(Error::Limit { what: "tensors".to_owned(), found: count, most: MAX_TENSORS });
    }
    cursor.expect(count, LEAST_ENTRY, &|| format!("a table of {count} tensors"))?;
    let mut names = HashSet::new();
    let mut tensors = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
    for index in 0..count {
        let tensor = read_entry(cursor, index)?;
        if !names.insert(tensor.name.clone()) {
            return Err(Error::damaged(format!("tensor {}", shown(&tensor.name)), "it stands there twice"));
        }
        tensors.push(tensor);
    }
    Ok(tensors)
}

fn read_entry<S: ReadAt>(cursor: &mut Cursor<'_, S>, index: u64) -> Result<TensorInfo, Error> {
    let name = cursor.name(MAX_NAME, &|| format!("the name of tensor {index}"))?;
    let what = &|| format!("tensor {}", shown(&name));
    let damaged = |reason: String| Error::damaged(format!("tensor {}", shown(&name)), reason);
    let count = cursor.u32(what)?;
    if !(1..=MAX_DIMENSIONS).contains(&count) {
        return Err(damaged(format!("it has {count} dimensions, expected 1 to {MAX_DIMENSIONS}")));
    }
    let dimensions = (0..count).map(|_| cursor.u64(what)).collect::<Result<Vec<u64>, _>>()?;
    let number = cursor.u32(what)?;
    let offset = cursor.u64(what)?;
    let kind = Kind::of(number).map_err(|found| Error::Kind { tensor: shown(&name), found })?;
    let product = |numbers: &[u64]| numbers.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
    let elements = product(&dimensions).filter(|elements| (1..=i64::MAX as u64).contains(elements));
    let Some(elements) = elements else {
        return Err(damaged(format!("its dimensions are {dimensions:?}")));
    };
    let (block, block_bytes) = (kind.block_elements() as u64, kind.block_bytes() as u64);
    let row = dimensions.first().copied().unwrap_or(1);
    if !row.is_multiple_of(block) {
        let reason = format!("a row of {row} elements is no multiple of {block}, a block of {}", kind.name());
        return Err(damaged(reason));
    }
    let Some(bytes) = (elements / block).checked_mul(block_bytes) else {
        return Err(damaged(format!("its dimensions are {dimensions:?}")));
    };
    Ok(TensorInfo { name: name.into_boxed_str(), dimensions, kind, offset, bytes })
}

/// Checks where tensors lie, and makes their offsets count from the start of the file.
pub(crate) fn place(tensors: &mut [TensorInfo], start: u64, alignment: u64, size: u64) -> Result<(), Error> {
    for tensor in tensors.iter_mut() {
        let what = format!("tensor {}", shown(&tensor.name));
        if !tensor.offset.is_multiple_of(alignment) {
            let reason = format!("its offset {} is no multiple of the alignment {alignment}", tensor.offset);
            return Err(Error::damaged(what, reason));
        }
        let placed = start.checked_add(tensor.offset);
        let Some((placed, end)) = placed.and_then(|first| Some((first, first.checked_add(tensor.bytes)?)))
        else {
            let reason = format!("its offset {} lies beyond any file", tensor.offset);
            return Err(Error::damaged(what, reason));
        };
        if end > size {
            return Err(Error::Truncated { what, end, size });
        }
        tensor.offset = placed;
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        if let [before, after] = pair
            && before.offset + before.bytes > after.offset
        {
            let place = format!("tensor {}", shown(&after.name));
            return Err(Error::damaged(place, format!("it overlaps tensor {}", shown(&before.name))));
        }
    }
    Ok(())
}

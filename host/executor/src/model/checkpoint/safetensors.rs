//! Weights of a Hugging Face directory: one `model.safetensors`, or shards that an index names.
//!
//! A safetensors file is the length of a header (u64, little-endian), the header (JSON: per tensor its element type,
//! shape and byte range) and the data. Headers are checked against the file before any data is read.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use host_kernels::math::Element;
use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::model::LoadError;

/// Most bytes of a header, as in the reference implementation of the format.
const MAX_HEADER: u64 = 100_000_000;
/// Most tensors of a file. The largest models have some ten thousand.
const MAX_TENSORS: usize = 500_000;
/// Most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;
/// Most bytes of a shard index.
const MAX_INDEX: u64 = 100_000_000;

/// The weight files of a directory.
pub(crate) struct Safetensors {
    /// The single file, or the index. The error of a missing tensor names it.
    source: PathBuf,
    pub files: Vec<WeightFile>,
    /// For shards: the number of the file that should hold each tensor.
    placed: Option<BTreeMap<String, usize>>,
}

/// One safetensors file.
pub(crate) struct WeightFile {
    pub path: PathBuf,
    pub file: File,
    /// Bytes of the header.
    header: u64,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    #[serde(deserialize_with = "shape")]
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The tensors of a header. Nothing else in it is kept, so that a header takes little more memory than its bytes.
struct Header(BTreeMap<String, Entry>);

impl<'a> Deserialize<'a> for Header {
    fn deserialize<D: Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Tensors).map(Self)
    }
}

struct Tensors;

impl<'a> Visitor<'a> for Tensors {
    type Value = BTreeMap<String, Entry>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut tensors = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if tensors.len() == MAX_TENSORS {
                return Err(A::Error::custom(format!("it lists more than {MAX_TENSORS} tensors")));
            }
            let entry = map.next_value();
            let entry = entry.map_err(|error| A::Error::custom(format!("tensor {name}: {error}")))?;
            tensors.insert(name, entry);
        }
        Ok(tensors)
    }
}

/// Reads a shape. Longer ones are refused before they are kept.
fn shape<'a, D: Deserializer<'a>>(from: D) -> Result<Vec<usize>, D::Error> {
    from.deserialize_seq(Shape)
}

struct Shape;

impl<'a> Visitor<'a> for Shape {
    type Value = Vec<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX_DIMENSIONS} numbers")
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut shape = Vec::new();
        while let Some(extent) = list.next_element()? {
            if shape.len() == MAX_DIMENSIONS {
                return Err(A::Error::invalid_length(shape.len() + 1, &self));
            }
            shape.push(extent);
        }
        Ok(shape)
    }
}

/// A tensor whose shape and element type have been checked.
pub(super) struct Rows<'a> {
    file: &'a WeightFile,
    start: u64,
    pub element: Element,
    /// Elements of one row: the last dimension.
    pub width: usize,
}

impl Safetensors {
    pub fn open(directory: &Path) -> Result<Self, LoadError> {
        let single = directory.join("model.safetensors");
        if single.exists() {
            let file = WeightFile::open(single.clone())?;
            return Ok(Self { source: single, files: vec![file], placed: None });
        }
        let index = directory.join("model.safetensors.index.json");
        if !index.exists() {
            return Err(LoadError::NoWeights { directory: directory.to_owned() });
        }
        let names = read_index(&index)?;
        let mut numbers = BTreeMap::new();
        for name in names.values() {
            if !numbers.contains_key(name) {
                numbers.insert(name.clone(), numbers.len());
            }
        }
        let placed = names.into_iter().map(|(tensor, name)| (tensor, numbers[&name])).collect();
        let mut order: Vec<_> = numbers.into_iter().collect();
        order.sort_by_key(|(_, number)| *number);
        let files = order.into_iter().map(|(name, _)| WeightFile::open(directory.join(name)));
        Ok(Self { source: index, files: files.collect::<Result<_, _>>()?, placed: Some(placed) })
    }

    /// Finds a tensor and checks that it has this shape and an element type that we read.
    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Rows<'_>, LoadError> {
        let missing =
            |file: &Path| LoadError::MissingTensor { file: file.to_owned(), tensor: name.to_owned() };
        let number = match &self.placed {
            Some(placed) => *placed.get(name).ok_or_else(|| missing(&self.source))?,
            None => 0,
        };
        let file = &self.files[number];
        let entry = file.tensors.get(name).ok_or_else(|| missing(&file.path))?;
        let element = match entry.dtype.as_str() {
            "F32" => Element::F32,
            "BF16" => Element::Bf16,
            "F16" => Element::F16,
            other => {
                return Err(LoadError::ElementType {
                    file: file.path.clone(),
                    tensor: name.to_owned(),
                    found: other.to_owned(),
                    expected: "F32, BF16 or F16".to_owned(),
                });
            }
        };
        if entry.shape != shape {
            return Err(LoadError::Shape {
                file: file.path.clone(),
                tensor: name.to_owned(),
                found: entry.shape.clone(),
                expected: shape.to_owned(),
            });
        }
        let (start, end) = entry.data_offsets;
        let bytes = shape.iter().product::<usize>() * element.bytes();
        if end - start != bytes as u64 {
            let reason = format!(
                "tensor {name} of shape {shape:?} takes {bytes} bytes, its data_offsets span {}",
                end - start
            );
            return Err(LoadError::Parse { file: file.path.clone(), reason });
        }
        let width = shape.last().copied().unwrap_or(1);
        Ok(Rows { file, start: file.data_start() + start, element, width })
    }
}

impl WeightFile {
    fn open(path: PathBuf) -> Result<Self, LoadError> {
        let read = |source| LoadError::Read { file: path.clone(), source };
        let (file, metadata) = host_ownership::regular(&path).map_err(read)?;
        let bytes = metadata.len();
        let read_at = |buffer: &mut [u8], at| file.read_exact_at(buffer, at).map_err(read);
        let (header, tensors) = read_header(&path, bytes, read_at)?;
        Ok(Self { path, file, header, tensors })
    }

    /// Offset of the first byte of data.
    pub fn data_start(&self) -> u64 {
        8 + self.header
    }

    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), LoadError> {
        let read = |source| LoadError::Read { file: self.path.clone(), source };
        self.file.read_exact_at(bytes, offset).map_err(read)
    }
}

impl Rows<'_> {
    /// The file that holds them.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Reads rows from `first` on, as they are stored, until `bytes` is full.
    pub fn read(&self, first: usize, bytes: &mut [u8]) -> Result<(), LoadError> {
        self.file.read(self.start + (first * self.width * self.element.bytes()) as u64, bytes)
    }
}

/// Reads the header of a file of `bytes` bytes. Returns the header's bytes and the tensors in it. `read_at` fills a buffer from an
/// offset.
fn read_header(
    path: &Path,
    bytes: u64,
    read_at: impl Fn(&mut [u8], u64) -> Result<(), LoadError>,
) -> Result<(u64, BTreeMap<String, Entry>), LoadError> {
    let parse = |reason: String| LoadError::Parse { file: path.to_owned(), reason };
    let truncated = |expected| LoadError::Truncated { file: path.to_owned(), expected, found: bytes };
    if bytes < 8 {
        return Err(truncated(8));
    }
    let mut length = [0; 8];
    read_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER {
        return Err(parse(format!(
            "a header of {length} bytes, at most {MAX_HEADER} are read: not safetensors"
        )));
    }
    if bytes < 8 + length {
        return Err(truncated(8 + length));
    }
    let mut header = vec![0; length as usize];
    read_at(&mut header, 8)?;
    let Header(tensors) =
        serde_json::from_slice(&header).map_err(|error| parse(format!("bad header: {error}")))?;
    let mut described = 8 + length;
    for (name, entry) in &tensors {
        let (start, end) = entry.data_offsets;
        let end = (8 + length).checked_add(end).filter(|_| start <= end);
        let end =
            end.ok_or_else(|| parse(format!("tensor {name} has data_offsets {:?}", entry.data_offsets)))?;
        described = described.max(end);
    }
    if described > bytes {
        return Err(truncated(described));
    }
    Ok((length, tensors))
}

/// Whether the bytes are a file whose header can be read.
pub(crate) fn header_of_bytes(path: &Path, bytes: &[u8]) -> bool {
    let read_at = |buffer: &mut [u8], at: u64| {
        let at = at as usize;
        buffer.copy_from_slice(&bytes[at..at + buffer.len()]);
        Ok(())
    };
    let read = read_header(path, bytes.len() as u64, read_at);
    read.is_ok_and(|(header, tensors)| {
        let inside = |entry: &Entry| 8 + header + entry.data_offsets.1 <= bytes.len() as u64;
        assert!(tensors.values().all(inside), "a tensor lies outside of the file");
        true
    })
}

/// Reads an index: the name of each tensor's file.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, LoadError> {
    let read = |source| LoadError::Read { file: path.to_owned(), source };
    parse_index(path, &host_ownership::read_up_to(path, MAX_INDEX).map_err(read)?)
}

/// Parses an index: the name of each tensor's file.
pub(crate) fn parse_index(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, String>, LoadError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let parse = |reason: String| LoadError::Parse { file: path.to_owned(), reason };
    let index: Index = serde_json::from_slice(bytes).map_err(|error| parse(error.to_string()))?;
    for name in index.weight_map.values() {
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(parse(format!("shard {name:?} is not a plain file name")));
        }
    }
    if index.weight_map.is_empty() {
        return Err(parse("weight_map is empty".to_owned()));
    }
    Ok(index.weight_map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_of_more_tensors_than_models_have_is_refused() {
        let entry = |name| format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,0]}}");
        let header = |count: usize| format!("{{{}}}", (0..count).map(entry).collect::<Vec<_>>().join(","));
        let read = |count| serde_json::from_str::<Header>(&header(count)).map(|read| read.0.len());
        assert_eq!(read(1000).unwrap(), 1000);
        let refused = read(MAX_TENSORS + 1).unwrap_err();
        assert!(refused.to_string().contains("more than 500000 tensors"), "{refused}");
    }
}

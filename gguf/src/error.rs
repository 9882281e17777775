//! Why a file could not be read.

/// What is wrong with a GGUF file, or with a request for its content.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system would not give us bytes.
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// The file begins with something else.
    #[error("not a GGUF file: it begins with {found}")]
    NotGguf {
        /// Its first bytes, or what they tell.
        found: String,
    },
    /// Numbers in the other byte order.
    #[error("a big-endian GGUF file; only little-endian files are read")]
    BigEndian,
    /// A version of the format that is not read.
    #[error("GGUF version {found}; versions 2 and 3 are read, convert the model again")]
    Version {
        /// The file's version.
        found: u32,
    },
    /// A file that ends before what it describes does.
    #[error("truncated: {what} ends at byte {end}, the file has {size} bytes; download it again")]
    Truncated {
        /// What lies behind the end.
        what: String,
        /// First byte behind it.
        end: u64,
        /// Bytes of the file.
        size: u64,
    },
    /// More of something than is read.
    #[error("{what}: {found}, at most {most} are read")]
    Limit {
        /// Of what.
        what: String,
        /// How many the file has.
        found: u64,
        /// How many it may have.
        most: u64,
    },
    /// Something that no writer of the format produces.
    #[error("damaged: {place}: {reason}")]
    Damaged {
        /// The key, the tensor or the part of the file.
        place: String,
        /// What is wrong there.
        reason: String,
    },
    /// One of several files that make up a model.
    #[error(
        "split.count is {count}: the model lies in several files; merge them with llama-gguf-split --merge"
    )]
    Split {
        /// Files of the model.
        count: u64,
    },
    /// A tensor of a type that is not read.
    #[error("tensor {tensor} has type {found}; types that are read are {}", crate::Kind::names())]
    Kind {
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
    },
    /// A value of another type, or out of its range.
    #[error("{key} is {found}, expected {expected}")]
    Type {
        /// The key.
        key: String,
        /// What it is.
        found: String,
        /// The requested type.
        expected: &'static str,
    },
    /// Rows that a tensor does not have, or a buffer that holds no whole rows.
    #[error("tensor {tensor} has {rows} rows; {requested} cannot be read")]
    Rows {
        /// The tensor.
        tensor: String,
        /// Its rows.
        rows: u64,
        /// The requested rows.
        requested: String,
    },
}

impl Error {
    /// Damage at a key, a tensor or a part of the file.
    pub(crate) fn damaged(place: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Damaged { place: place.into(), reason: reason.into() }
    }
}

/// Most bytes of a name that are shown.
const SHOWN: usize = 80;

/// A name from a file as a message may show it: no control characters, and not at any length.
pub(crate) fn shown(name: &str) -> String {
    let shown = &name[..name.floor_char_boundary(SHOWN)];
    let rest = if shown.len() < name.len() { "…" } else { "" };
    format!("{}{rest}", shown.escape_debug())
}

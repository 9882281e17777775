//! Why a file could not be read.

/// What is wrong with a GGUF file, or with a request for its content.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system could not read the file.
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// The file does not begin as a GGUF file does.
    #[error("not a GGUF file: it begins with {found}")]
    NotGguf {
        /// The first bytes of the file, or what they mean.
        found: String,
    },
    /// A file with numbers in big-endian byte order.
    #[error("a big-endian GGUF file; only little-endian files are read")]
    BigEndian,
    /// A version of the format that is not read.
    #[error("GGUF version {found}; versions 2 and 3 are read, convert the model again")]
    Version {
        /// The file's version.
        found: u32,
    },
    /// A file that is shorter than its header describes.
    #[error("truncated: {what} ends at byte {end}, the file has {size} bytes; download it again")]
    Truncated {
        /// The part that ends behind the end of the file.
        what: String,
        /// Position of the first byte behind that part.
        end: u64,
        /// Bytes of the file.
        size: u64,
    },
    /// A number or length above the limit of this crate.
    #[error("{what}: {found}, at most {most} are read")]
    Limit {
        /// What is counted.
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
    /// A value of another type than requested, or out of the type's range.
    #[error("{key} is {found}, expected {expected}")]
    Type {
        /// The key.
        key: String,
        /// The value.
        found: String,
        /// The requested type.
        expected: &'static str,
    },
    /// A request for rows that a tensor does not have, or with a buffer that does not hold whole rows.
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

/// A name from a file in a form for messages: control characters are escaped, and a long name is cut.
pub(crate) fn shown(name: &str) -> String {
    let shown = &name[..name.floor_char_boundary(SHOWN)];
    let rest = if shown.len() < name.len() { "…" } else { "" };
    format!("{}{rest}", shown.escape_debug())
}

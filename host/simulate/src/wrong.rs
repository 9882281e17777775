//! The error for an input that cannot be simulated.

/// An input that cannot be simulated: the file, the place in it, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {place}: {what}")]
pub struct Wrong {
    /// The file, as its reader named it.
    pub file: String,
    /// A line or a key.
    pub place: String,
    /// What is wrong there, and what to do.
    pub what: String,
}

impl Wrong {
    pub(crate) fn new(file: &str, place: impl Into<String>, what: impl Into<String>) -> Self {
        Self { file: file.to_owned(), place: place.into(), what: what.into() }
    }
}

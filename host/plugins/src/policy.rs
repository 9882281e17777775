//! What an operator accepts of plugin files beyond what is safe by itself, and asks of them beyond that.

use std::path::PathBuf;

/// Risks of plugin files that an operator accepts, and the signatures that it asks for.
///
/// All are off by default. Risks are logged when they make a difference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Files that could be replaced by other users are warned of instead of refused. Other users are all but this user,
    /// root and the users that may change this program.
    pub insecure_permissions: bool,
    /// Plugins built with `panic = "abort"` load: a defect in one ends the process.
    pub panic_abort: bool,
    /// A file of [`Publishers`](crate::Publishers): without a signature of one of them no file is loaded.
    pub publishers: Option<PathBuf>,
}

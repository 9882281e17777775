//! The policy of an operator about plugin files: the risks that it accepts, and the signatures that it demands.

use std::path::PathBuf;

/// Risks of plugin files that an operator accepts, and the signatures that it demands.
///
/// All are off by default. The host logs a risk when accepting it made a difference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Warns of files that other users could replace, instead of refusing them. Other users are all except this user, root, and the
    /// users that may change this program.
    pub insecure_permissions: bool,
    /// Loads plugins that were built with `panic = "abort"`. A defect in such a plugin ends the process.
    pub panic_abort: bool,
    /// A file of [`Publishers`](crate::Publishers). A file is loaded only with a signature of one of them.
    pub publishers: Option<PathBuf>,
}

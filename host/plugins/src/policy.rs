//! What an operator accepts of plugin files beyond what is safe by itself.

/// Risks of plugin files that an operator accepts.
///
/// Both are off by default, and logged when they make a difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Files that could be replaced by other users are warned of instead of refused. Other users are all but this user,
    /// root and the users that may change this program.
    pub insecure_permissions: bool,
    /// Plugins built with `panic = "abort"` load: a defect in one ends the process.
    pub panic_abort: bool,
}

//! What an operator accepts of plugin files beyond what is safe by itself.

/// Both are off unless asked for, and logged when they make a difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Files that others than this user, root and whoever may change this program could replace are warned of instead
    /// of refused.
    pub insecure_permissions: bool,
    /// Plugins built with `panic = "abort"` load: a defect in one ends the process.
    pub panic_abort: bool,
}

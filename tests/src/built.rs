//! The folders of this build's programs and plugins.

use std::path::{Path, PathBuf};

/// Variable with the folder of a build that has everything that tests load and start. With it no test builds anything.
pub const BUILT: &str = "BUILT_PLUGINS";

/// The folder of the profile that this program was built with: it lies in `TARGET/PROFILE/deps` or `TARGET/PROFILE/examples`, or in
/// the folder itself, as `cargo xtask` does.
///
/// # Panics
/// When the path of this program is unknown.
#[must_use]
pub fn profile() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    let folder = program.parent().expect("a program lies in a folder");
    let is_below = folder.ends_with("deps") || folder.ends_with("examples");
    let profile = if is_below { folder.parent() } else { Some(folder) };
    profile.expect("tests lie in <target>/<profile>/deps").to_owned()
}

/// The folder of all profiles.
///
/// # Panics
/// As [`profile`].
#[must_use]
pub fn target() -> PathBuf {
    profile().parent().expect("a profile's folder lies in a target folder").to_owned()
}

/// The repository.
pub(crate) fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

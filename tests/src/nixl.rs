//! Finds the NIXL library that tests use.

use std::path::{Path, PathBuf};

use crate::built::target;
use crate::program::take_turn;
use crate::skip::skipped;

/// The library of `NIXL_LIBRARY`, or of the package that `cargo xtask test` installs in the target folder. Without one the test
/// is reported as skipped. With one the test waits for its turn.
pub fn library() -> Option<PathBuf> {
    let named = std::env::var_os("NIXL_LIBRARY").filter(|path| !path.is_empty()).map(PathBuf::from);
    let found = named.or_else(installed);
    match found {
        Some(_) => take_turn(),
        None => skipped("NIXL is not installed; `cargo xtask test` installs it"),
    }
    found
}

/// The plugin's configuration with this library. The plugin uses the loopback device by default.
pub fn config() -> Option<String> {
    library().map(|path| format!("library = {:?}\n", path.display().to_string()))
}

fn installed() -> Option<PathBuf> {
    let target = target();
    let folders = |folder: &Path, start: &'static str| {
        let entries = std::fs::read_dir(folder).ok().into_iter().flatten().filter_map(Result::ok);
        let starts = move |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(start))
        };
        entries.map(|entry| entry.path()).filter(starts).collect::<Vec<_>>()
    };
    let pythons = folders(&target.join("python/lib"), "python3").into_iter();
    let wheels = pythons.flat_map(|python| folders(&python.join("site-packages"), ".nixl_cu"));
    wheels.map(|wheel| wheel.join("libnixl_capi.so")).find(|library| library.is_file())
}

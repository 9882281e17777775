//! The system's loader.

use std::path::Path;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Loads libraries for good, so that those loaded after them find their symbols.
///
/// # Errors
/// What the loader says of the first that cannot be loaded.
pub fn preload(paths: &[impl AsRef<Path>]) -> Result<(), String> {
    for path in paths {
        // SAFETY: its constructors run. The user named it, or it is one that Mooncake's own wheel asks for.
        let library = unsafe { Library::open(Some(path.as_ref()), RTLD_NOW | RTLD_GLOBAL) };
        std::mem::forget(library.map_err(|error| whole(&error))?);
    }
    Ok(())
}

/// The reason of a loader's error, which the library keeps in the error's source.
pub fn whole(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

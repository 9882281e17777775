//! Side-cars: a `NAME.plugin.toml` beside plugins says where the file for each target is and which bytes it must have.
//!
//! The manifest inside the file still describes the plugin. A side-car only selects the file, so that one directory serves several
//! targets.
//!
//! ```toml
//! manifest_version = 1
//!
//! [[file]]
//! target = "x86_64-unknown-linux-gnu"
//! path = "x86_64/wire.so"             # from the side-car's directory
//! sha256 = "9f86d0..."                # optional: only these bytes load
//! ```

use std::path::{Path, PathBuf};

use host_plugin_api::note::BUILT_FOR;
use serde::Deserialize;

use super::policy::Policy;

/// Ending of the name of a side-car.
pub(super) const ENDING: &str = ".plugin.toml";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SideCar {
    manifest_version: u32,
    #[serde(rename = "file")]
    files: Vec<ForTarget>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ForTarget {
    target: String,
    path: PathBuf,
    sha256: Option<String>,
}

/// The file that a side-car names for this host's target.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub path: PathBuf,
    pub sha256: Option<String>,
}

/// Whether a file has the name of a side-car.
pub(super) fn is_one(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(ENDING))
}

/// Reads a side-car. `None` when it has no file for this host's target.
pub(super) fn read(path: &Path, policy: &Policy) -> Result<Option<Named>, String> {
    let text = super::file::text(path, policy).map_err(|error| error.to_string())?;
    parse(&text, path.parent().unwrap_or(Path::new(".")))
}

/// Parses the text of a side-car in this directory.
pub(super) fn parse(text: &str, directory: &Path) -> Result<Option<Named>, String> {
    let car: SideCar = toml::from_str(text)
        .map_err(|error| error.to_string().split_whitespace().collect::<Vec<_>>().join(" "))?;
    if car.manifest_version != 1 {
        return Err(format!("manifest_version is {}, this host reads version 1", car.manifest_version));
    }
    let mut own = car.files.into_iter().filter(|file| file.target == BUILT_FOR);
    let Some(file) = own.next() else { return Ok(None) };
    if own.next().is_some() {
        return Err(format!("it names two files for {BUILT_FOR}"));
    }
    if let Some(hash) = &file.sha256
        && (hash.len() != 64 || !hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)))
    {
        return Err(format!("sha256 is {hash:?}, it must be 64 hexadecimal digits in lower case"));
    }
    Ok(Some(Named { path: directory.join(file.path), sha256: file.sha256 }))
}

//! Lists the sources of the plugin API, which `host plugins new` writes beside a new crate.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    plugin_api()
}

/// Writes `plugin_api.rs`: a slice of the paths and texts of all files that the crate is built from.
fn plugin_api() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join("../plugin-api").canonicalize()?;
    let mut files: Vec<PathBuf> =
        ["README.md", "LICENSE-APACHE", "LICENSE-MIT", "build.rs"].map(|name| folder.join(name)).to_vec();
    let mut folders = vec![folder.join("src"), folder.join("doc")];
    while let Some(next) = folders.pop() {
        println!("cargo:rerun-if-changed={}", next.display());
        for entry in std::fs::read_dir(next)? {
            let path = entry?.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    let mut list = "&[\n".to_owned();
    for file in files {
        let name = file.strip_prefix(&folder)?.to_str().ok_or("a file whose name is not UTF-8")?;
        let path = file.to_str().ok_or("a folder whose name is not UTF-8")?;
        writeln!(list, "    ({name:?}, include_str!({path:?})),")?;
    }
    list.push_str("]\n");
    std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join("plugin_api.rs"), list)?;
    Ok(())
}

//! Lists the sources of the plugin API and of the kits, which `host plugins new` writes beside a new crate.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Crates that a new one may bring along: the folder, and the file that lists what they are built from.
const CRATES: [(&str, &str); 3] = [
    ("plugin-api", "plugin_api.rs"),
    ("plugins/tier-kit", "tier_kit.rs"),
    ("plugins/transfer-kit", "transfer_kit.rs"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let repository = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join("..").canonicalize()?;
    for (folder, list) in CRATES {
        list_sources(&repository, &repository.join(folder), list)?;
    }
    Ok(())
}

/// Writes a slice of the paths and texts of all files of a crate, with the licences beside them.
fn list_sources(repository: &Path, folder: &Path, list: &str) -> Result<(), Box<dyn Error>> {
    let own = ["README.md", "build.rs"].map(|name| folder.join(name));
    let mut files: Vec<PathBuf> = own.into_iter().filter(|file| file.is_file()).collect();
    let mut folders = vec![folder.join("src")];
    folders.extend(Some(folder.join("doc")).filter(|doc| doc.is_dir()));
    while let Some(next) = folders.pop() {
        println!("cargo:rerun-if-changed={}", next.display());
        for entry in std::fs::read_dir(next)? {
            let path = entry?.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    let licences = ["LICENSE-APACHE", "LICENSE-MIT"].map(|name| (name.to_owned(), repository.join(name)));
    let mut named: Vec<(String, PathBuf)> = licences.to_vec();
    for file in files {
        let name = file.strip_prefix(folder)?.to_str().ok_or("a file whose name is not UTF-8")?;
        named.push((name.to_owned(), file));
    }
    let mut text = "&[\n".to_owned();
    for (name, file) in named {
        let path = file.to_str().ok_or("a folder whose name is not UTF-8")?;
        writeln!(text, "    ({name:?}, include_str!({path:?})),")?;
    }
    text.push_str("]\n");
    std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join(list), text)?;
    Ok(())
}

//! Libraries that lie beside a plugin and are loaded with it.
//!
//! A plugin may say that the system's loader is to look for the libraries that it needs beside the plugin's file (`$ORIGIN`).
//! They are code of this process like the plugin itself, so a lock that pins the plugin pins them too.
//!
//! A name with a slash is a path, which the loader follows wherever it leads: from the working directory, or from the root. No
//! lock pins what lies there, so a plugin that needs a library by a path is refused where its bytes have to be known.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::dynamic::{Dynamic, dynamic};
use super::file::sha256;

/// Limit of the libraries beside one plugin.
const MOST: usize = 64;

/// A library that is loaded with a plugin.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LockedLibrary {
    /// Path of the library, relative to the plugin's directory if it lies in there.
    pub file: String,
    /// The sha256 of the whole file, in hexadecimal.
    pub sha256: String,
}

/// The libraries beside a plugin that the system's loader will take, and those that they need in turn, in order of their
/// names. It takes a library of the system for a name that none of these has.
///
/// # Errors
/// When one cannot be read, or is needed by a path.
pub(super) fn beside(plugin: &Path) -> io::Result<Vec<LockedLibrary>> {
    let plugin = std::path::absolute(plugin)?;
    let home = plugin.parent().unwrap_or(Path::new("/"));
    let mut found: Vec<PathBuf> = Vec::new();
    // Each file has the folders of the files that need it, in which the loader searches too (DT_RPATH).
    let mut left = VecDeque::from([(plugin.clone(), Vec::new())]);
    while let Some((file, mut folders)) = left.pop_front() {
        let Dynamic { needed, paths } = dynamic(&file);
        let origin = file.parent().unwrap_or(Path::new("/")).to_string_lossy().into_owned();
        let own = paths.iter().flat_map(|path| path.split(':')).filter(|path| path.contains("ORIGIN"));
        folders.extend(
            own.map(|path| PathBuf::from(path.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin))),
        );
        for name in &needed {
            if name.contains('/') {
                let text = format!(
                    "it needs the library {name:?} by its path, and what lies there is not pinned: link it by its \
                     name (give it a soname), and put it beside the plugin"
                );
                return Err(io::Error::other(text));
            }
            let there = folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file());
            let Some(library) = there.filter(|library| *library != plugin && !found.contains(library)) else {
                continue;
            };
            // The name stands in messages and in the lock, and must not look like several lines of them.
            if name.contains(char::is_control) {
                return Err(io::Error::other(format!("it needs {name:?}, a name with control characters")));
            }
            if found.len() == MOST {
                return Err(io::Error::other(format!("it needs more than {MOST} libraries beside it")));
            }
            found.push(library.clone());
            left.push_back((library, folders.clone()));
        }
    }
    let lock = |library: PathBuf| {
        let file = library.strip_prefix(home).unwrap_or(&library).to_string_lossy().into_owned();
        Ok(LockedLibrary { file, sha256: sha256(&library)? })
    };
    let mut locked = found.into_iter().map(lock).collect::<io::Result<Vec<_>>>()?;
    locked.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(locked)
}

/// The first difference between the libraries that a lock lists and those in the directory.
pub(super) fn difference(locked: &[LockedLibrary], found: &[LockedLibrary]) -> Option<String> {
    let other = |library: &&LockedLibrary| !locked.contains(library);
    if let Some(LockedLibrary { file, sha256 }) = found.iter().find(other) {
        return Some(match locked.iter().find(|locked| locked.file == *file) {
            Some(locked) => format!("{file}, which has sha256 {sha256} and not {}", locked.sha256),
            None => format!("{file}, which is not listed"),
        });
    }
    let gone = locked.iter().find(|library| !found.contains(library))?;
    Some(format!("{}, which is listed and not there", gone.file))
}

#[cfg(test)]
mod tests {
    use host_tests::elf;

    use super::*;

    const NEEDED: u64 = 1;
    const RUNPATH: u64 = 29;

    #[test]
    fn libraries_beside_a_plugin_and_those_that_they_need_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("lib")).unwrap();
        let names = b"$ORIGIN/lib\0libone.so\0libtwo.so\0libc.so.6\0$ORIGIN\0";
        elf::dynamic(&at("plugin.so"), &[(RUNPATH, 0), (NEEDED, 12), (NEEDED, 32)], names);
        elf::dynamic(&at("lib/libone.so"), &[(RUNPATH, 42), (NEEDED, 22), (NEEDED, 12)], names);
        elf::dynamic(&at("lib/libtwo.so"), &[], names);
        let found = beside(&at("plugin.so")).unwrap();
        let files: Vec<&str> = found.iter().map(|library| library.file.as_str()).collect();
        assert_eq!(files, ["lib/libone.so", "lib/libtwo.so"], "each once, and none of the system's");
        assert_eq!(difference(&found, &found), None);
        std::fs::write(at("lib/libtwo.so"), "other").unwrap();
        let other = beside(&at("plugin.so")).unwrap();
        assert!(difference(&found, &other).unwrap().contains("lib/libtwo.so, which has sha256"));
        assert!(difference(&[], &other).unwrap().contains("not listed"));
        std::fs::remove_file(at("lib/libtwo.so")).unwrap();
        assert!(difference(&found, &beside(&at("plugin.so")).unwrap()).unwrap().contains("not there"));
    }

    #[test]
    fn a_library_whose_name_would_look_like_lines_of_ours_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let names = b"$ORIGIN\0libx.so\nverdict    usable\0";
        elf::dynamic(&at("plugin.so"), &[(RUNPATH, 0), (NEEDED, 8)], names);
        elf::dynamic(&at("libx.so\nverdict    usable"), &[], names);
        let refused = beside(&at("plugin.so")).unwrap_err().to_string();
        assert!(refused.contains("libx.so\\nverdict") && refused.lines().count() == 1, "{refused}");
    }

    #[test]
    fn a_library_that_is_needed_by_its_path_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let names = b"$ORIGIN\0libone.so\0below/libtwo.so\0/opt/libtwo.so\0$ORIGIN/libone.so\0";
        elf::dynamic(&at("libone.so"), &[], names);
        let plugin = |needed| elf::dynamic(&at("plugin.so"), &[(RUNPATH, 0), (NEEDED, needed)], names);
        let refused = |path: &str| {
            let text = beside(&at("plugin.so")).unwrap_err().to_string();
            assert!(text.contains(&format!("needs the library {path:?} by its path")), "{text}");
        };
        for (needed, path) in [(18, "below/libtwo.so"), (34, "/opt/libtwo.so"), (49, "$ORIGIN/libone.so")] {
            plugin(needed);
            refused(path);
        }
        plugin(8);
        assert_eq!(beside(&at("plugin.so")).unwrap().len(), 1);
        // Nor by a library beside it, or where nothing is looked for there.
        elf::dynamic(&at("libone.so"), &[(NEEDED, 34)], names);
        refused("/opt/libtwo.so");
        elf::dynamic(&at("plugin.so"), &[(NEEDED, 18)], names);
        refused("below/libtwo.so");
    }
}

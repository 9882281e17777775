//! Versions of glibc: the one that a file needs, and the one of this process.
//!
//! A file that was linked on a newer system may need versions that the C library here does not define. The system's loader refuses
//! such a file. The file's headers list these versions, so the host refuses it earlier, when it is installed or loaded.

use std::fmt;

use super::dynamic::NeededVersion;

/// Prefix of the names of glibc's versions.
const PREFIX: &str = "GLIBC_";

/// Versions whose names have no number, with the first glibc that defines them. Linkers write `ABI_DT_RELR` into files with packed
/// relocations.
const NAMED: &[(&str, Glibc)] = &[("ABI_DT_RELR", Glibc([2, 36, 0]))];

/// A version of glibc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Glibc([u32; 3]);

impl Glibc {
    /// The oldest glibc that defines all of these versions, or `None` if no version is from glibc.
    #[must_use]
    pub fn needed(versions: &[NeededVersion]) -> Option<Self> {
        versions.iter().filter_map(|needed| Self::named(needed.version.strip_prefix(PREFIX)?)).max()
    }

    /// The glibc of this process, or `None` with another C library.
    #[must_use]
    pub fn here() -> Option<Self> {
        Self::numbered(&running()?)
    }

    fn named(name: &str) -> Option<Self> {
        let known = NAMED.iter().find(|(known, _)| *known == name).map(|(_, version)| *version);
        known.or_else(|| Self::numbered(name))
    }

    /// Parses a version such as `2.34` or `2.2.5`. `PRIVATE` gives `None`.
    fn numbered(text: &str) -> Option<Self> {
        let mut numbers = text.splitn(3, '.').map(|number| number.parse().ok());
        let (major, minor) = (numbers.next()??, numbers.next()??);
        let patch = numbers.next().unwrap_or(Some(0))?;
        Some(Self([major, minor, patch]))
    }
}

impl fmt::Display for Glibc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.0;
        match patch {
            0 => write!(f, "{major}.{minor}"),
            patch => write!(f, "{major}.{minor}.{patch}"),
        }
    }
}

#[cfg(target_env = "gnu")]
fn running() -> Option<String> {
    use std::ffi::{CStr, c_char};
    unsafe extern "C" {
        safe fn gnu_get_libc_version() -> *const c_char;
    }
    // SAFETY: glibc returns a constant text that ends with a zero.
    let version = unsafe { CStr::from_ptr(gnu_get_libc_version()) };
    version.to_str().ok().map(str::to_owned)
}

#[cfg(not(target_env = "gnu"))]
fn running() -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_glibc_that_is_named_is_needed() {
        let needed = |versions: &[&str]| {
            let of = |version: &&str| NeededVersion {
                library: "libc.so.6".to_owned(),
                version: (*version).to_owned(),
            };
            Glibc::needed(&versions.iter().map(of).collect::<Vec<_>>()).map(|needed| needed.to_string())
        };
        for (versions, newest) in [
            (&["GLIBC_2.2.5", "GLIBC_2.14"][..], Some("2.14")),
            (&["GLIBC_2.9", "GLIBC_2.34", "GLIBC_2.3.4"], Some("2.34")),
            (&["GLIBC_2.2.5", "GLIBC_ABI_DT_RELR"], Some("2.36")),
            (&["GLIBC_2.2.5", "GLIBC_PRIVATE"], Some("2.2.5")),
            (&["GLIBCXX_3.4.32", "GCC_3.0", "GLIBC_x.1", "GLIBC_2"], None),
            (&[], None),
        ] {
            assert_eq!(needed(versions).as_deref(), newest, "{versions:?}");
        }
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn this_process_has_a_version() {
        assert!(Glibc::here() >= Glibc::numbered("2.17"), "{:?}", Glibc::here());
    }
}

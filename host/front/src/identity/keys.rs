//! Keys of tenants, from a file that has only hashes of them.
//!
//! ```toml
//! [[key]]
//! name = "team-a"        # the tenant
//! sha256 = "9f86d081…"   # of the key
//! max_requests = 64      # at once; optional
//! priority = 5           # the smallest number that its requests may have; optional
//! admin = false          # may use /flush_cache, /metrics and all of /health; optional
//! gateway = false        # may name other tenants in the tenant header, and operates nothing; optional
//! ```
//!
//! The file is read again when it changes. It is never read while other users could replace it. A key is looked up by its hash,
//! so the time of a look-up tells nothing about the keys.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use host_wire::shares::Shares;
use parking_lot::RwLock;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::{MAX_TENANT, is_tenant};

/// Largest file of keys, in bytes: about ten thousand keys.
const MAX_FILE: u64 = 2 << 20;

/// One key.
#[derive(Debug)]
pub struct Key {
    /// The tenant.
    pub name: Arc<str>,
    /// Limits the key's requests at once.
    pub places: Option<Shares>,
    /// The smallest priority that the key's requests may have, and their default.
    pub priority: Option<i32>,
    /// See the [module](self).
    pub admin: bool,
    /// See the [module](self).
    pub gateway: bool,
}

/// All keys of a file.
#[derive(Debug)]
pub struct Keys {
    path: Option<PathBuf>,
    now: RwLock<Read>,
}

#[derive(Debug)]
struct Read {
    keys: HashMap<[u8; 32], Arc<Key>>,
    version: Version,
}

/// The version of a file: device, inode, size, and time of the last change in nanoseconds.
type Version = (u64, u64, u64, i128);

/// A file of keys that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read.
    #[error("the file of API keys {path} cannot be read: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: std::io::Error,
    },
    /// Users who cannot replace the program could replace the file and give themselves keys.
    #[error("the file of API keys {path} could be replaced by others: {ways}")]
    Replaceable {
        /// The file.
        path: PathBuf,
        /// The ways to replace it, and remedies.
        ways: String,
    },
    /// The content of the file is wrong.
    #[error("the file of API keys is wrong: {0}")]
    Wrong(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entries {
    #[serde(default)]
    key: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    sha256: String,
    max_requests: Option<usize>,
    priority: Option<i32>,
    #[serde(default)]
    admin: bool,
    #[serde(default)]
    gateway: bool,
}

impl Keys {
    /// Reads a file (blocking).
    ///
    /// # Errors
    /// When the file cannot be read, could be replaced by other users, or is wrong.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let (text, version) = read(path)?;
        let keys = parse(&text, &HashMap::new())?;
        Ok(Self { path: Some(path.to_owned()), now: RwLock::new(Read { keys, version }) })
    }

    /// Parses keys from a text in the form of the file. `path` is the file to reload from.
    ///
    /// # Errors
    /// When the text is wrong.
    pub fn parse(text: &str, path: Option<PathBuf>) -> Result<Self, KeyError> {
        let keys = parse(text, &HashMap::new())?;
        Ok(Self { path, now: RwLock::new(Read { keys, version: (0, 0, 0, 0) }) })
    }

    /// The key that a request has sent.
    #[must_use]
    pub fn find(&self, secret: &[u8]) -> Option<Arc<Key>> {
        let hash: [u8; 32] = Sha256::digest(secret).into();
        self.now.read().keys.get(&hash).cloned()
    }

    /// The number of keys.
    #[must_use]
    pub fn count(&self) -> usize {
        self.now.read().keys.len()
    }

    /// Reads the file again if it has changed (blocking), and returns whether it had. Requests under way still count against the
    /// limits of keys that stay. After an error, the keys stay as they were.
    ///
    /// # Errors
    /// When the file cannot be read, could be replaced by other users, or is wrong.
    pub fn reload(&self) -> Result<bool, KeyError> {
        let Some(path) = &self.path else { return Ok(false) };
        let failed = |error| KeyError::Read { path: path.clone(), error };
        let version = version(&std::fs::metadata(path).map_err(failed)?);
        if version == self.now.read().version {
            return Ok(false);
        }
        let (text, version) = read(path)?;
        let keys = parse(&text, &self.now.read().keys)?;
        *self.now.write() = Read { keys, version };
        Ok(true)
    }
}

fn version(file: &std::fs::Metadata) -> Version {
    let changed = i128::from(file.ctime()) * 1_000_000_000 + i128::from(file.ctime_nsec());
    (file.dev(), file.ino(), file.size(), changed)
}

fn read(path: &Path) -> Result<(String, Version), KeyError> {
    let failed = |error| KeyError::Read { path: path.to_owned(), error };
    let mut file = File::open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    let ways = host_ownership::check(path, &found).map_err(failed)?;
    if !ways.refused.is_empty() {
        return Err(KeyError::Replaceable { path: path.to_owned(), ways: ways.refused.join("; ") });
    }
    if found.len() > MAX_FILE {
        return Err(KeyError::Wrong(format!("{} bytes; at most {MAX_FILE} are read", found.len())));
    }
    let mut text = String::new();
    file.by_ref().take(MAX_FILE).read_to_string(&mut text).map_err(failed)?;
    Ok((text, version(&found)))
}

/// Parses a file. A key that was there `before` keeps its count of requests, unless its limit changes.
fn parse(text: &str, before: &HashMap<[u8; 32], Arc<Key>>) -> Result<HashMap<[u8; 32], Arc<Key>>, KeyError> {
    let wrong = |why: String| KeyError::Wrong(why);
    let file: Entries = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
    if file.key.is_empty() {
        return Err(wrong("it has no [[key]], so that no request could be served".to_owned()));
    }
    let mut keys = HashMap::new();
    for entry in file.key {
        let Entry { name, sha256, max_requests, priority, admin, gateway } = entry;
        if !is_tenant(&name) {
            return Err(wrong(format!("name {name:?} is not 1 to {MAX_TENANT} visible ASCII characters")));
        }
        if admin && gateway {
            return Err(wrong(format!(
                "{name:?} has admin = true and gateway = true, which would let all clients of the gateway operate this server: give \
                 the operators a key of their own"
            )));
        }
        let Some(hash) = unhex(&sha256) else {
            return Err(wrong(format!("sha256 of {name:?} is not 64 hexadecimal digits")));
        };
        let places = max_requests.map(|most| {
            let kept = before.get(&hash).and_then(|key| key.places.clone());
            kept.filter(|places| places.total() == most).unwrap_or_else(|| Shares::new(most))
        });
        let key = Key { name: Arc::from(name.as_str()), places, priority, admin, gateway };
        if keys.insert(hash, Arc::new(key)).is_some() {
            return Err(wrong(format!("the key of {name:?} is there twice")));
        }
    }
    Ok(keys)
}

/// The file's entry for a new key.
#[must_use]
pub fn entry(name: &str, secret: &str, admin: bool) -> String {
    let hash = hex(&Sha256::digest(secret.as_bytes()));
    let admin = if admin { "admin = true\n" } else { "" };
    format!("[[key]]\nname = {name:?}\nsha256 = \"{hash}\"\n{admin}")
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    // Refuses a sign, which `from_str_radix` accepts.
    text.bytes().all(|digit| digit.is_ascii_hexdigit()).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_files_are_refused_with_the_reason() {
        let hash = "0".repeat(64);
        for (text, reason) in [
            (String::new(), "no [[key]]"),
            ("[[key]]\nname = \"a\"\n".to_owned(), "missing field `sha256`"),
            (format!("[[key]]\nname = \"a b\"\nsha256 = \"{hash}\"\n"), "visible ASCII"),
            (format!("[[key]]\nname = \"\"\nsha256 = \"{hash}\"\n"), "visible ASCII"),
            ("[[key]]\nname = \"a\"\nsha256 = \"abc\"\n".to_owned(), "64 hexadecimal digits"),
            (format!("[[key]]\nname = \"a\"\nsha256 = \"+{}\"\n", &hash[1..]), "64 hexadecimal digits"),
            (format!("[[key]]\nname = \"a\"\nsha256 = \"{hash}\"\nadmn = true\n"), "unknown field"),
            (entry("a", "x", false) + &entry("b", "x", false), "there twice"),
            (entry("a", "x", true) + "gateway = true\n", "a key of their own"),
        ] {
            let error = Keys::parse(&text, None).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn a_file_that_changes_is_read_again_and_a_wrong_one_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        let limited = |secret| entry("a", secret, false) + "max_requests = 4\n";
        std::fs::write(&path, limited("one")).unwrap();
        let keys = Keys::load(&path).unwrap();
        assert!(!keys.reload().unwrap());
        let held = keys.find(b"one").unwrap();
        let client = host_wire::shares::Client::at([127, 0, 0, 1].into());
        let _share = held.places.as_ref().unwrap().take(&client, 1).unwrap();

        std::fs::write(&path, limited("one") + &entry("b", "two", true)).unwrap();
        assert!(keys.reload().unwrap());
        assert!(keys.find(b"two").unwrap().admin);
        let again = keys.find(b"one").unwrap();
        assert_eq!(again.places.as_ref().unwrap().taken(), 1, "what runs still counts");

        std::fs::write(&path, "nonsense").unwrap();
        assert!(keys.reload().is_err());
        assert_eq!(keys.count(), 2);
        std::fs::write(&path, entry("b", "two", false)).unwrap();
        assert!(keys.reload().unwrap());
        assert!(keys.find(b"one").is_none() && !keys.find(b"two").unwrap().admin);
        std::fs::remove_file(&path).unwrap();
        assert!(keys.reload().unwrap_err().to_string().contains("cannot be read"));
        assert_eq!(keys.count(), 1);
    }

    #[test]
    fn a_file_that_others_may_write_is_neither_loaded_nor_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        let open = |path: &Path, mode| {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        };
        std::fs::write(&path, entry("a", "one", false)).unwrap();
        open(&path, 0o600);
        let keys = Keys::load(&path).unwrap();

        std::fs::write(&path, entry("a", "one", false) + &entry("evil", "two", true)).unwrap();
        for (place, mode, usual, says) in [
            (&*path, 0o646, 0o600, "keys.toml may be changed by every user of this machine: chmod o-w it"),
            (folder.path(), 0o777, 0o700, "may be changed by every user of this machine: chmod o-w it"),
        ] {
            open(place, mode);
            for refused in [keys.reload().unwrap_err(), Keys::load(&path).unwrap_err()] {
                assert!(refused.to_string().contains(says), "{refused}");
            }
            assert!(keys.find(b"one").is_some() && keys.find(b"two").is_none(), "keys stay as they were");
            open(place, usual);
        }
        assert!(keys.reload().unwrap() && keys.find(b"two").is_some());
    }
}

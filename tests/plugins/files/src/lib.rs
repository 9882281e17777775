//! A fake for tests: a storage tier with a file for each value, named by its key.
//!
//! With the defect `in-place` a file gets its name before it has all of its bytes. Reads of this process do not return such a
//! value. After a kill, reads of the next process do.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use host_plugin_api::{Error, ErrorCode, Key, Opening, Result, TierUsage};
use host_tier_kit::{Limits, Store, Tier, other_length};

/// Bytes that are written at once by the defect `in-place`, and the gap after them.
const PIECE: usize = 4096;
const GAP: Duration = Duration::from_millis(1);

/// A store with a file for each value.
pub struct Files {
    dir: PathBuf,
    in_place: bool,
    written: AtomicU64,
    /// Keys whose value is being put in place.
    unfinished: Mutex<BTreeSet<Key>>,
}

/// Opens an instance.
///
/// # Errors
/// `CONFIG` when `dir` is not set, or for an unknown defect.
pub fn open(opening: &Opening) -> Result<Tier<Files>> {
    let wrong = |text: String| Error::new(ErrorCode::CONFIG, text);
    let table: toml::Table = opening.config.parse().map_err(|error| wrong(format!("not TOML: {error}")))?;
    let text = |key: &str| table.get(key).and_then(toml::Value::as_str);
    let dir = text("dir").ok_or_else(|| wrong("dir is not set".to_owned()))?.into();
    let in_place = match text("defect").unwrap_or_default() {
        "" => false,
        "in-place" => true,
        other => return Err(wrong(format!("defect is {other:?}, which this fake does not have"))),
    };
    let files = Files { dir, in_place, written: AtomicU64::new(0), unfinished: Mutex::default() };
    Tier::start(files, Limits::default())
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open,
}

/// The result of a call on a file, or `None` where there is no file.
fn found<T>(answer: std::io::Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&error)),
    }
}

fn failed(error: &std::io::Error) -> Error {
    Error::new(ErrorCode::IO, error.to_string())
}

impl Files {
    fn path(&self, key: &Key) -> PathBuf {
        self.dir.join(key.to_string())
    }

    fn unfinished(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keys of all files that have the name of a value.
    fn keys(&self) -> std::io::Result<BTreeSet<Key>> {
        let named = |name: &str| {
            let mut key = Key::default();
            for (at, byte) in key.0.iter_mut().enumerate() {
                *byte = u8::from_str_radix(name.get(2 * at..2 * at + 2)?, 16).ok()?;
            }
            Some(key)
        };
        let mut keys = BTreeSet::new();
        for entry in std::fs::read_dir(&self.dir)? {
            keys.extend(entry?.file_name().to_str().and_then(named));
        }
        Ok(keys)
    }

    fn put_in_place(&self, key: &Key, from: &[u8]) -> std::io::Result<()> {
        self.unfinished().insert(*key);
        let mut file = File::create(self.path(key))?;
        file.set_len(from.len() as u64)?;
        for piece in from.chunks(PIECE) {
            file.write_all(piece)?;
            std::thread::sleep(GAP);
        }
        self.unfinished().remove(key);
        Ok(())
    }

    fn put_and_rename(&self, key: &Key, from: &[u8]) -> std::io::Result<()> {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let unnamed = self.dir.join(format!(".{}-{number}", std::process::id()));
        std::fs::write(&unnamed, from)?;
        std::fs::rename(&unnamed, self.path(key))
    }
}

impl Store for Files {
    fn get(&self, key: &Key, to: &mut [u8]) -> Result<bool> {
        let Some(mut file) = found(File::open(self.path(key)))? else { return Ok(false) };
        // Checked after the file was opened: a put that begins later makes another file.
        if self.unfinished().contains(key) {
            return Ok(false);
        }
        let length = file.metadata().map_err(|error| failed(&error))?.len();
        if length != to.len() as u64 {
            return Err(other_length(length, to.len()));
        }
        file.read_exact(to).map_err(|error| failed(&error))?;
        Ok(true)
    }

    fn put(&self, key: &Key, from: &[u8]) -> Result<()> {
        if found(std::fs::metadata(self.path(key)))?.is_some() {
            return Ok(());
        }
        let put = if self.in_place { self.put_in_place(key, from) } else { self.put_and_rename(key, from) };
        put.map_err(|error| failed(&error))
    }

    fn exists(&self, key: &Key) -> Result<Option<u64>> {
        found(std::fs::metadata(self.path(key))).map(|of| of.map(|of| of.len()))
    }

    fn delete(&self, key: &Key) -> Result<Option<u64>> {
        let length = self.exists(key)?;
        let removed = found(std::fs::remove_file(self.path(key)))?;
        Ok(removed.and(length))
    }

    fn scan(&self, after: Option<&Key>, keys: &mut [Key]) -> Result<usize> {
        let all = self.keys().map_err(|error| failed(&error))?;
        let behind = all.iter().filter(|key| after.is_none_or(|after| *key > after));
        Ok(keys.iter_mut().zip(behind).map(|(place, key)| *place = *key).count())
    }

    fn usage(&self) -> Result<TierUsage> {
        let keys = self.keys().map_err(|error| failed(&error))?;
        let mut usage = TierUsage::default();
        for key in keys {
            let length = self.exists(&key)?;
            usage.values += u64::from(length.is_some());
            usage.bytes += length.unwrap_or(0);
        }
        Ok(usage)
    }
}

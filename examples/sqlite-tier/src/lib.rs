//! A storage tier over SQLite: one table of values by keys. The tier kit brings queue, threads and registered memory.
//!
//! Values outlive the process. After a power cut the last values may be missing, but no value is there in part. Several
//! processes of a machine may share a folder.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use host_plugin_api::{Error, ErrorCode, Key, Opening, Result, TierUsage};
use host_tier_kit::{Limits, Store, Tier, other_length};
use rusqlite::{Connection, OpenFlags, OptionalExtension, params};

/// Bytes of a page of the database.
const PAGE: i64 = 16 << 10;
const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS pages (key BLOB NOT NULL UNIQUE, value BLOB NOT NULL)";

/// The database. Each call uses a connection of its own.
pub struct Sqlite {
    file: PathBuf,
    size_limit: i64,
    read_only: bool,
    idle: Mutex<Vec<Connection>>,
}

/// Opens an instance with the configuration that `plugin.toml` describes.
///
/// # Errors
/// `CONFIG` for an invalid value, `IO` when the database cannot be opened.
pub fn open(opening: &Opening) -> Result<Tier<Sqlite>> {
    let config = |text: String| Error::new(ErrorCode::CONFIG, text);
    let table: toml::Table = opening.config.parse().map_err(|error| config(format!("not TOML: {error}")))?;
    let number = |key: &str, default: i64, most: i64| {
        let value = table.get(key).map_or(Some(default), toml::Value::as_integer);
        let found = value.filter(|value| (1..=most).contains(value));
        found.ok_or_else(|| config(format!("{key} must be an integer from 1 to {most}")))
    };
    let folder = table.get("dir").and_then(toml::Value::as_str).map(PathBuf::from);
    let folder = folder.filter(|path| path.is_absolute());
    let folder = folder.ok_or_else(|| config("dir must be an absolute path: set it".to_owned()))?;
    let threads = number("threads", 4, 64)? as u32;
    let limits = Limits {
        max_value: (number("max_value_mib", 64, 512)? as u64) << 20,
        threads,
        writers: (threads - 1).max(1),
        ..Limits::default()
    };
    let read_only = table.get("read_only").and_then(toml::Value::as_bool).unwrap_or(false);
    if !read_only {
        // The folder may exist: several workers open one store at once.
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(Error::new(ErrorCode::IO, format!("{}: {error}", folder.display())));
            }
            _ => {}
        }
    }
    let size_limit = number("size_limit_mib", 10240, 2 << 20)? << 20;
    let store = Sqlite { file: folder.join("pages.sqlite"), size_limit, read_only, idle: Mutex::default() };
    // Connects now, so that a database that cannot be opened is an error here and not at the first page.
    store.with(|_connection| Ok(()))?;
    Tier::start(store, limits)
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open,
}

impl Sqlite {
    fn connect(&self) -> rusqlite::Result<Connection> {
        let access = if self.read_only {
            OpenFlags::SQLITE_OPEN_READ_ONLY
        } else {
            OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE
        };
        let connection = Connection::open_with_flags(&self.file, access | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
        connection.busy_timeout(Duration::from_secs(10))?;
        if !self.read_only {
            connection.pragma_update(None, "page_size", PAGE)?;
            // Readers and a writer do not wait for each other.
            connection.pragma_update(None, "journal_mode", "WAL")?;
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            connection.pragma_update(None, "max_page_count", self.size_limit / PAGE)?;
            connection.execute(SCHEMA, [])?;
        }
        Ok(connection)
    }

    /// Calls `act` with a connection. Keeps the connection for the next call unless `act` failed.
    fn with<T>(&self, act: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle().pop();
        let done = kept.map_or_else(|| self.connect(), Ok).and_then(|connection| {
            let done = act(&connection)?;
            idle().push(connection);
            Ok(done)
        });
        done.map_err(|error| {
            let code = match error.sqlite_error_code() {
                Some(rusqlite::ErrorCode::DiskFull) => ErrorCode::NO_RESOURCE,
                Some(rusqlite::ErrorCode::ReadOnly) => ErrorCode::UNSUPPORTED,
                _ => ErrorCode::IO,
            };
            Error::new(code, format!("{}: {error}", self.file.display()))
        })
    }
}

impl Store for Sqlite {
    fn get(&self, key: &Key, to: &mut [u8]) -> Result<bool> {
        let found = self.with(|connection| {
            let mut select = connection.prepare_cached("SELECT value FROM pages WHERE key = ?1")?;
            let copied = select.query_row([key.0], |row| {
                let value = row.get_ref(0)?.as_blob()?;
                if value.len() == to.len() {
                    to.copy_from_slice(value);
                }
                Ok(value.len())
            });
            copied.optional()
        })?;
        match found {
            Some(length) if length != to.len() => Err(other_length(length as u64, to.len())),
            found => Ok(found.is_some()),
        }
    }

    fn put(&self, key: &Key, from: &[u8]) -> Result<()> {
        self.with(|connection| {
            let mut insert = connection.prepare_cached("INSERT OR IGNORE INTO pages VALUES (?1, ?2)")?;
            insert.execute(params![key.0, from]).map(drop)
        })
    }

    fn exists(&self, key: &Key) -> Result<Option<u64>> {
        self.with(|connection| {
            let mut select = connection.prepare_cached("SELECT length(value) FROM pages WHERE key = ?1")?;
            select.query_row([key.0], |row| row.get(0)).optional()
        })
    }

    fn delete(&self, key: &Key) -> Result<Option<u64>> {
        self.with(|connection| {
            let text = "DELETE FROM pages WHERE key = ?1 RETURNING length(value)";
            connection.prepare_cached(text)?.query_row([key.0], |row| row.get(0)).optional()
        })
    }

    fn scan(&self, after: Option<&Key>, keys: &mut [Key]) -> Result<usize> {
        // Every key sorts after the empty key.
        let after = after.map_or(&[][..], |key| &key.0[..]);
        self.with(|connection| {
            let text = "SELECT key FROM pages WHERE key > ?1 ORDER BY key LIMIT ?2";
            let mut select = connection.prepare_cached(text)?;
            let mut rows = select.query(params![after, keys.len() as i64])?;
            let mut count = 0;
            while let Some(row) = rows.next()? {
                keys[count] = Key(row.get(0)?);
                count += 1;
            }
            Ok(count)
        })
    }

    fn usage(&self) -> Result<TierUsage> {
        self.with(|connection| {
            let text = "SELECT count(*), ifnull(sum(length(value)), 0) FROM pages";
            connection.query_row(text, [], |row| {
                let capacity = self.size_limit as u64;
                Ok(TierUsage { values: row.get(0)?, bytes: row.get(1)?, capacity, reserved: [0; 5] })
            })
        })
    }
}

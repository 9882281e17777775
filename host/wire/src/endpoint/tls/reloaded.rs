//! A value that is read from files, and read again when they change.

use std::path::PathBuf;

use parking_lot::Mutex;

use super::TlsError;
use super::files::Stamps;

/// Reads the value from the files.
type Read<T> = Box<dyn Fn() -> Result<T, TlsError> + Send + Sync>;

/// A value that is read from files.
pub(super) struct Reloaded<T> {
    /// The value's name in logs.
    what: &'static str,
    files: Vec<PathBuf>,
    read: Read<T>,
    now: Mutex<Now<T>>,
}

struct Now<T> {
    stamps: Stamps,
    value: T,
    /// The reason why the present files are not used, or an empty text.
    trouble: String,
}

impl<T: Clone> Reloaded<T> {
    /// Reads the files for the first time (blocking).
    ///
    /// # Errors
    /// The error of reading.
    pub fn load(what: &'static str, files: Vec<PathBuf>, read: Read<T>) -> Result<Self, TlsError> {
        let stamps = Stamps::of(&files);
        let value = read()?;
        let now = Mutex::new(Now { stamps, value, trouble: String::new() });
        Ok(Self { what, files, read, now })
    }

    /// The files.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The value to use from now on (blocking). Reads the files again if they have changed. Files that cannot be used change
    /// nothing, and are warned of.
    pub fn now(&self) -> T {
        let Self { what, files, read, now } = self;
        let stamps = Stamps::of(files);
        let mut now = now.lock();
        if stamps != now.stamps {
            match read() {
                Ok(value) => {
                    tracing::info!(?files, "the files of {what} have changed and are used");
                    *now = Now { stamps, value, trouble: String::new() };
                }
                Err(error) => {
                    let trouble = error.to_string();
                    // Warns once about an error, not for every connection.
                    if trouble != now.trouble {
                        tracing::warn!(%error, "{what} stays as it was");
                        now.trouble = trouble;
                    }
                }
            }
        }
        now.value.clone()
    }
}

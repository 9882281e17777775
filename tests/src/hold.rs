//! A file that holds requests in the middle, so that a test can act on them however slow the machine is.

use std::path::PathBuf;

/// A file whose removal a server waits for, by the `hold` keys of the synthetic executor or the faulty tier.
pub struct Hold {
    directory: tempfile::TempDir,
}

impl Hold {
    /// Chooses a file, which is not there yet.
    ///
    /// # Panics
    /// When no directory can be made for it.
    #[must_use]
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().expect("a directory for a file that holds") }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("hold")
    }

    /// Lines for `[synthetic]`: prompts are computed up to a position while the file is there.
    #[must_use]
    pub fn prompts_from(&self, position: u32) -> String {
        format!("hold-file = {:?}\nhold-from = {position}\n", self.file())
    }

    /// A line for `[plugin.faulty-tier]`: nothing is read while the file is there.
    #[must_use]
    pub fn reads(&self) -> String {
        format!("hold_file = {:?}\n", self.file())
    }

    /// Makes the file: from now on, requests that come so far are held.
    ///
    /// # Panics
    /// When the file cannot be written.
    #[must_use]
    pub fn begin(&self) -> Held {
        let file = self.file();
        std::fs::write(&file, "").expect("the file that holds is written");
        Held { file }
    }
}

/// Holds requests until it is dropped, also when a test fails.
pub struct Held {
    file: PathBuf,
}

impl Held {
    /// Ends the hold.
    pub fn end(self) {
        drop(self);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.file).is_err();
    }
}

impl Default for Hold {
    fn default() -> Self {
        Self::new()
    }
}

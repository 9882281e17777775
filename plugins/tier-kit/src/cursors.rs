//! Cursors of scans: numbers that stand for the key after which a scan goes on.

use std::collections::VecDeque;

use host_plugin_api::{Error, ErrorCode, Key, Result};

/// How many cursors are known: the newest ones.
const KNOWN: usize = 1024;

/// The cursors that scans gave out.
#[derive(Debug, Default)]
pub(crate) struct Cursors {
    last: u64,
    /// The newest is at the back, and belongs to `last`.
    keys: VecDeque<Option<Key>>,
}

impl Cursors {
    /// A cursor that goes on after this key. `None` starts a scan.
    pub(crate) fn behind(&mut self, key: Option<Key>) -> u64 {
        if self.keys.len() == KNOWN {
            self.keys.pop_front();
        }
        self.keys.push_back(key);
        self.last += 1;
        self.last
    }

    /// The key that a cursor stands for.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a cursor that no scan gave out, or too long ago.
    pub(crate) fn key(&self, cursor: u64) -> Result<Option<Key>> {
        if cursor == 0 {
            return Ok(None);
        }
        let age = self.last.checked_sub(cursor).and_then(|age| usize::try_from(age).ok());
        let at = age.and_then(|age| self.keys.len().checked_sub(age + 1));
        let unknown =
            || Error::new(ErrorCode::INVALID_ARGUMENT, format!("no scan gave out the cursor {cursor}"));
        at.map(|at| self.keys[at]).ok_or_else(unknown)
    }
}

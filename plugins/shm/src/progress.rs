//! How far submissions are.

use host_plugin_api::Write;

/// How far a submission is.
#[derive(Default)]
pub struct Progress {
    /// The write being copied, and how much of it is.
    pub next: usize,
    pub copied: u32,
    /// Of all writes.
    pub bytes: u64,
}

impl Progress {
    /// So many bytes more of a write are copied, or will be before anything else happens to the submission.
    pub fn advance(&mut self, write: &Write, bytes: u32) {
        self.copied += bytes;
        self.bytes += u64::from(bytes);
        if self.copied == write.length {
            self.next += 1;
            self.copied = 0;
        }
    }
}

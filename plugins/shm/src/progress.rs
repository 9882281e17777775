//! Progress of submissions.

use host_plugin_api::Write;

/// Progress of a submission.
#[derive(Default)]
pub struct Progress {
    /// The write being copied, and how many of its bytes are copied.
    pub next: usize,
    pub copied: u32,
    /// Copied bytes of all writes.
    pub bytes: u64,
}

impl Progress {
    /// Notes that `bytes` more bytes of a write are copied, or will be before anything else happens to the submission.
    pub fn advance(&mut self, write: &Write, bytes: u32) {
        self.copied += bytes;
        self.bytes += u64::from(bytes);
        if self.copied == write.length {
            self.next += 1;
            self.copied = 0;
        }
    }
}

//! Plugins of `tests/plugins/broken*` with one of their defects.

use std::path::{Path, PathBuf};

/// A copy of a plugin of `tests/plugins/broken*` that has the defect.
///
/// # Panics
/// When the plugin has no mark to write the defect into, or the copy cannot be written.
pub fn with_defect(original: &[u8], defect: &str, directory: &Path) -> PathBuf {
    let mark = b"HOST-DEFECT=none........................";
    let at = original.windows(mark.len()).position(|window| window == mark).expect("the mark");
    let mut bytes = original.to_vec();
    bytes[at + 12..at + mark.len()].fill(b'.');
    bytes[at + 12..at + 12 + defect.len()].copy_from_slice(defect.as_bytes());
    let file = directory.join(format!("{defect}.so"));
    std::fs::write(&file, bytes).unwrap();
    file
}

//! A mark in a plugin's file that names the plugin's defect. A test copies the file and changes the mark, so that each defect is
//! a plugin file of its own.

/// The defect's name follows the equals sign, padded with dots.
#[used]
static MARK: [u8; 40] = *b"HOST-DEFECT=none........................";

/// The name of the defect in the file.
#[must_use]
pub fn defect() -> String {
    // SAFETY: a read of a static. It is volatile, because a test may have changed the file after the compilation.
    let mark = unsafe { std::ptr::read_volatile(&raw const MARK) };
    let text = String::from_utf8_lossy(&mark);
    text.strip_prefix("HOST-DEFECT=").unwrap_or_default().trim_end_matches('.').to_owned()
}

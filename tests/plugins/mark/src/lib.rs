//! A place in a plugin's file where a test writes which defect the plugin has: it copies the file and changes the mark,
//! so that each defect is a plugin file of its own.

/// The defect's name follows the equals sign, padded with dots.
#[used]
static MARK: [u8; 40] = *b"HOST-DEFECT=none........................";

/// The name that is written in the file.
#[must_use]
pub fn defect() -> String {
    // SAFETY: a read of a static. It is volatile, because the file may say something else than the compiler saw.
    let mark = unsafe { std::ptr::read_volatile(&raw const MARK) };
    let text = String::from_utf8_lossy(&mark);
    text.strip_prefix("HOST-DEFECT=").unwrap_or_default().trim_end_matches('.').to_owned()
}

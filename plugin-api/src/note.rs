//! The manifest as an ELF note: readable without running a line of the plugin, and kept by `strip` and by LTO.

/// Section that carries the note. The linker makes a program header of it, so a file without section headers works too.
pub const SECTION: &str = ".note.host";

/// The note's owner.
pub const NAME: &[u8; 8] = b"HOSTPLUG";

/// The note's type: a manifest in TOML, UTF-8.
pub const TYPE_MANIFEST: u32 = 1;

/// Start of the name under which a plugin exports its header. The crate's name follows, so that plugins can also be
/// linked into one binary.
pub const SYMBOL_PREFIX: &str = "host_plugin_";

/// One note of `N` bytes of description. `N` is a multiple of four, padded with line feeds.
#[repr(C, align(4))]
pub struct Note<const N: usize> {
    name_bytes: u32,
    description_bytes: u32,
    kind: u32,
    name: [u8; 12],
    description: [u8; N],
}

impl<const N: usize> Note<N> {
    /// Builds a note from the parts, one after the other.
    ///
    /// # Panics
    /// At compile time, when `N` is not [`padded_length`] of the same parts.
    #[must_use]
    pub const fn new(parts: &[&str]) -> Self {
        assert!(
            N == padded_length(parts) && N <= u32::MAX as usize,
            "the note's length is that of its parts"
        );
        let mut name = [0; 12];
        let mut at = 0;
        while at < NAME.len() {
            name[at] = NAME[at];
            at += 1;
        }
        let mut description = [b'\n'; N];
        let (mut part, mut at) = (0, 0);
        while part < parts.len() {
            let bytes = parts[part].as_bytes();
            let mut byte = 0;
            while byte < bytes.len() {
                description[at] = bytes[byte];
                at += 1;
                byte += 1;
            }
            part += 1;
        }
        // The name counts its terminating zero, as the format wants. `name` is padded to a multiple of four.
        Self {
            name_bytes: NAME.len() as u32 + 1,
            description_bytes: N as u32,
            kind: TYPE_MANIFEST,
            name,
            description,
        }
    }

    /// The text of the manifest.
    #[must_use]
    pub const fn text(&'static self) -> &'static str {
        match core::str::from_utf8(&self.description) {
            Ok(text) => text,
            // Cannot happen: the parts are `str`, and the padding is ASCII.
            Err(_) => "",
        }
    }
}

/// Bytes that the parts need, up to the next multiple of four.
#[must_use]
pub const fn padded_length(parts: &[&str]) -> usize {
    let (mut part, mut bytes) = (0, 0);
    while part < parts.len() {
        bytes += parts[part].len();
        part += 1;
    }
    bytes.next_multiple_of(4)
}

/// Whether `text` contains `what`, at compile time.
#[must_use]
pub const fn contains(text: &str, what: &str) -> bool {
    let (text, what) = (text.as_bytes(), what.as_bytes());
    let mut start = 0;
    while start + what.len() <= text.len() {
        let mut at = 0;
        while at < what.len() && text[start + at] == what[at] {
            at += 1;
        }
        if at == what.len() {
            return true;
        }
        start += 1;
    }
    false
}

/// The target triple this crate was built for.
pub const BUILT_FOR: &str = env!("HOST_PLUGIN_TARGET");

/// The compiler's version.
pub const BUILT_BY: &str = env!("HOST_PLUGIN_RUSTC");

//! Plugin files that were damaged, changed, or put in a wrong place.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use host_tests::elf;
use host_tests::plugin_files::plugin;
use host_tests::signing::Publisher;

pub fn put(at: &Path, bytes: &[u8]) {
    std::fs::write(at.join("plugin.so"), bytes).unwrap();
}

pub fn put_plugin(at: &Path, name: &str) {
    std::fs::copy(plugin(name), at.join("plugin.so")).unwrap();
}

pub fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

pub fn null() -> Vec<u8> {
    std::fs::read(plugin("null")).unwrap()
}

/// Pseudo-random bytes, the same in every run.
pub fn noise(length: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u8
    };
    (0..length).map(|_| next()).collect()
}

pub fn aarch64() -> Vec<u8> {
    let mut bytes = null();
    bytes[18..20].copy_from_slice(&183u16.to_le_bytes());
    bytes
}

pub fn libc() -> Vec<u8> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("libc.so"));
    std::fs::read(path.expect("a libc in this process")).unwrap()
}

pub fn find(bytes: &[u8], what: &[u8], from: usize) -> Option<usize> {
    bytes[from..].windows(what.len()).position(|w| w == what).map(|at| from + at)
}

/// The plugin `null` with a text in its note replaced. The note keeps its length.
pub fn noted(from: &str, to: &str) -> Vec<u8> {
    let mut bytes = null();
    let note = find(&bytes, b"HOSTPLUG\0\0\0\0manifest_version", 0).expect("the note");
    let at = find(&bytes, from.as_bytes(), note).expect("the text in the note");
    // A longer text uses the space that is free at the end of the line.
    let end = find(&bytes, b"\n", at + from.len()).unwrap();
    let line = [to.as_bytes(), &bytes[at + from.len()..end]].concat();
    if line.len() <= end - at {
        bytes[at..end].fill(b' ');
        bytes[at..at + line.len()].copy_from_slice(&line);
    } else {
        // The line of the target, which is made shorter to gain space.
        let start = find(&bytes, b"target = ", note).unwrap();
        let text = std::str::from_utf8(&bytes[start..end]).unwrap().replace("unknown-", "").replace(from, to);
        bytes[start..end].fill(b' ');
        bytes[start..start + text.len()].copy_from_slice(text.as_bytes());
    }
    bytes
}

/// The plugin `null` with a text replaced in its note and in its code by one of the same length.
pub fn everywhere(from: &str, to: &str) -> Vec<u8> {
    let mut bytes = null();
    let mut from_here = 0;
    while let Some(at) = find(&bytes, from.as_bytes(), from_here) {
        bytes[at..at + from.len()].copy_from_slice(&to.as_bytes()[..from.len()]);
        from_here = at + 1;
    }
    bytes
}

/// `null` that imports a function under a name that no library has.
pub fn undefined() -> Vec<u8> {
    let mut bytes = null();
    let at = find(&bytes, b"\0pthread_getattr_np\0", 0)
        .or_else(|| find(&bytes, b"\0memmove\0", 0))
        .expect("an imported function");
    bytes[at + 1] = b'Q';
    bytes
}

pub fn link_into_open_directory(at: &Path) {
    let open = at.join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::copy(plugin("null"), open.join("null.so")).unwrap();
    mode(&open, 0o777);
    std::os::unix::fs::symlink(open.join("null.so"), at.join("plugin.so")).unwrap();
}

pub fn side_car(path: &str, sha256: Option<&str>) -> String {
    let target = host_plugin_api::note::BUILT_FOR;
    let pin = sha256.map(|hash| format!("sha256 = \"{hash}\"\n")).unwrap_or_default();
    format!("manifest_version = 1\n[[file]]\ntarget = \"{target}\"\npath = \"{path}\"\n{pin}")
}

/// Pins `plugin.so` to its hash, or to this hash with another beginning.
pub fn pin(at: &Path, start: Option<&str>) {
    let mut hash = host_plugins::lock::sha256(&at.join("plugin.so")).unwrap();
    if let Some(start) = start {
        hash.replace_range(..start.len(), start);
    }
    std::fs::write(at.join("null.plugin.toml"), side_car("plugin.so", Some(&hash))).unwrap();
}

pub fn side_car_elsewhere(at: &Path) {
    let below = at.join("below");
    std::fs::create_dir(&below).unwrap();
    put_plugin(&below, "null");
    let hash = host_plugins::lock::sha256(&below.join("plugin.so")).unwrap();
    std::fs::write(at.join("null.plugin.toml"), side_car("below/plugin.so", Some(&hash))).unwrap();
}

/// The plugin `null`, changed to need a newer C library than exists.
pub fn newer_glibc(at: &Path) {
    put_plugin(at, "null");
    elf::need_glibc(&at.join("plugin.so"), "2.99");
}

/// The plugin `null`, signed by a publisher that the file `keys` lists. `more` is appended to the publisher's entry.
pub fn signed(at: &Path, more: &str) {
    put_plugin(at, "null");
    let acme = Publisher::new("acme");
    acme.sign(&at.join("plugin.so"));
    std::fs::write(at.join("keys"), acme.entry(more)).unwrap();
}

/// As [`signed`], with a changed signature.
pub fn signed_otherwise(at: &Path, change: impl FnOnce(String) -> String) {
    signed(at, "");
    let signature = at.join("plugin.so.minisig");
    let text = std::fs::read_to_string(&signature).unwrap();
    std::fs::write(&signature, change(text)).unwrap();
}

/// A signed file without code that asks for a library beside it, and such a library.
pub fn signed_with_a_library_beside(at: &Path) {
    std::fs::write(at.join("libbeside.so"), "a library").unwrap();
    // A folder to look in, a library that is needed.
    signed_needing(at, &[(29, 0), (1, 8)], b"$ORIGIN\0libbeside.so\0");
}

/// A signed file without code whose dynamic section has these entries, with this table of names.
pub fn signed_needing(at: &Path, entries: &[(u64, u64)], names: &[u8]) {
    const NAMES: u64 = 8000;
    let text = format!(
        "manifest_version = 1\n[plugin]\nid = \"i\"\nname = \"n\"\nversion = \"1.0.0\"\n[api]\nversion = \"{}\"\n\
         [build]\npanic = \"unwind\"\ntarget = \"{}\"\nrustc = \"\"\nsymbol = \"s\"\n",
        host_plugin_api::VERSION,
        host_plugin_api::note::BUILT_FOR
    );
    let note = elf::note(host_plugin_api::note::NAME, host_plugin_api::note::TYPE_MANIFEST, text.as_bytes());
    let entries = [(5, NAMES)].into_iter().chain(entries.iter().copied());
    let entries: Vec<u8> = entries.flat_map(|(tag, value)| [tag, value]).flat_map(u64::to_le_bytes).collect();
    let segments = [
        (elf::LOAD, 0, 8192),
        (elf::NOTE, 4096, note.len() as u64),
        (elf::DYNAMIC, 8192, entries.len() as u64),
    ];
    let file = at.join("plugin.so");
    elf::object(&file, &segments, &[(4096, &note), (NAMES, names), (8192, &entries)]);
    let acme = Publisher::new("acme");
    acme.sign(&file);
    std::fs::write(at.join("keys"), acme.entry("")).unwrap();
}

//! Files in the format of plugins, made by hand.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

/// The type of a segment that is mapped.
pub const LOAD: u32 = 1;
/// The type of the segment that says what the loader needs.
pub const DYNAMIC: u32 = 2;
/// The type of a segment with notes.
pub const NOTE: u32 = 4;

const HEADER: u64 = 64;
const ENTRY: u64 = 56;

/// A segment: its type, where it begins in the file, and its length.
pub type Segment = (u32, u64, u64);

/// Writes a shared object of this machine with these segments, and holes where there is no content. The file is longer than
/// its segments.
///
/// # Panics
/// When the file cannot be written.
pub fn object(file: &Path, segments: &[Segment], content: &[(u64, &[u8])]) {
    let machine: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    let mut bytes = vec![0; HEADER as usize];
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    bytes[16..18].copy_from_slice(&3u16.to_le_bytes());
    bytes[18..20].copy_from_slice(&machine.to_le_bytes());
    bytes[20] = 1;
    bytes[32..40].copy_from_slice(&HEADER.to_le_bytes());
    bytes[52..54].copy_from_slice(&(HEADER as u16).to_le_bytes());
    bytes[54..56].copy_from_slice(&(ENTRY as u16).to_le_bytes());
    let count = u16::try_from(segments.len()).expect("so many segments have room in the header");
    bytes[56..58].copy_from_slice(&count.to_le_bytes());
    for (kind, offset, length) in segments {
        bytes.extend(kind.to_le_bytes());
        bytes.extend([0; 4]);
        // Offset, address twice, length in the file and in memory, alignment.
        for word in [*offset, *offset, *offset, *length, *length, 4] {
            bytes.extend(word.to_le_bytes());
        }
    }
    let mut made = File::create(file).expect("a file can be made");
    made.write_all(&bytes).expect("it can be written");
    for (at, bytes) in content {
        made.seek(SeekFrom::Start(*at)).expect("it can be written anywhere");
        made.write_all(bytes).expect("it can be written");
    }
    let end = segments.iter().map(|(_, offset, length)| offset + length).max().unwrap_or_default();
    let written = made.metadata().expect("it has a length").len();
    made.set_len(end.max(written) + 8192).expect("it can have holes");
}

/// Writes a shared object whose dynamic section has these entries, beside a table of names with this text in it.
///
/// # Panics
/// As [`object`].
pub fn dynamic(file: &Path, entries: &[(u64, u64)], names: &[u8]) {
    const NAMES: u64 = 8000;
    let table = [(5, NAMES)].into_iter().chain(entries.iter().copied());
    let table: Vec<u8> = table.flat_map(|(tag, value)| [tag, value]).flat_map(u64::to_le_bytes).collect();
    let segments = [(LOAD, 0, 8192), (DYNAMIC, 8192, table.len() as u64)];
    object(file, &segments, &[(NAMES, names), (8192, &table)]);
}

/// Replaces a version of glibc that a library needs by another one of the same length, as the linker would have written it.
///
/// # Panics
/// When it needs no version of glibc of this length.
pub fn need_glibc(file: &Path, version: &str) {
    let mut bytes = std::fs::read(file).expect("a library can be read");
    let new = format!("GLIBC_{version}");
    let is_name = |at: usize| {
        let name = bytes.get(at + 1..at + 1 + new.len())?;
        let ends = bytes[at] == 0 && bytes.get(at + 1 + new.len()) == Some(&0);
        (ends && name.starts_with(b"GLIBC_2.")).then(|| name.to_vec())
    };
    let old = (0..bytes.len()).find_map(is_name).expect("a version of glibc of this length");
    let hash = |name: &[u8]| {
        let hashed = name.iter().fold(0u32, |hash, byte| {
            let hash = (hash << 4).wrapping_add(u32::from(*byte));
            let high = hash & 0xf000_0000;
            (hash ^ (high >> 24)) & !high
        });
        hashed.to_le_bytes()
    };
    let (old_hash, new_hash) = (hash(&old), hash(new.as_bytes()));
    let places = |bytes: &[u8], what: &[u8]| -> Vec<usize> {
        (0..bytes.len() - what.len()).filter(|at| bytes[*at..].starts_with(what)).collect()
    };
    for at in places(&bytes, &[&[0], old.as_slice(), &[0]].concat()) {
        bytes[at + 1..at + 1 + new.len()].copy_from_slice(new.as_bytes());
    }
    for at in places(&bytes, &old_hash) {
        bytes[at..at + 4].copy_from_slice(&new_hash);
    }
    // The file is replaced, because it may be a link to a library in use.
    std::fs::remove_file(file).expect("a library can be replaced");
    std::fs::write(file, bytes).expect("a library can be written");
}

/// A note: its owner's name, type and content.
#[must_use]
pub fn note(name: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
    let mut note = Vec::new();
    // The length of the name includes its terminating zero. Neither length includes padding.
    for word in [name.len() as u32 + 1, content.len() as u32, kind] {
        note.extend(word.to_le_bytes());
    }
    note.extend(name);
    note.push(0);
    note.resize(note.len().next_multiple_of(4), 0);
    note.extend(content);
    note.resize(note.len().next_multiple_of(4), 0);
    note
}

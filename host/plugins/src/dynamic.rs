//! The dynamic section of a file: the libraries, search folders and versions that it requests from the system's loader.

use std::fs::File;
use std::path::Path;

use object::elf::{Dyn64, FileHeader64, PT_LOAD, ProgramHeader64, VER_FLG_WEAK, Vernaux, Verneed};
use object::read::ReadCacheOps;
use object::read::elf::{Dyn, FileHeader, ProgramHeader};
use object::{Endianness, ReadRef};
use serde::Serialize;

use super::bounded::{Bounded, MAX_SEGMENTS};

const DT_NEEDED: i64 = 1;
const DT_STRTAB: i64 = 5;
const DT_RPATH: i64 = 15;
const DT_RUNPATH: i64 = 29;
const DT_VERNEED: i64 = 0x6fff_fffe;

/// Longest name of a library.
const MAX_NAME: u64 = 4096;
/// Longest name of a version. Linkers write about twenty bytes.
const MAX_VERSION: u64 = 256;
/// Limit of versions, and of libraries with versions, in one file. A plugin that links C++ has about forty.
const MAX_VERSIONS: usize = 1024;

/// A version of a library without which the system's loader refuses the file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct NeededVersion {
    /// The name of the library, for instance `libc.so.6`.
    pub library: String,
    /// The name of the version, for instance `GLIBC_2.34`.
    pub version: String,
}

/// Names of the libraries that the system's loader will look for. Empty if the file names no library or cannot be read.
#[must_use]
pub fn needed_libraries(path: &Path) -> Vec<String> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    names(&Bounded::new(file), &[DT_NEEDED]).unwrap_or_default()
}

/// Versions that the system's loader will require, sorted and without duplicates. Empty if there are none or the file cannot be
/// read.
#[must_use]
pub fn needed_versions(path: &Path) -> Vec<NeededVersion> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    versions(&Bounded::new(file))
}

/// Whether the system's loader will look for libraries beside the file, so that the file must be loaded from its own path.
pub(super) fn needs_its_place<R: ReadCacheOps>(data: &Bounded<R>) -> bool {
    // The loader does not use paths that cannot be read.
    let paths = names(data, &[DT_RPATH, DT_RUNPATH]).unwrap_or_default();
    paths.iter().any(|path| path.contains("$ORIGIN") || path.contains("${ORIGIN}"))
}

/// The libraries that a file needs and the folders to search for them.
#[derive(Debug, Default)]
pub(super) struct Dynamic {
    /// Names of the libraries.
    pub needed: Vec<String>,
    /// Folders to search, separated by colons.
    pub paths: Vec<String>,
}

/// Reads a file's dynamic section. The result is empty if there is none or it cannot be read.
pub(super) fn dynamic(path: &Path) -> Dynamic {
    let of = |tags: &[i64]| {
        let file = File::open(path).ok()?;
        names(&Bounded::new(file), tags).ok()
    };
    let of = |tags| of(tags).unwrap_or_default();
    Dynamic { needed: of(&[DT_NEEDED]), paths: of(&[DT_RPATH, DT_RUNPATH]) }
}

/// As [`needed_versions`], of an open file. Leaves out weak versions, because the loader goes on without them.
pub(super) fn versions<R: ReadCacheOps>(data: &Bounded<R>) -> Vec<NeededVersion> {
    let mut found = Vec::new();
    let read = each_section(data, |section| {
        section.versions(&mut found);
    });
    if read.is_err() || data.is_exceeded() {
        return Vec::new();
    }
    found.sort();
    found.dedup();
    found
}

/// The texts of these entries of the dynamic section.
fn names<R: ReadCacheOps>(data: &Bounded<R>, tags: &[i64]) -> object::Result<Vec<String>> {
    let mut names = Vec::new();
    each_section(data, |section| {
        for entry in section.entries.iter().filter(|e| tags.contains(&e.tag(section.endian).0)) {
            names.push(section.text(entry.val(section.endian), MAX_NAME));
        }
    })?;
    if data.is_exceeded() {
        // Some names could not be read, so the list would not be the libraries that the loader looks for.
        names.clear();
    }
    Ok(names)
}

/// A dynamic section, with the segments that translate its addresses.
struct Section<'data, R: ReadCacheOps> {
    data: &'data Bounded<R>,
    endian: Endianness,
    segments: &'data [ProgramHeader64<Endianness>],
    entries: &'data [Dyn64<Endianness>],
    /// Offset in the file of the table of texts.
    texts: u64,
}

/// Calls `show` with each dynamic section that has a table of texts.
fn each_section<'data, R: ReadCacheOps>(
    data: &'data Bounded<R>,
    mut show: impl FnMut(&Section<'data, R>),
) -> object::Result<()> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, data)?;
    // The check of a plugin limits its segments before. Other files are limited here, because each entry may search all segments.
    let segments = segments.get(..MAX_SEGMENTS).unwrap_or(segments);
    for segment in segments {
        let Some(entries) = segment.dynamic(endian, data)? else { continue };
        let mut section = Section { data, endian, segments, entries, texts: 0 };
        if let Some(texts) = section.place_of(DT_STRTAB) {
            section.texts = texts;
            show(&section);
        }
    }
    Ok(())
}

impl<R: ReadCacheOps> Section<'_, R> {
    /// The file offset of the table whose memory address this entry holds. The segment that covers the address gives the offset.
    fn place_of(&self, tag: i64) -> Option<u64> {
        let endian = self.endian;
        let address = self.entries.iter().find(|e| e.tag(endian).0 == tag)?.val(endian);
        self.segments.iter().find_map(|s| {
            let inside = address.checked_sub(s.p_vaddr(endian)).filter(|at| *at < s.p_filesz(endian));
            Some(s.p_offset(endian).saturating_add(inside.filter(|_| s.p_type(endian) == PT_LOAD)?))
        })
    }

    /// The text at this place of the table of texts, or an empty one when it is longer than `longest`.
    fn text(&self, at: u64, longest: u64) -> String {
        let start = self.texts.saturating_add(at);
        let end = start.saturating_add(longest).min(self.data.len().unwrap_or(0));
        let bytes = self.data.read_bytes_at_until(start..end.max(start), 0).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// Adds the entries of the table of needed versions, until an entry cannot be read.
    fn versions(&self, found: &mut Vec<NeededVersion>) -> Option<()> {
        let endian = self.endian;
        let mut library_at = self.place_of(DT_VERNEED)?;
        for _ in 0..MAX_VERSIONS {
            let needed = self.data.read_at::<Verneed<Endianness>>(library_at).ok()?;
            let library = self.text(needed.vn_file.get(endian).into(), MAX_VERSION);
            let mut version_at = library_at.checked_add(needed.vn_aux.get(endian).into())?;
            for _ in 0..needed.vn_cnt.get(endian) {
                let version = self.data.read_at::<Vernaux<Endianness>>(version_at).ok()?;
                if !version.vna_flags.get(endian).contains(VER_FLG_WEAK) {
                    let version = self.text(version.vna_name.get(endian).into(), MAX_VERSION);
                    found.push(NeededVersion { library: library.clone(), version });
                }
                let next = version.vna_next.get(endian);
                if next == 0 || found.len() >= MAX_VERSIONS {
                    break;
                }
                version_at = version_at.checked_add(next.into())?;
            }
            let next = needed.vn_next.get(endian);
            if next == 0 || found.len() >= MAX_VERSIONS {
                break;
            }
            library_at = library_at.checked_add(next.into())?;
        }
        Some(())
    }
}

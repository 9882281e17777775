//! What the dynamic section of a file asks of the system's loader: libraries, folders to look for them in, and versions.

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
/// Longest name of a version. A linker's have some twenty bytes.
const MAX_VERSION: u64 = 256;
/// Most versions and libraries with versions of one file. A plugin that links C++ has about forty.
const MAX_VERSIONS: usize = 1024;

/// A version of a library without which the system's loader refuses the file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct NeededVersion {
    /// The library's name, as `libc.so.6`.
    pub library: String,
    /// The version's, as `GLIBC_2.34`.
    pub version: String,
}

/// Names of the libraries that the system's loader will look for. Empty when there are none or they cannot be read.
#[must_use]
pub fn needed_libraries(path: &Path) -> Vec<String> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    names(&Bounded::new(file), &[DT_NEEDED]).unwrap_or_default()
}

/// Versions that the system's loader will ask for, in order, each once. Empty when there are none or they cannot be read.
#[must_use]
pub fn needed_versions(path: &Path) -> Vec<NeededVersion> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    versions(&Bounded::new(file))
}

/// Whether the system's loader will look for libraries beside the file, so that it must be loaded from its place.
pub(super) fn needs_its_place<R: ReadCacheOps>(data: &Bounded<R>) -> bool {
    // What cannot be read is not looked for either.
    let paths = names(data, &[DT_RPATH, DT_RUNPATH]).unwrap_or_default();
    paths.iter().any(|path| path.contains("$ORIGIN") || path.contains("${ORIGIN}"))
}

/// What a library says of others that it needs.
#[derive(Debug, Default)]
pub(super) struct Dynamic {
    /// Their names.
    pub needed: Vec<String>,
    /// Folders to look for them, with colons between.
    pub paths: Vec<String>,
}

/// Reads a file's section, which is empty when there is nothing or it cannot be read.
pub(super) fn dynamic(path: &Path) -> Dynamic {
    let of = |tags: &[i64]| {
        let file = File::open(path).ok()?;
        names(&Bounded::new(file), tags).ok()
    };
    let of = |tags| of(tags).unwrap_or_default();
    Dynamic { needed: of(&[DT_NEEDED]), paths: of(&[DT_RPATH, DT_RUNPATH]) }
}

/// As [`needed_versions`], of an open file. A weak one is left out: the loader goes on without.
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
        // Some could not be read, so that these are not what the loader will look for.
        names.clear();
    }
    Ok(names)
}

/// A dynamic section, with what it takes to follow its addresses.
struct Section<'data, R: ReadCacheOps> {
    data: &'data Bounded<R>,
    endian: Endianness,
    segments: &'data [ProgramHeader64<Endianness>],
    entries: &'data [Dyn64<Endianness>],
    /// Where the table of texts lies in the file.
    texts: u64,
}

/// Shows every dynamic section that has texts.
fn each_section<'data, R: ReadCacheOps>(
    data: &'data Bounded<R>,
    mut show: impl FnMut(&Section<'data, R>),
) -> object::Result<()> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, data)?;
    // The table of a plugin was counted before. Here every entry may look through all of them.
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
    /// Where in the file the table lies whose address in memory this entry has: in the segment that covers it.
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

    /// Adds what the table of needed versions lists, up to what cannot be read.
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

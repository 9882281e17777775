//! Checks a plugin's file without running its code.
//!
//! Checks after loading would be too late: constructors run during loading, and a file that was cut off kills the process inside
//! the system's loader. The file's headers and notes show both risks before.

use host_plugin_api::{c, note};
use object::elf::{ET_DYN, FileHeader64, PT_LOAD, PT_NOTE};
use object::read::ReadCacheOps;
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, ReadRef};
use semver::Version;

use super::bounded::{Bounded, MAX_SEGMENTS, MOST_BYTES};
use super::dynamic;
use super::error::PreflightError;
use super::glibc::Glibc;
use super::manifest::Manifest;
use super::notes::Notes;
use super::policy::Policy;

/// Longest manifest that is read.
const MANIFEST_BYTES: usize = 1 << 20;
/// Limit of the manifests in a file: its own, and those of the plugins that are linked into it.
const MAX_MANIFESTS: usize = 64;

/// Checks the content of an open file: that the system's loader can load it, and that it is a plugin for this host.
pub(super) fn read_and_check<R: ReadCacheOps>(
    data: &Bounded<R>,
    length: u64,
    policy: &Policy,
) -> Result<Manifest, PreflightError> {
    let manifest = read(data, length)?;
    check_api(&manifest)?;
    check_host(&manifest)?;
    check_target(&manifest)?;
    check_glibc(data)?;
    match manifest.build.panic.as_str() {
        "unwind" => {}
        "abort" if policy.panic_abort => {}
        "abort" => return Err(PreflightError::PanicAbort),
        other => {
            let text = format!("panic is {other:?}, it must be unwind or abort");
            return Err(PreflightError::BadManifest(text));
        }
    }
    match manifest.build.abi.as_deref() {
        None => {}
        Some(c::ABI) if manifest.build.symbol == c::SYMBOL => {}
        Some(c::ABI) => {
            let text =
                format!("symbol is {:?}, it must be {} of a plugin in C", manifest.build.symbol, c::SYMBOL);
            return Err(PreflightError::BadManifest(text));
        }
        Some(other) => {
            let text = format!("abi is {other:?}, this host knows {:?} and that of Rust", c::ABI);
            return Err(PreflightError::BadManifest(text));
        }
    }
    match manifest.plugin.threads.as_deref() {
        None | Some("own" | "none") => Ok(manifest),
        Some(other) => {
            let text = format!("threads is {other:?}, it must be own or none");
            Err(PreflightError::BadManifest(text))
        }
    }
}

/// Reads the manifest without checking it against this host.
pub(super) fn read<R: ReadCacheOps>(data: &Bounded<R>, length: u64) -> Result<Manifest, PreflightError> {
    read_notes(data, length).map_err(|error| match data.is_exceeded() {
        true => PreflightError::Oversized(format!("its headers and notes have more than {MOST_BYTES} bytes")),
        false => error,
    })
}

fn read_notes<'a>(data: impl ReadRef<'a>, length: u64) -> Result<Manifest, PreflightError> {
    if length == 0 {
        return Err(PreflightError::NotElf("it is empty".to_owned()));
    }
    let start = data.read_bytes_at(0, length.min(16)).unwrap_or_default();
    if !start.starts_with(&object::elf::ELFMAG) {
        return Err(PreflightError::NotElf(format!("it starts with {:?}", String::from_utf8_lossy(start))));
    }
    let elf = |e: object::Error| PreflightError::NotElf(e.to_string());
    if length < size_of::<FileHeader64<Endianness>>() as u64 {
        return Err(PreflightError::Truncated { needed: 64, found: length });
    }
    let header = FileHeader64::<Endianness>::parse(data).map_err(elf)?;
    let endian = header.endian().map_err(elf)?;
    let machine = machine_name(header.e_machine(endian).0);
    if machine != std::env::consts::ARCH {
        return Err(PreflightError::WrongMachine { found: machine, host: std::env::consts::ARCH });
    }
    if header.e_type(endian) != ET_DYN {
        return Err(PreflightError::NotShared(header.e_type(endian).0));
    }
    let segments = usize::from(header.e_phnum(endian));
    if segments > MAX_SEGMENTS {
        let text = format!("it has {segments} segments, {MAX_SEGMENTS} are allowed");
        return Err(PreflightError::Oversized(text));
    }
    let table_end = header
        .e_phoff(endian)
        .saturating_add(u64::from(header.e_phentsize(endian)) * u64::from(header.e_phnum(endian)));
    if table_end > length {
        return Err(PreflightError::Truncated { needed: table_end, found: length });
    }
    let segments = header.program_headers(endian, data).map_err(elf)?;
    let end =
        |s: &object::elf::ProgramHeader64<Endianness>| s.p_offset(endian).saturating_add(s.p_filesz(endian));
    let needed = segments.iter().map(end).max().unwrap_or(0);
    if needed > length {
        return Err(PreflightError::Truncated { needed, found: length });
    }
    if !segments.iter().any(|s| s.p_type(endian) == PT_LOAD) {
        return Err(PreflightError::NotElf("it has nothing to load".to_owned()));
    }
    let mut manifests = Vec::new();
    for segment in segments {
        if segment.p_type(endian) != PT_NOTE {
            continue;
        }
        let bytes = segment.data(endian, data);
        let bytes =
            bytes.map_err(|()| PreflightError::NotElf("a segment of notes lies outside of it".to_owned()))?;
        for found in Notes::new(endian, segment.p_align(endian), bytes) {
            let found = found.map_err(elf)?;
            if found.name() != note::NAME || found.n_type(endian).0 != note::TYPE_MANIFEST {
                continue;
            }
            if found.desc().len() > MANIFEST_BYTES {
                let text = format!("it has {} bytes, {MANIFEST_BYTES} are allowed", found.desc().len());
                return Err(PreflightError::BadManifest(text));
            }
            if manifests.len() == MAX_MANIFESTS {
                let text = format!("it has more than {MAX_MANIFESTS} manifests");
                return Err(PreflightError::Oversized(text));
            }
            let text = std::str::from_utf8(found.desc());
            let text = text.map_err(|e| PreflightError::BadManifest(format!("it is not text: {e}")))?;
            manifests.push(Manifest::parse(text).map_err(PreflightError::BadManifest)?);
        }
    }
    choose(manifests)
}

/// The file's own manifest, among those of the plugins that are linked into it.
fn choose(manifests: Vec<Manifest>) -> Result<Manifest, PreflightError> {
    let bases: Vec<String> = manifests.iter().flat_map(|m| m.plugin.built_on.clone()).collect();
    let mut top: Vec<Manifest> = manifests.into_iter().filter(|m| !bases.contains(&m.plugin.id)).collect();
    match (top.len(), top.pop()) {
        (1, Some(manifest)) => Ok(manifest),
        (_, None) if bases.is_empty() => Err(PreflightError::NoNote),
        (_, None) => Err(PreflightError::Ambiguous(bases)),
        (_, Some(last)) => {
            top.push(last);
            Err(PreflightError::Ambiguous(top.into_iter().map(|m| m.plugin.id).collect()))
        }
    }
}

/// Compares the API versions. Below 1.0 the minor versions must be equal. From 1.0 on the major versions must be, since minor
/// versions only append.
fn check_api(manifest: &Manifest) -> Result<(), PreflightError> {
    let bad = |e: semver::Error| PreflightError::BadManifest(format!("the host's own version: {e}"));
    let host = Version::parse(host_plugin_api::VERSION).map_err(bad)?;
    let found = manifest.api.version.clone();
    let (fits, needed) = match host.major {
        0 => ((found.major, found.minor) == (0, host.minor), format!("0.{}", host.minor)),
        major => (found.major == major, format!("{major}")),
    };
    if fits { Ok(()) } else { Err(PreflightError::ApiVersion { found, host, needed }) }
}

/// Compares this host with the oldest host with which the author says the plugin works.
fn check_host(manifest: &Manifest) -> Result<(), PreflightError> {
    let bad = |e: semver::Error| PreflightError::BadManifest(format!("the host's own version: {e}"));
    let host = Version::parse(env!("CARGO_PKG_VERSION")).map_err(bad)?;
    match &manifest.plugin.min_host {
        Some(needed) if *needed > host => Err(PreflightError::HostTooOld { needed: needed.clone(), host }),
        _ => Ok(()),
    }
}

/// Checks the C library of the target, since a process has only one. The ELF header has the architecture.
fn check_target(manifest: &Manifest) -> Result<(), PreflightError> {
    let library = |target: &str| target.rsplit('-').next().map(str::to_owned);
    if library(&manifest.build.target) == library(note::BUILT_FOR) {
        return Ok(());
    }
    Err(PreflightError::WrongTarget { found: manifest.build.target.clone(), host: note::BUILT_FOR })
}

/// Checks that this process's glibc is new enough, because the system's loader would refuse the file otherwise.
fn check_glibc<R: ReadCacheOps>(data: &Bounded<R>) -> Result<(), PreflightError> {
    match (Glibc::needed(&dynamic::versions(data)), Glibc::here()) {
        (Some(needed), Some(here)) if needed > here => Err(PreflightError::GlibcTooOld { needed, here }),
        _ => Ok(()),
    }
}

fn machine_name(machine: u16) -> String {
    match machine {
        m if m == object::elf::EM_X86_64.0 => "x86_64".to_owned(),
        m if m == object::elf::EM_AARCH64.0 => "aarch64".to_owned(),
        m if m == object::elf::EM_RISCV.0 => "riscv64".to_owned(),
        m if m == object::elf::EM_386.0 => "x86".to_owned(),
        other => format!("ELF machine {other}"),
    }
}

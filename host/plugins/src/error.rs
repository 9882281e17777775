//! What can go wrong with a plugin, one variant per step.

use std::fmt;
use std::path::PathBuf;

use host_plugin_api::ErrorCode;
use host_plugin_api::abi::HeaderError;

use super::glibc::Glibc;

/// Why a file is no plugin this host can load. Found by reading it, before any of its code runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreflightError {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(#[source] std::io::Error),
    /// A directory, a pipe, a device.
    #[error("is not a regular file")]
    NotAFile,
    /// Another kind of file.
    #[error("is not an ELF shared object: {0}")]
    NotElf(String),
    /// A program, an object file, a core dump.
    #[error("is an ELF file of type {0}, a plugin is a shared object (type 3)")]
    NotShared(u16),
    /// For another machine.
    #[error("was built for {found}, this host runs on {host}")]
    WrongMachine {
        /// The file's.
        found: String,
        /// This host's.
        host: &'static str,
    },
    /// Cut off. Loading it would kill the process.
    #[error("is cut off: it needs {needed} bytes and has {found}, copy it again")]
    Truncated {
        /// Where its last segment ends.
        needed: u64,
        /// Its length.
        found: u64,
    },
    /// Reading its headers and notes would take more memory than those of any plugin.
    #[error("is no plugin that can be checked: {0}; a plugin has far fewer, build it again or remove it")]
    Oversized(String),
    /// A library, but no plugin.
    #[error("is a library but not a plugin: it carries no HOSTPLUG note, which export_plugin! writes")]
    NoNote,
    /// Its manifest is unusable.
    #[error("carries a manifest that cannot be used: {0}")]
    BadManifest(String),
    /// Several plugins in one file, none built on the others.
    #[error("carries several plugins ({}); the one that links the others must list them in built_on", .0.join(", "))]
    Ambiguous(Vec<String>),
    /// For another API.
    #[error(
        "was built for plugin API {found}, this host speaks {host}: build it again with host-plugin-api {needed}"
    )]
    ApiVersion {
        /// The plugin's.
        found: semver::Version,
        /// This host's.
        host: semver::Version,
        /// What would do.
        needed: String,
    },
    /// It wants a newer host.
    #[error("needs host {needed} or newer, this is {host}: update the host")]
    HostTooOld {
        /// What its manifest says.
        needed: semver::Version,
        /// This host's.
        host: semver::Version,
    },
    /// Users that may not replace the program may replace it.
    #[error("could be replaced by others: {0}; or accept it with --insecure-plugin-permissions")]
    Permissions(String),
    /// What is beside it and should say where it is does not.
    #[error("says nothing of use about a plugin: {0}")]
    BadSideCar(String),
    /// For another C library.
    #[error("was built for {found}, this host is {host}: install the plugin's file for that target")]
    WrongTarget {
        /// The plugin's.
        found: String,
        /// This host's.
        host: &'static str,
    },
    /// Linked against a newer C library than this process has.
    #[error(
        "needs glibc {needed} or newer, this machine has {here}: build it where glibc is no newer than {here} (on an older \
         distribution or in its container), or for it with `zig cc` or cargo-zigbuild; or run it on a newer machine"
    )]
    GlibcTooOld {
        /// The oldest that the file can be loaded with.
        needed: Glibc,
        /// This process's.
        here: Glibc,
    },
    /// `plugins.lock` does not list it.
    #[error("is not listed in {}: add it with `host plugins lock`", .0.display())]
    NotLocked(PathBuf),
    /// `plugins.lock` lists other bytes.
    #[error("has sha256 {found}, but {} pins {pinned}: restore the file, or lock it again", lock.display())]
    WrongHash {
        /// The lock file or side-car.
        lock: PathBuf,
        /// What it lists.
        pinned: String,
        /// What the file has.
        found: String,
    },
    /// There is no signature beside it, and the operator asks for one.
    #[error(
        "is not signed: {} is not there, and only plugins of the publishers in {} are loaded: get the publisher's signature, or sign \
         the file with a key of your own that is listed there", signature.display(), publishers.display()
    )]
    NotSigned {
        /// Where the signature would be.
        signature: PathBuf,
        /// The file of publishers.
        publishers: PathBuf,
    },
    /// The signature beside it does not count.
    #[error("has a signature that does not count, {}: {problem}", signature.display())]
    BadSignature {
        /// The signature.
        signature: PathBuf,
        /// Why not.
        problem: String,
    },
    /// It is signed, and what would be loaded with it is not.
    #[error("is signed, but is loaded with {}, which no signature covers: pin both with `host plugins lock`", .0.join(", "))]
    UnsignedLibraries(Vec<String>),
    /// `plugins.lock` lists other libraries beside it.
    #[error("is loaded with {what} in {}: restore the library, or lock the plugin again with `host plugins lock`", lock.display())]
    Libraries {
        /// The lock file.
        lock: PathBuf,
        /// Which, and why not.
        what: String,
    },
    /// A panic in it would end the process.
    #[error(
        "was built with panic = \"abort\", so that a defect in it would end this process: build it with panic = \"unwind\", or accept it with --plugins-may-abort"
    )]
    PanicAbort,
}

impl PreflightError {
    /// A label for metrics.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unreadable(_) => "unreadable",
            Self::NotAFile => "not_a_file",
            Self::NotElf(_) => "not_elf",
            Self::NotShared(_) => "not_shared",
            Self::WrongMachine { .. } => "wrong_machine",
            Self::Truncated { .. } => "truncated",
            Self::Oversized(_) => "oversized",
            Self::NoNote => "no_note",
            Self::BadManifest(_) => "bad_manifest",
            Self::Ambiguous(_) => "ambiguous",
            Self::ApiVersion { .. } => "api_version",
            Self::HostTooOld { .. } => "host_too_old",
            Self::Permissions(_) => "permissions",
            Self::BadSideCar(_) => "bad_side_car",
            Self::WrongTarget { .. } => "wrong_target",
            Self::GlibcTooOld { .. } => "glibc_too_old",
            Self::NotLocked(_) => "not_locked",
            Self::WrongHash { .. } => "wrong_hash",
            Self::NotSigned { .. } => "not_signed",
            Self::BadSignature { .. } => "bad_signature",
            Self::UnsignedLibraries(_) => "unsigned_libraries",
            Self::Libraries { .. } => "libraries",
            Self::PanicAbort => "panic_abort",
        }
    }
}

/// Where a plugin was looked for, and what was there instead.
#[derive(Debug, Default)]
pub struct NoneFound {
    /// Every directory, in order, with why it could not be read, when it could not.
    pub searched: Vec<(PathBuf, Option<String>)>,
    /// Names of the plugins found there.
    pub found: Vec<String>,
    /// Files that are no usable plugin, with the reason.
    pub unusable: Vec<(PathBuf, String)>,
}

impl fmt::Display for NoneFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.searched.is_empty() {
            return f.write_str("no plugin directory is configured");
        }
        f.write_str("searched ")?;
        for (i, (path, error)) in self.searched.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{}", path.display())?;
            if let Some(error) = error {
                write!(f, " ({error})")?;
            }
        }
        let found = if self.found.is_empty() { "none".to_owned() } else { self.found.join(", ") };
        write!(f, "; plugins there: {found}")?;
        for (path, reason) in &self.unusable {
            write!(f, "; {} {reason}", path.display())?;
        }
        Ok(())
    }
}

/// Why a plugin could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PluginError {
    /// No file in any directory carries the name.
    #[error("no plugin is named {name:?}: {trace}")]
    NotFound {
        /// What was asked for.
        name: String,
        /// Where, and what was there.
        trace: NoneFound,
    },
    /// The file is not usable any more, or never was.
    #[error("{} {source}", path.display())]
    Preflight {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: Box<PreflightError>,
    },
    /// Loaded before, and written over since. What runs may be a mixture of both files.
    #[error("{} was written over in place while this process has it loaded: start again, and replace plugins with `host plugins install`", path.display())]
    Overwritten {
        /// The file.
        path: PathBuf,
    },
    /// Another file lies there than at the scan.
    #[error("{} was replaced since it was scanned: start again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The plugin does not play the role.
    #[error("plugin {plugin:?} has no {role} role, only: {}", roles.join(", "))]
    NoRole {
        /// Its name.
        plugin: String,
        /// What was asked for.
        role: &'static str,
        /// What it plays.
        roles: Vec<String>,
    },
    /// The configuration does not fit what the manifest declares.
    #[error("configuration of plugin {plugin:?}: {problem}")]
    Config {
        /// Its name.
        plugin: String,
        /// The key, and what is allowed.
        problem: String,
    },
    /// The system's loader refused.
    #[error("the system cannot load {}: {message}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the loader says.
        message: String,
    },
    /// The note promises a header that is not exported.
    #[error("{} does not export {symbol}, which its note names: build it as a cdylib with export_plugin!", path.display())]
    NoHeader {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        symbol: String,
    },
    /// The types of the boundary differ.
    #[error("{} cannot be used: {source}{}", path.display(), header_hint(source))]
    Header {
        /// The file.
        path: PathBuf,
        /// The first difference.
        source: HeaderError,
    },
    /// What a plugin in C exports is not what the header declares.
    #[error("{} cannot be used: {problem}", path.display())]
    CTable {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Its code describes another plugin than its note.
    #[error("{} describes itself as {described}, but its note says {noted}: the file was tampered with or damaged", path.display())]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// By its code.
        described: String,
        /// By its note.
        noted: String,
    },
    /// Its code exports other roles than its note declares: more, or fewer.
    #[error("{} exports the roles {exported:?}, but its manifest declares {declared:?}: declare what it exports, and no more", path.display())]
    Roles {
        /// The file.
        path: PathBuf,
        /// By its code.
        exported: Vec<&'static str>,
        /// By its note.
        declared: Vec<&'static str>,
    },
    /// The host could not offer its services.
    #[error("plugin {plugin:?} cannot be served: {problem}")]
    Services {
        /// Its name.
        plugin: String,
        /// What is missing.
        problem: String,
    },
    /// The plugin says that its configuration cannot work.
    #[error("plugin {plugin:?} refuses its configuration: {source}")]
    ConfigRefused {
        /// Its name.
        plugin: String,
        /// What it says.
        source: host_plugin_api::Error,
    },
    /// An instance was opened that cannot be used.
    #[error("plugin {plugin:?} opened, but {problem}: this is a defect of the plugin")]
    NotReady {
        /// Its name.
        plugin: String,
        /// What it says of itself.
        problem: String,
    },
    /// The plugin's factory failed.
    #[error("plugin {plugin:?} ({}) did not open: {source}", path.display())]
    Factory {
        /// Its name.
        plugin: String,
        /// The file.
        path: PathBuf,
        /// What it says.
        source: host_plugin_api::Error,
    },
}

/// What helps against it: a new build where the two sides differ, the plugin's own words where its code failed.
fn header_hint(error: &HeaderError) -> &'static str {
    match error {
        HeaderError::Constructor(_) => "",
        _ => ": build it again with this host's host-plugin-api",
    }
}

impl PluginError {
    /// A label for metrics.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "not_found",
            Self::Preflight { source, .. } => source.reason(),
            Self::Overwritten { .. } => "overwritten",
            Self::Changed { .. } => "changed",
            Self::NoRole { .. } => "no_role",
            Self::Config { .. } => "config",
            Self::Open { .. } => "open",
            Self::NoHeader { .. } => "no_header",
            Self::Header { source, .. } => match source {
                HeaderError::Incompatible(_) => "abi",
                HeaderError::NoLayout => "no_layout",
                HeaderError::Layout(_) => "layout",
                HeaderError::Forked(_) => "forked",
                HeaderError::Constructor(_) => "constructor",
            },
            Self::CTable { .. } => "c_table",
            Self::Mismatch { .. } => "mismatch",
            Self::Roles { .. } => "roles",
            Self::Services { .. } => "services",
            Self::ConfigRefused { .. } => "config_refused",
            Self::NotReady { .. } => "not_ready",
            Self::Factory { .. } => "factory",
        }
    }

    /// Whether the plugin itself says that it is the configuration with which it cannot work.
    #[must_use]
    pub fn is_about_configuration(&self) -> bool {
        match self {
            Self::ConfigRefused { .. } => true,
            Self::Factory { source, .. } => source.code == ErrorCode::CONFIG,
            _ => false,
        }
    }
}

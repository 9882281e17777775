//! Errors of plugins, one variant for each step of checking, loading and opening.

use std::fmt;
use std::path::PathBuf;

use host_plugin_api::ErrorCode;
use host_plugin_api::abi::HeaderError;

use super::glibc::Glibc;

/// The reasons for which this host cannot load a file. Found by reading the file, before any code of it runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreflightError {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(#[source] std::io::Error),
    /// The path is not a regular file but a directory, a pipe or a device.
    #[error("is not a regular file")]
    NotAFile,
    /// The file has another format.
    #[error("is not an ELF shared object: {0}")]
    NotElf(String),
    /// A program, an object file, a core dump.
    #[error("is an ELF file of type {0}, a plugin is a shared object (type 3)")]
    NotShared(u16),
    /// The file was built for another architecture.
    #[error("was built for {found}, this host runs on {host}")]
    WrongMachine {
        /// The architecture of the file.
        found: String,
        /// The architecture of this host.
        host: &'static str,
    },
    /// The file was cut off. Loading it would kill the process.
    #[error("is cut off: it needs {needed} bytes and has {found}, copy it again")]
    Truncated {
        /// Offset at which its last segment ends.
        needed: u64,
        /// Length of the file.
        found: u64,
    },
    /// Reading its headers and notes would take more memory than those of any plugin.
    #[error("is no plugin that can be checked: {0}; a plugin has far fewer, build it again or remove it")]
    Oversized(String),
    /// The file is a library without the note of a plugin.
    #[error("is a library but not a plugin: it carries no HOSTPLUG note, which export_plugin! writes")]
    NoNote,
    /// Its manifest is unusable.
    #[error("carries a manifest that cannot be used: {0}")]
    BadManifest(String),
    /// The file has several plugins, and none of them says that it is built on the others.
    #[error("carries several plugins ({}); the one that links the others must list them in built_on", .0.join(", "))]
    Ambiguous(Vec<String>),
    /// The plugin needs another plugin API.
    #[error(
        "was built for plugin API {found}, this host speaks {host}: build it again with host-plugin-api {needed}"
    )]
    ApiVersion {
        /// The version of the plugin.
        found: semver::Version,
        /// The version of this host.
        host: semver::Version,
        /// The versions that this host accepts.
        needed: String,
    },
    /// The plugin needs a newer host.
    #[error("needs host {needed} or newer, this is {host}: update the host")]
    HostTooOld {
        /// The oldest host, as the manifest says.
        needed: semver::Version,
        /// The version of this host.
        host: semver::Version,
    },
    /// Users that cannot replace this program could replace the file.
    #[error("could be replaced by others: {0}; or accept it with --insecure-plugin-permissions")]
    Permissions(String),
    /// A side-car cannot be used.
    #[error("says nothing of use about a plugin: {0}")]
    BadSideCar(String),
    /// The plugin was built for another C library.
    #[error("was built for {found}, this host is {host}: install the plugin's file for that target")]
    WrongTarget {
        /// The target triple of the plugin.
        found: String,
        /// The target triple of this host.
        host: &'static str,
    },
    /// Linked against a newer C library than this process has.
    #[error(
        "needs glibc {needed} or newer, this machine has {here}: build it where glibc is no newer than {here} (on an older \
         distribution or in its container), or for it with `zig cc` or cargo-zigbuild; or run it on a newer machine"
    )]
    GlibcTooOld {
        /// The oldest glibc that can load the file.
        needed: Glibc,
        /// The glibc of this process.
        here: Glibc,
    },
    /// `plugins.lock` does not list the file.
    #[error("is not listed in {}: add it with `host plugins lock`", .0.display())]
    NotLocked(PathBuf),
    /// `plugins.lock` or a side-car lists another hash.
    #[error("has sha256 {found}, but {} pins {pinned}: restore the file, or lock it again", lock.display())]
    WrongHash {
        /// The lock file or side-car.
        lock: PathBuf,
        /// The hash that it lists.
        pinned: String,
        /// The hash of the file.
        found: String,
    },
    /// The operator demands a signature, and there is none beside the file.
    #[error(
        "is not signed: {} is not there, and only plugins of the publishers in {} are loaded: get the publisher's signature, or sign \
         the file with a key of your own that is listed there", signature.display(), publishers.display()
    )]
    NotSigned {
        /// Path at which the signature was expected.
        signature: PathBuf,
        /// The file of publishers.
        publishers: PathBuf,
    },
    /// The signature beside the file is not valid.
    #[error("has a signature that does not count, {}: {problem}", signature.display())]
    BadSignature {
        /// Path of the signature.
        signature: PathBuf,
        /// The reason.
        problem: String,
    },
    /// The file is signed, but libraries that would be loaded with it are not.
    #[error("is signed, but is loaded with {}, which no signature covers: pin both with `host plugins lock`", .0.join(", "))]
    UnsignedLibraries(Vec<String>),
    /// `plugins.lock` lists other libraries beside the file.
    #[error("is loaded with {what} in {}: restore the library, or lock the plugin again with `host plugins lock`", lock.display())]
    Libraries {
        /// The lock file.
        lock: PathBuf,
        /// The library, and how it differs.
        what: String,
    },
    /// A panic in the plugin would end the process.
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

/// The directories that were searched for a plugin, and the files in them.
#[derive(Debug, Default)]
pub struct NoneFound {
    /// Every directory, in order, with the reason if it could not be read.
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

/// The reasons for which a plugin could not be found, loaded or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PluginError {
    /// No file in any directory has a plugin of this name.
    #[error("no plugin is named {name:?}: {trace}")]
    NotFound {
        /// The name that was searched for.
        name: String,
        /// The directories and files that were searched.
        trace: NoneFound,
    },
    /// The file fails a check. It may have passed at the scan.
    #[error("{} {source}", path.display())]
    Preflight {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: Box<PreflightError>,
    },
    /// This process has loaded the file, and the file was written over since. The loaded code may be a mixture of both versions.
    #[error("{} was written over in place while this process has it loaded: start again, and replace plugins with `host plugins install`", path.display())]
    Overwritten {
        /// The file.
        path: PathBuf,
    },
    /// The file at this path is another one than at the scan.
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
        /// The role that was requested.
        role: &'static str,
        /// The roles that the plugin has.
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
    /// The note names a header that the file does not export.
    #[error("{} does not export {symbol}, which its note names: build it as a cdylib with export_plugin!", path.display())]
    NoHeader {
        /// The file.
        path: PathBuf,
        /// The symbol that was searched for.
        symbol: String,
    },
    /// The types at the boundary differ between the plugin and the host.
    #[error("{} cannot be used: {source}{}", path.display(), header_hint(source))]
    Header {
        /// The file.
        path: PathBuf,
        /// The first difference.
        source: HeaderError,
    },
    /// The tables that a plugin in C exports do not fit the header `host_plugin.h`.
    #[error("{} cannot be used: {problem}", path.display())]
    CTable {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The plugin's code describes another plugin than its note does.
    #[error("{} describes itself as {described}, but its note says {noted}: the file was tampered with or damaged", path.display())]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The plugin as its code describes it.
        described: String,
        /// The plugin as its note describes it.
        noted: String,
    },
    /// The plugin's code exports more or fewer roles than its note declares.
    #[error("{} exports the roles {exported:?}, but its manifest declares {declared:?}: declare what it exports, and no more", path.display())]
    Roles {
        /// The file.
        path: PathBuf,
        /// The roles that the code exports.
        exported: Vec<&'static str>,
        /// The roles that the note declares.
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
    /// The plugin refuses its configuration.
    #[error("plugin {plugin:?} refuses its configuration: {source}")]
    ConfigRefused {
        /// Its name.
        plugin: String,
        /// The plugin's error.
        source: host_plugin_api::Error,
    },
    /// The plugin opened an instance that the host cannot use.
    #[error("plugin {plugin:?} opened, but {problem}: this is a defect of the plugin")]
    NotReady {
        /// Its name.
        plugin: String,
        /// What is wrong with the instance.
        problem: String,
    },
    /// The plugin's factory failed.
    #[error("plugin {plugin:?} ({}) did not open: {source}", path.display())]
    Factory {
        /// Its name.
        plugin: String,
        /// The file.
        path: PathBuf,
        /// The plugin's error.
        source: host_plugin_api::Error,
    },
}

/// A hint for the operator. It is empty if the plugin's own code failed, because that error has a text of its own.
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

    /// Whether the plugin itself says that its configuration is the problem.
    #[must_use]
    pub fn is_about_configuration(&self) -> bool {
        match self {
            Self::ConfigRefused { .. } => true,
            Self::Factory { source, .. } => source.code == ErrorCode::CONFIG,
            _ => false,
        }
    }

    /// Whether the same configuration may work later: the plugin waited in vain for something outside of this process.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Factory { source, .. } if source.code == ErrorCode::TIMEOUT)
    }
}

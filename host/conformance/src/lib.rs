//! The conformance kit: named cases that check whether a plugin keeps its contract.
//!
//! Each case runs in a process of its own with a time limit, so that a plugin that crashes or hangs ends only that case.
//! [`test_file`] starts these processes, and each of them calls [`run_case`].
//!
//! A case that cannot be checked on a plugin is skipped with the reason, never passed.

mod allocations;
mod allocator;
mod any_plugin;
mod bytes;
mod child;
mod event_fd;
mod hot;
mod instance;
pub mod measure;
mod observe;
mod opening;
mod persistence;
mod promises;
mod random;
mod refusals;
mod tier;
mod tier_contract;
mod tier_crash;
mod tier_descriptors;
mod tier_hot;
mod tier_keys;
mod tier_lengths;
mod tier_read_only;
mod tier_settled;
mod tier_whole;
mod tier_world;
mod transfer;
mod transfer_bounds;
mod transfer_cancel;
mod transfer_connections;
mod transfer_contract;
mod transfer_fence;
mod transfer_hot;
mod transfer_large;
mod transfer_notifications;
mod transfer_pair;
mod transfer_processes;
mod verdict;
mod wording;

use std::path::Path;

use serde::Serialize;

pub use child::{Limits, OneCase, limit_this_process, run_case, test_file};

use host_plugins::{Entry, Manifest};

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The plugin keeps its contract.
    Pass,
    /// The plugin breaks its contract.
    Fail,
    /// The process died.
    Crash,
    /// The process did not end in time.
    Timeout,
    /// The case could not be checked.
    Skip,
}

/// A case's outcome.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The case.
    pub case: &'static str,
    /// How it ended.
    pub status: Status,
    /// What happened, as a sentence. For a passed case, what it checks.
    pub text: String,
}

/// The plugin that is tested, and the settings for its instances.
struct Subject {
    entry: Entry,
    /// TOML for the plugin's instances.
    config: String,
    /// Whether the operator gave a configuration.
    configured: bool,
    /// Part of this run's keys. It separates them from those of other runs, which a persistent tier may hold. Both processes of a
    /// case have the same.
    run: [u8; 8],
}

impl Subject {
    fn manifest(&self) -> &Manifest {
        &self.entry.manifest
    }

    /// Whether the role declares the capability.
    fn declares(&self, role: &str, capability: &str) -> bool {
        self.manifest().role(role).is_some_and(|role| role.capabilities.iter().any(|c| c == capability))
    }
}

/// Beginning of the text of a case that was skipped because the plugin does not open without a configuration.
pub const UNCONFIGURED: &str = "not tested without a configuration";

/// The reason for which a case did not pass.
#[derive(Debug)]
enum Stop {
    /// The plugin breaks its contract.
    Fail(String),
    /// The case could not be checked.
    Skip(String),
}

impl From<String> for Stop {
    fn from(text: String) -> Self {
        Stop::Fail(text)
    }
}

type Outcome = Result<(), Stop>;

/// Fails the case with a sentence unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::Stop::Fail(format!($($text)+)));
        }
    };
}
use ensure;

/// A case of the kit.
pub struct Case {
    /// Its name on the command line.
    pub name: &'static str,
    /// The role that it checks, or `None` if it checks any plugin.
    pub role: Option<&'static str>,
    /// The capability that the role must declare for the case to apply, or `None` if it always applies.
    pub capability: Option<&'static str>,
    /// What must hold.
    pub about: &'static str,
    run: fn(&Subject) -> Outcome,
}

/// All cases, in the order in which they run.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    let all = [
        any_plugin::CASES,
        opening::CASES,
        transfer::CASES,
        transfer_contract::CASES,
        transfer_large::CASES,
        transfer_connections::CASES,
        transfer_fence::CASES,
        transfer_notifications::CASES,
        transfer_hot::CASES,
        transfer_processes::CASES,
        tier::CASES,
        tier_contract::CASES,
        tier_lengths::CASES,
        tier_settled::CASES,
        tier_keys::CASES,
        tier_descriptors::CASES,
        tier_read_only::CASES,
        tier_whole::CASES,
        tier_hot::CASES,
        event_fd::CASES,
        persistence::CASES,
        tier_crash::CASES,
        refusals::CASES,
        promises::CASES,
        allocator::CASES,
    ];
    all.into_iter().flatten()
}

fn subject(file: &Path, config: &str, run: u64) -> Result<Subject, Stop> {
    let entry = Entry::of_file(file).map_err(|error| Stop::Fail(format!("the file {error}")))?;
    let configured = !config.trim().is_empty();
    Ok(Subject { entry, config: config.to_owned(), configured, run: run.to_le_bytes() })
}

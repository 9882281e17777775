//! Finds the kind of change between two dumps, and the version that it requires.

use std::collections::BTreeSet;
use std::fmt;

/// Major, minor, patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u64, pub u64, pub u64);

impl Version {
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().splitn(3, '.').map(str::parse);
        Some(Self(parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// The version that a dump was made at.
pub fn version(dump: &str) -> Option<Version> {
    Version::parse(dump.lines().find_map(|line| line.strip_prefix("api "))?)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Only the version changed.
    None,
    /// All earlier lines are unchanged, and lines were added.
    Additive,
    Breaking,
}

impl Change {
    /// The heading in `docs/plugins/compatibility.md`.
    pub fn list(self) -> &'static str {
        match self {
            Self::None => "Need not bump",
            Self::Additive => "Additive",
            Self::Breaking => "Must bump",
        }
    }
}

/// The lowest version that may follow `before` after this kind of change.
pub fn needed(before: Version, change: Change) -> Version {
    let Version(major, minor, patch) = before;
    match (change, major) {
        (Change::None, _) => before,
        (Change::Additive, 0) => Version(0, minor, patch + 1),
        (Change::Breaking, 0) => Version(0, minor + 1, 0),
        (Change::Additive, _) => Version(major, minor + 1, 0),
        (Change::Breaking, _) => Version(major + 1, 0, 0),
    }
}

/// Removed lines and added lines, each with the type that it belongs to.
pub struct Difference {
    gone: Vec<String>,
    new: Vec<String>,
}

impl Difference {
    pub fn kind(&self) -> Change {
        match (self.gone.is_empty(), self.new.is_empty()) {
            (true, true) => Change::None,
            (true, false) => Change::Additive,
            (false, _) => Change::Breaking,
        }
    }

    pub fn lines(&self) -> String {
        let gone = self.gone.iter().map(|line| format!("- {line}\n"));
        gone.chain(self.new.iter().map(|line| format!("+ {line}\n"))).collect()
    }
}

pub fn change(before: &str, now: &str) -> Difference {
    let (before, now) = (placed(before), placed(now));
    Difference {
        gone: before.difference(&now).cloned().collect(),
        new: now.difference(&before).cloned().collect(),
    }
}

/// All lines with content, each prefixed with the heading of its type.
fn placed(dump: &str) -> BTreeSet<String> {
    let mut heading = "";
    let says = |line: &&str| !line.is_empty() && !line.starts_with(['#']) && !line.starts_with("api ");
    let lines = dump.lines().filter(says).map(|line| {
        if line.starts_with(' ') {
            return format!("{} {line}", heading.split(" size ").next().unwrap_or_default());
        }
        heading = line;
        line.to_owned()
    });
    lines.collect()
}

//! What the log says of a plugin that breaks its contract: which method of which plugin, numbers, and what the host does next.

use std::collections::BTreeMap;
use std::fmt;

use host_plugin_api::{Error, ErrorCode};

/// A call after which nothing is known any more of what the plugin was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    /// The method's name in the plugin API.
    pub method: &'static str,
    /// What it answered.
    pub code: ErrorCode,
}

impl Failed {
    /// The failure in a sentence. Hot methods answer numbers. After a panic, `asked` is what a method with a text answers, and
    /// that repeats the text of the first panic.
    pub(crate) fn told(&self, asked: impl FnOnce() -> Option<Error>) -> String {
        let text = match self.code {
            ErrorCode::PANICKED => asked().filter(|error| error.code == ErrorCode::PANICKED),
            _ => None,
        };
        let Self { method, code } = self;
        // A panic's text may have several lines, and this is one.
        let line = |error: Error| error.message.split_whitespace().collect::<Vec<_>>().join(" ");
        let why = text.map(|error| format!(" ({})", line(error))).unwrap_or_default();
        format!("{method} answered {}{why}", Code(code.0))
    }
}

/// A code with its name.
pub(crate) struct Code(pub i32);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", ErrorCode(self.0).name(), self.0)
    }
}

/// Lines about one plugin. The first of a kind is written, then the second, the fourth and so on: a plugin that is wrong once is
/// wrong often.
#[derive(Debug, Default)]
pub(crate) struct Complaints(BTreeMap<&'static str, u64>);

impl Complaints {
    /// Writes a line, unless there were so many of its kind that this one is left out.
    pub(crate) fn tell(&mut self, kind: &'static str, line: impl FnOnce() -> String) {
        let count = self.0.entry(kind).or_default();
        *count += 1;
        match *count {
            1 => tracing::warn!("{}", line()),
            count if count.is_power_of_two() => tracing::warn!("{} ({count} times so far)", line()),
            _ => {}
        }
    }
}

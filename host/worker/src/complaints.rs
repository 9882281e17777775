//! Log lines about a plugin that breaks its contract. They name the plugin, its method and the numbers, and say what
//! the host does next.

use std::collections::BTreeMap;
use std::fmt;

use host_plugin_api::{Error, ErrorCode};

/// A failed call of a plugin. The state of everything that the plugin was given is unknown after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    /// The method's name in the plugin API.
    pub method: &'static str,
    /// The code that it answered.
    pub code: ErrorCode,
}

impl Failed {
    /// The failure in a sentence. Methods on the hot path return numbers only. After a panic, `asked` calls a method
    /// that returns a text. It repeats the text of the first panic.
    pub(crate) fn told(&self, asked: impl FnOnce() -> Option<Error>) -> String {
        let text = match self.code {
            ErrorCode::PANICKED => asked().filter(|error| error.code == ErrorCode::PANICKED),
            _ => None,
        };
        let Self { method, code } = self;
        // The text of a panic may have several lines. They become one line here.
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

/// Lines about one plugin. The first of a kind is written, then the second, the fourth and so on, because a plugin that
/// is wrong once tends to be wrong often.
#[derive(Debug, Default)]
pub(crate) struct Complaints(BTreeMap<&'static str, u64>);

impl Complaints {
    /// Counts a line of this kind. Writes it if the count is a power of two.
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

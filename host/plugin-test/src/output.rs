//! Standard output of commands, which may be closed before they end: `host plugins rules | head`.

use std::borrow::Cow;
use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

use serde::Serialize;

/// The reader of standard output has closed it. This is no mistake: the program ends, quietly and successfully.
#[derive(Debug, thiserror::Error)]
#[error("standard output is closed")]
pub struct OutputClosed;

/// Writes one line. Line feeds in the text are escaped: what comes from files and plugins must not look like another line.
///
/// # Errors
/// [`OutputClosed`], or the system's error.
pub fn line(text: Arguments<'_>) -> anyhow::Result<()> {
    write_out(&harmless(&text.to_string()).replace('\n', "\\n"))
}

/// Writes a JSON document for people and programs, on several lines.
///
/// # Errors
/// As [`line`].
pub fn json(document: &impl Serialize) -> anyhow::Result<()> {
    write_out(&harmless(&serde_json::to_string_pretty(document)?))
}

fn write_out(text: &str) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    match writeln!(output, "{text}") {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        Err(error) => Err(anyhow::Error::new(error).context("the output cannot be written")),
    }
}

/// Text with control characters escaped. Much of what is printed comes from files and must not command the terminal.
pub fn harmless(text: &str) -> Cow<'_, str> {
    let commands = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(commands) {
        return text.into();
    }
    let shown = |c: char| if commands(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect::<String>().into()
}

/// `println!` for commands: a closed output ends the command instead of panicking.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {
        $crate::output::line(format_args!($($text)*))?
    };
}

//! Standard output of the commands, which may end before we do: `host plugins rules | head`.

use std::borrow::Cow;
use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// Whoever read our output has stopped. No mistake: the program ends, quietly and successfully.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads the output any more")]
pub struct NobodyReads;

/// Writes one line.
///
/// # Errors
/// [`NobodyReads`], or what the system says.
pub fn line(text: Arguments<'_>) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    match writeln!(output, "{}", harmless(&text.to_string())) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(NobodyReads.into()),
        Err(error) => Err(anyhow::Error::new(error).context("the output cannot be written")),
    }
}

/// Text with what commands a terminal shown by its code: much of what is printed is what a file says of itself.
pub fn harmless(text: &str) -> Cow<'_, str> {
    let commands = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(commands) {
        return text.into();
    }
    let shown = |c: char| if commands(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect::<String>().into()
}

/// `println!` for commands: an output that nobody reads ends the command instead of panicking.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::cli::output::line(format_args!($($text)*))?
    };
}
pub(crate) use say;

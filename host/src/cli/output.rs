//! Standard output of the commands, which may end before we do: `host plugins rules | head`.

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
    match output.write_fmt(text).and_then(|()| output.write_all(b"\n")) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(NobodyReads.into()),
        Err(error) => Err(anyhow::Error::new(error).context("the output cannot be written")),
    }
}

/// `println!` for commands: an output that nobody reads ends the command instead of panicking.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::cli::output::line(format_args!($($text)*))?
    };
}
pub(crate) use say;

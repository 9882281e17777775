//! Standard output of commands, which may be closed before they end: `host plugins rules | head`.

use std::borrow::Cow;
use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

use serde::Serialize;

/// The reader has closed standard output. That is no error: the program ends silently and successfully.
#[derive(Debug, thiserror::Error)]
#[error("standard output is closed")]
pub struct OutputClosed;

/// Writes one line. Escapes line feeds and characters that change the direction of text: a text from a file or a plugin must not
/// look like another line, nor appear in another order than it has.
///
/// # Errors
/// [`OutputClosed`], or the system's error.
pub fn line(text: Arguments<'_>) -> anyhow::Result<()> {
    write_out(&shown(&text.to_string()))
}

/// Writes a JSON document for people and programs, on several lines.
///
/// # Errors
/// As [`line`].
pub fn json(document: &impl Serialize) -> anyhow::Result<()> {
    write_out(&shown_json(&serde_json::to_string_pretty(document)?))
}

fn write_out(text: &str) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    match writeln!(output, "{text}") {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        Err(error) => Err(anyhow::Error::new(error).context("the output cannot be written")),
    }
}

/// Escapes control characters. Much of the printed text comes from files and must not control the terminal.
pub fn harmless(text: &str) -> Cow<'_, str> {
    escaped(text, commands, |c| c.escape_default().to_string())
}

/// As [`harmless`], and also escapes line feeds and characters that change the direction of text.
fn shown(text: &str) -> Cow<'_, str> {
    escaped(text, |c| commands(c) || turns(c) || c == '\n', |c| c.escape_default().to_string())
}

/// As [`harmless`], and also escapes characters that change the direction of text. Uses JSON's form: only strings have such
/// characters.
fn shown_json(document: &str) -> Cow<'_, str> {
    escaped(document, |c| commands(c) || turns(c), |c| format!("\\u{:04x}", u32::from(c)))
}

fn escaped(text: &str, which: impl Fn(char) -> bool, escape: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.contains(&which) {
        return text.into();
    }
    text.chars().map(|c| if which(c) { escape(c) } else { c.to_string() }).collect::<String>().into()
}

/// Whether a terminal acts on this character.
fn commands(c: char) -> bool {
    c.is_control() && c != '\n' && c != '\t'
}

/// Whether the character changes the direction in which text appears. Answers in right-to-left languages may have such characters.
fn turns(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// `println!` for commands: a closed output ends the command instead of panicking.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {
        $crate::output::line(format_args!($($text)*))?
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts: a name, a terminal command, the same in one byte, a line like ours, and a text that appears backwards.
    const EVIL: &str = "libx.so\u{1b}[2J\u{9b}2J\r\nverdict    usable\u{202e}elbasu";

    #[test]
    fn a_text_of_a_file_commands_no_terminal_and_shows_on_one_line_as_it_is() {
        let line = "libx.so\\u{1b}[2J\\u{9b}2J\\r\\nverdict    usable\\u{202e}elbasu";
        assert_eq!(shown(EVIL), line);
        let lines = "libx.so\\u{1b}[2J\\u{9b}2J\\r\nverdict    usable\u{202e}elbasu";
        assert_eq!(harmless(EVIL), lines);
        assert!(matches!(shown("\u{e9}, \u{6f22}\tand"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_document_stays_one_and_says_the_same() {
        let document = serde_json::to_string_pretty(&serde_json::json!({ "needed": [EVIL] })).unwrap();
        let shown = shown_json(&document);
        assert!(!shown.contains(|c| commands(c) || turns(c)), "{shown}");
        let read: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(read["needed"][0], EVIL);
    }
}

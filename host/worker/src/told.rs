//! Messages to operators, for tests: the log's lines, and the page that quotes them.

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// The page that quotes messages.
const PAGE: &str = include_str!("../../../docs/plugins/debugging.md");

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

fn log() -> MutexGuard<'static, Vec<u8>> {
    LOG.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Writer;

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        log().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps the log's lines from now on, of all threads of this process.
pub fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let lines =
            tracing_subscriber::fmt().with_ansi(false).without_time().with_target(false).with_level(false);
        tracing::subscriber::set_global_default(lines.with_writer(|| Writer).finish()).unwrap();
    });
}

/// The lines about this plugin. Each test uses a plugin name of its own.
pub fn lines(plugin: &str) -> Vec<String> {
    let log = String::from_utf8_lossy(&log()).into_owned();
    let of = format!("plugin {plugin:?}");
    let lines = log.lines().map(|line| line.trim()).filter(|line| line.starts_with(&of));
    lines.map(|line| without_count(line).to_owned()).collect()
}

/// A line without the number of its repeats.
fn without_count(line: &str) -> &str {
    let counted = line.strip_suffix(" times so far)").and_then(|line| line.rsplit_once(" ("));
    counted.map_or(line, |(line, _count)| line)
}

/// The messages that the page quotes under a heading: the first column of its table, with `..` for the parts that differ.
fn quoted(heading: &str) -> Vec<String> {
    let section =
        PAGE.split(&format!("\n{heading}\n")).nth(1).unwrap_or_else(|| panic!("no {heading} on the page"));
    let section = section.split("\n#").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| row.trim_start_matches("| ").split('`').find(|cell| cell.len() > 1).unwrap().to_owned())
        .collect()
}

/// Whether a line matches a quoted message.
fn is(line: &str, quoted: &str) -> bool {
    let mut parts = quoted.split("..");
    let Some(mut rest) = line.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let parts: Vec<&str> = parts.collect();
    for (place, part) in parts.iter().enumerate() {
        let last = place + 1 == parts.len();
        let at = if last { rest.ends_with(part).then(|| rest.len() - part.len()) } else { rest.find(part) };
        let Some(at) = at else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

/// Checks that the page quotes every line, and that every message which it quotes was told.
pub fn compare(heading: &str, told: &[String]) {
    let quoted = quoted(heading);
    assert!(!quoted.is_empty(), "the page quotes nothing under {heading}");
    for line in told {
        assert!(
            quoted.iter().any(|quoted| is(line, quoted)),
            "under {heading}, the page does not quote: {line}"
        );
    }
    for message in &quoted {
        let is_told = told.iter().any(|line| is(line, message));
        assert!(
            is_told,
            "nothing told what the page quotes under {heading}: {message}\n\n{}",
            told.join("\n")
        );
    }
}

#[test]
fn a_quoted_message_fits_the_whole_line() {
    for (line, quoted, fits) in [
        ("poll of 7 pages", "poll of .. pages", true),
        ("poll of 7 pages", "poll of ..", true),
        ("poll of 7 pages now", "poll of .. pages", false),
        ("a poll of 7 pages", "poll of .. pages", false),
        ("poll", "poll", true),
        ("polls", "poll", false),
        ("a: b; c", "a: ..; ..", true),
    ] {
        assert_eq!(is(line, quoted), fits, "{line} {quoted}");
    }
}

//! Lines that another program prints, as they come.

use std::cell::RefCell;
use std::io::{BufRead as _, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use crate::wait::PATIENCE;

/// The lines of a pipe. A thread reads them, so that a wait for a line has a limit.
pub struct Lines {
    received: Receiver<String>,
    /// All lines that were looked at.
    seen: RefCell<Vec<String>>,
}

/// Why there is no such line, with all lines that there were.
#[derive(Debug)]
pub struct Missing(String);

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Lines {
    /// Starts a thread that reads until the pipe ends.
    #[must_use]
    pub fn of(pipe: impl Read + Send + 'static) -> Self {
        let (sender, received) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                // The thread reads on after the test has gone, because the program must not find its pipe full.
                let _gone = sender.send(line).is_err();
            }
        });
        Self { received, seen: RefCell::default() }
    }

    /// Waits for the first line from which `found` makes a value.
    ///
    /// # Errors
    /// When the pipe ends before, or [`PATIENCE`] is over.
    pub fn find<T>(&self, what: &str, mut found: impl FnMut(&str) -> Option<T>) -> Result<T, Missing> {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = match self.received.recv_timeout(left) {
                Ok(line) if !left.is_zero() => line,
                Err(RecvTimeoutError::Disconnected) => return Err(self.missing("the output ended", what)),
                Ok(_) | Err(RecvTimeoutError::Timeout) => {
                    return Err(self.missing(&format!("{PATIENCE:?} went by"), what));
                }
            };
            let answer = found(&line);
            self.seen.borrow_mut().push(line);
            if let Some(answer) = answer {
                return Ok(answer);
            }
        }
    }

    fn missing(&self, why: &str, what: &str) -> Missing {
        Missing(format!("{why} before {what} came; lines so far:\n{}", self.seen.borrow().join("\n")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_looked_through_in_order_and_their_end_is_told() {
        let lines = Lines::of(&b"one\ntwo: 2\ntwo: 3\n"[..]);
        let number = |line: &str| line.strip_prefix("two: ").map(str::to_owned);
        assert_eq!(lines.find("a two", number).unwrap(), "2");
        assert_eq!(lines.find("a two", number).unwrap(), "3");
        let missing = lines.find("a two", number).unwrap_err().to_string();
        assert_eq!(missing, "the output ended before a two came; lines so far:\none\ntwo: 2\ntwo: 3");
    }
}

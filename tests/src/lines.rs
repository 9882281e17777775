//! Lines that another program prints, as they come.

use std::io::{BufRead as _, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use crate::wait::PATIENCE;

/// The lines of a pipe. A thread reads them, so that a wait for a line has a limit.
pub struct Lines {
    received: Receiver<String>,
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
        Self { received }
    }

    /// Waits for the first line from which `found` makes a value. `None` when the pipe ends before.
    ///
    /// # Panics
    /// When no line comes for as long as [`PATIENCE`].
    pub fn find<T>(&self, what: &str, mut found: impl FnMut(&str) -> Option<T>) -> Option<T> {
        loop {
            match self.received.recv_timeout(PATIENCE) {
                Ok(line) => {
                    if let Some(answer) = found(&line) {
                        return Some(answer);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => panic!("no line for {PATIENCE:?}, waiting for {what}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_looked_through_in_order_and_their_end_is_told() {
        let lines = Lines::of(&b"one\ntwo: 2\ntwo: 3\n"[..]);
        let number = |line: &str| line.strip_prefix("two: ").map(str::to_owned);
        assert_eq!(lines.find("two", number).as_deref(), Some("2"));
        assert_eq!(lines.find("two", number).as_deref(), Some("3"));
        assert_eq!(lines.find("two", number), None);
    }
}

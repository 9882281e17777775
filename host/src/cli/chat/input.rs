//! Lines of standard input.

use std::io::{BufRead as _, Read as _};

use tokio::sync::mpsc;

/// Longest line, in bytes.
const LONGEST: u64 = 1 << 20;

/// Standard input, read by a thread of its own, because a blocked read cannot be cancelled.
pub struct Input {
    lines: mpsc::Receiver<std::io::Result<String>>,
}

impl Input {
    /// Begins to read. The thread ends with the input, or with the process.
    pub fn read() -> Self {
        let (sender, lines) = mpsc::channel(1);
        std::thread::spawn(move || {
            loop {
                let mut line = Vec::new();
                let read = std::io::stdin().lock().take(LONGEST).read_until(b'\n', &mut line);
                let next = match read {
                    Ok(0) => return,
                    Ok(count) if count as u64 == LONGEST && !line.ends_with(b"\n") => {
                        Err(std::io::Error::other(format!("a line of more than {} KiB", LONGEST >> 10)))
                    }
                    Ok(_) => Ok(String::from_utf8_lossy(&line).into_owned()),
                    Err(error) => Err(error),
                };
                let failed = next.is_err();
                if sender.blocking_send(next).is_err() || failed {
                    return;
                }
            }
        });
        Self { lines }
    }

    /// The next line, or `None` at the end.
    ///
    /// # Errors
    /// When standard input cannot be read, or a line is too long.
    pub async fn line(&mut self) -> anyhow::Result<Option<String>> {
        let line = self.lines.recv().await.transpose();
        line.map_err(|error| anyhow::Error::new(error).context("standard input cannot be read"))
    }
}

//! All requests of a file, some at a time.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::input::{Input, Line};
use super::output::{Earlier, Output};
use super::request::{self, Outcome};
use crate::cli::server::Client;

/// Interval between two updates of the progress: at a terminal, and elsewhere.
const SHOWN_EVERY: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];

/// A job: where and how its requests are sent.
pub struct Job {
    pub client: Client,
    /// Requests under way at once. So many bodies and answers are in memory.
    pub concurrency: usize,
    /// Priority of requests that have none.
    pub priority: i32,
    /// How long a request is repeated after its first failure.
    pub retry_timeout: Duration,
}

impl Job {
    /// Sends the requests that have no answer yet.
    ///
    /// # Errors
    /// When the server cannot be used, an answer cannot be written, or some answers are no success.
    pub async fn run(self, input: &Input, mut output: Output, earlier: Earlier) -> anyhow::Result<()> {
        let Earlier { answered, failed } = earlier;
        if answered.len() < input.len() {
            // A wrong address or key is reported at once. If the server goes away later, the requests are repeated.
            request::probe(&self.client).await.map_err(anyhow::Error::msg)?;
        }
        let mut progress = Progress::new(input.len(), answered.len(), failed);
        let client = Arc::new(self.client);
        let mut left =
            input.lines()?.filter(|line| !line.as_ref().is_ok_and(|line| answered.contains(&line.custom_id)));
        let mut under_way = JoinSet::new();
        loop {
            while under_way.len() < self.concurrency
                && let Some(line) = left.next()
            {
                let mut line = line?;
                prioritize(&mut line, self.priority);
                under_way.spawn(request::send(Arc::clone(&client), line, self.retry_timeout));
            }
            let Some(done) = under_way.join_next().await else { break };
            match done.context("a request failed")? {
                Outcome::Line(line, is_success) => {
                    output.append(&line)?;
                    progress.done(is_success);
                }
                Outcome::Stop(why) => {
                    progress.end();
                    let (done, all) = (progress.done, progress.all);
                    anyhow::bail!("{why}; {done} of {all} requests are done. Run the command again to go on");
                }
            }
        }
        progress.end();
        output.finish()?;
        match progress.failed {
            0 => Ok(()),
            failed => anyhow::bail!(
                "{failed} of {} requests failed: their lines have response.status_code or error. Those without a response are sent \
                 again when the command is run again",
                progress.all
            ),
        }
    }
}

/// Sets the priority of a request that has none.
fn prioritize(line: &mut Line, priority: i32) {
    if line.body.get("priority").is_none_or(Value::is_null) {
        line.body.insert("priority".to_owned(), json!(priority));
    }
}

/// The progress of a job, shown on standard error.
struct Progress {
    all: usize,
    done: usize,
    failed: usize,
    shown: Instant,
    at_terminal: bool,
}

impl Progress {
    fn new(all: usize, done: usize, failed: usize) -> Self {
        let at_terminal = std::io::stderr().is_terminal();
        let progress = Self { all, done, failed, shown: Instant::now(), at_terminal };
        progress.show();
        progress
    }

    fn done(&mut self, is_success: bool) {
        self.done += 1;
        self.failed += usize::from(!is_success);
        let [often, seldom] = SHOWN_EVERY;
        if self.shown.elapsed() >= if self.at_terminal { often } else { seldom } {
            self.shown = Instant::now();
            self.show();
        }
    }

    /// Shows the final progress.
    fn end(&self) {
        self.show();
        if self.at_terminal {
            write("\n");
        }
    }

    fn show(&self) {
        let text = format!("{} of {} requests done, {} failed", self.done, self.all, self.failed);
        write(&if self.at_terminal { format!("\r{text}") } else { format!("{text}\n") });
    }
}

fn write(text: &str) {
    // A failure is ignored: the job goes on when standard error is closed.
    let _unread = std::io::stderr().lock().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_keeps_the_priority_that_it_has() {
        for (body, priority) in
            [(json!({}), 100), (json!({"priority": null}), 100), (json!({"priority": -3}), -3)]
        {
            let Value::Object(body) = body else { unreachable!() };
            let mut line = Line { custom_id: "a".to_owned(), endpoint: "/v1/completions", body };
            prioritize(&mut line, 100);
            assert_eq!(line.body["priority"], json!(priority));
        }
    }
}

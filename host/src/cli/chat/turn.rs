//! One turn of a conversation: requests an answer, prints it as it comes, and measures it.

use std::fmt;
use std::io::{ErrorKind, Write as _};

use serde_json::Value;
use tokio::time::{Duration, Instant};

use crate::cli::output::{OutputClosed, harmless};
use crate::cli::server::{Client, Events, NoAnswer, message_in};

/// Limit of one answer, in bytes.
const LONGEST: usize = 16 << 20;

/// How an answer ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// The answer is complete.
    Whole,
    /// The user stopped it.
    Stopped,
    /// It failed. The text says why, on one line.
    Failed(String),
}

/// One answer.
#[derive(Debug)]
pub struct Turn {
    /// The text of the answer, up to its end or the failure.
    pub text: String,
    /// How it ended.
    pub end: End,
    /// Tokens and times, if the server gave them.
    pub figures: Option<Figures>,
}

/// Tokens and times of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// Tokens of the answer.
    pub tokens: u64,
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Tokens of the prompt whose KV was cached.
    pub cached: u64,
    /// From the question to the first piece of text.
    pub first: Option<Duration>,
    /// From the first piece of text to the last.
    pub rest: Duration,
}

impl Figures {
    /// Tokens per second after the first token. `None` without a second token or a measurable time.
    fn speed(&self) -> Option<f64> {
        let seconds = self.rest.as_secs_f64();
        // The conversion is exact: counts of tokens are far less than 2^53.
        (self.tokens > 1 && seconds > 0.0).then(|| (self.tokens - 1) as f64 / seconds)
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{} tokens", self.tokens)?;
        if let Some(speed) = self.speed() {
            write!(f, ", {speed:.1} tokens/s")?;
        }
        if let Some(first) = self.first {
            write!(f, ", first after {:.2} s", first.as_secs_f64())?;
        }
        write!(f, ", {} of {} prompt tokens cached]", self.cached, self.prompt)
    }
}

/// Sends a request and prints the answer, until the answer ends or `stop` resolves.
///
/// # Errors
/// [`OutputClosed`] when standard output is closed. Failures of the server are in the turn's [`End`].
pub async fn take(client: &Client, request: &Value, stop: impl Future<Output = ()>) -> anyhow::Result<Turn> {
    let mut reading = Reading::new();
    let ended = tokio::select! {
        ended = reading.run(client, request) => Some(ended),
        () = stop => None,
    };
    if reading.printed {
        print("\n")?;
    }
    let end = match ended {
        None => End::Stopped,
        Some(Ok(())) => End::Whole,
        Some(Err(Stop::Failed(why))) => End::Failed(why),
        Some(Err(Stop::Output(error))) => return Err(error),
    };
    let figures = reading.figures();
    Ok(Turn { text: reading.text, end, figures })
}

enum Stop {
    Failed(String),
    Output(anyhow::Error),
}

impl From<NoAnswer> for Stop {
    fn from(why: NoAnswer) -> Self {
        Self::Failed(why.to_string())
    }
}

impl From<String> for Stop {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// An answer under way.
struct Reading {
    begun: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    text: String,
    usage: Value,
    printed: bool,
}

impl Reading {
    fn new() -> Self {
        let (first, last) = (None, None);
        let (text, usage) = (String::new(), Value::Null);
        Self { begun: Instant::now(), first, last, text, usage, printed: false }
    }

    async fn run(&mut self, client: &Client, request: &Value) -> Result<(), Stop> {
        let mut answer = client.post("/v1/chat/completions", request).await?;
        if !answer.status.is_success() {
            return Err(answer.error().await.into());
        }
        let mut events = Events::default();
        let away = || "the server went away before the answer's end".to_owned();
        loop {
            let bytes = answer.next().await.map_err(|error| format!("{}: {error}", away()))?;
            let Some(bytes) = bytes else { return Err(away().into()) };
            for data in events.push(&bytes)? {
                if data == "[DONE]" {
                    return Ok(());
                }
                self.event(&data)?;
            }
        }
    }

    fn event(&mut self, data: &str) -> Result<(), Stop> {
        let event: Value = serde_json::from_str(data)
            .map_err(|error| format!("the server sent an event that is no JSON: {error}"))?;
        if !event["error"].is_null() {
            return Err(message_in(data).into());
        }
        if event["usage"].is_object() {
            self.usage = event["usage"].clone();
        }
        let piece = event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        if piece.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
        if self.text.len() + piece.len() > LONGEST {
            return Err(format!("the answer is longer than {} MiB", LONGEST >> 20).into());
        }
        self.text.push_str(piece);
        self.printed = true;
        print(piece).map_err(Stop::Output)
    }

    fn figures(&self) -> Option<Figures> {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let tokens = self.usage["completion_tokens"].as_u64()?;
        let rest = self.first.zip(self.last).map_or(Duration::ZERO, |(first, last)| last - first);
        Some(Figures {
            tokens,
            prompt: number(&self.usage["prompt_tokens"]),
            cached: number(&self.usage["prompt_tokens_details"]["cached_tokens"]),
            first: self.first.map(|first| first - self.begun),
            rest,
        })
    }
}

/// Prints a piece of the answer and flushes it.
fn print(text: &str) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    match write!(output, "{}", harmless(text)).and_then(|()| output.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        Err(error) => Err(anyhow::Error::new(error).context("the answer cannot be written")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_say_what_is_known() {
        let mut figures = Figures {
            tokens: 11,
            prompt: 40,
            cached: 32,
            first: Some(Duration::from_millis(120)),
            rest: Duration::from_millis(500),
        };
        assert_eq!(
            figures.to_string(),
            "[11 tokens, 20.0 tokens/s, first after 0.12 s, 32 of 40 prompt tokens cached]"
        );
        (figures.tokens, figures.first, figures.rest) = (0, None, Duration::ZERO);
        assert_eq!(figures.to_string(), "[0 tokens, 32 of 40 prompt tokens cached]");
    }
}

//! One request whose answer is read event by event, as a client sees it.

use std::io::{BufRead, BufReader, Lines};
use std::time::Instant;

use serde_json::{Value, json};

use crate::cluster::agent;

/// A streamed answer, on a connection of its own. Dropping it hangs up.
pub struct Events {
    lines: Lines<BufReader<ureq::BodyReader<'static>>>,
    ended: bool,
}

/// Why there are no more events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The server says that there is no answer: the status and the body.
    Refused(String),
    /// There is no connection, or it ended before the answer did.
    Broken(String),
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Refused(why) => write!(f, "refused: {why}"),
            Ended::Broken(why) => write!(f, "the connection broke: {why}"),
        }
    }
}

fn broken(error: &impl std::fmt::Display) -> Ended {
    Ended::Broken(error.to_string())
}

/// Sends a request on a connection of its own and reads the head of its answer.
fn post(url: &str, request: &Value) -> Result<ureq::http::Response<ureq::Body>, Ended> {
    let mut answer = agent()
        .post(url)
        .header("content-type", "application/json")
        .header("connection", "close")
        .send(request.to_string())
        .map_err(|error| broken(&error))?;
    if answer.status() != 200 {
        let text = answer.body_mut().read_to_string().map_err(|error| broken(&error))?;
        return Err(Ended::Refused(format!("{} {text}", answer.status())));
    }
    Ok(answer)
}

/// Sends a request to a URL and reads the whole answer.
///
/// # Errors
/// Why there is no answer.
pub fn whole(url: &str, request: &Value) -> Result<Value, Ended> {
    let mut answer = post(url, request)?;
    let text = answer.body_mut().read_to_string().map_err(|error| broken(&error))?;
    serde_json::from_str(&text).map_err(|error| Ended::Broken(format!("half an answer: {error}")))
}

impl Events {
    /// Sends a request to a URL and reads the head of its answer.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn of(url: &str, request: &Value) -> Result<Self, Ended> {
        let answer = post(url, request)?;
        Ok(Self { lines: BufReader::new(answer.into_body().into_reader()).lines(), ended: false })
    }

    fn read(&mut self) -> Result<Option<Value>, Ended> {
        for line in self.lines.by_ref() {
            let line = line.map_err(|error| broken(&error))?;
            let Some(event) = line.strip_prefix("data: ") else { continue };
            if event == "[DONE]" {
                return Ok(None);
            }
            let event = serde_json::from_str(event);
            return event.map(Some).map_err(|error| Ended::Broken(format!("half an event: {error}")));
        }
        Err(Ended::Broken("the stream ended before [DONE]".to_owned()))
    }
}

/// Events up to `[DONE]`, or up to an error. What the server sends as an error is an event, and the last one.
impl Iterator for Events {
    type Item = Result<Value, Ended>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let event = self.read();
        self.ended = !matches!(&event, Ok(Some(event)) if !event["error"].is_object());
        event.transpose()
    }
}

/// The token ids of an answer, or of an event of it.
#[must_use]
pub fn tokens(answer: &Value) -> Vec<u32> {
    let tokens = answer["output_ids"].as_array().into_iter().flatten();
    tokens.filter_map(|token| u32::try_from(token.as_u64()?).ok()).collect()
}

/// The tokens of one request, and their times.
#[derive(Debug)]
pub struct Streamed {
    /// When it was begun, before there was a connection.
    pub sent: Instant,
    /// When each token was read.
    pub read: Vec<Instant>,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Bytes of KV that came through a plugin.
    pub transferred_bytes: u64,
}

/// Generates exactly so many tokens, greedily, from token ids. It has a connection of its own, and does not wait for more than
/// the next line.
///
/// # Errors
/// When the answer has another number of tokens or breaks, with its last event or the reason.
pub fn generate(url: &str, prompt: &[u32], count: usize) -> Result<Streamed, String> {
    let request = json!({
        "input_ids": prompt,
        "stream": true,
        "sampling_params": { "max_new_tokens": count, "temperature": 0, "ignore_eos": true },
    });
    let sent = Instant::now();
    let (mut read, mut last) = (Vec::new(), Value::Null);
    for event in Events::of(&format!("{url}/generate"), &request).map_err(|ended| ended.to_string())? {
        let event = event.map_err(|ended| ended.to_string())?;
        let now = Instant::now();
        // Tokens of one event get the same time.
        read.resize(tokens(&event).len().max(read.len()), now);
        last = event;
    }
    let tokens = tokens(&last);
    if tokens.len() != count || read.len() != count {
        return Err(format!("{count} tokens were requested, and the answer ended with {last}"));
    }
    let transferred_bytes = last["meta_info"]["transferred_bytes"].as_u64().unwrap_or(0);
    Ok(Streamed { sent, read, tokens, transferred_bytes })
}

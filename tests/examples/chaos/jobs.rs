//! Requests, and how a client sends one.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};

/// Different requests.
const JOBS: usize = 48;
/// Token ids of the synthetic model that are used.
const VOCABULARY: std::ops::Range<u32> = 0..256;
/// Longer than all that a server may wait for: workers that come back, retries, queues.
const PATIENCE: Duration = Duration::from_secs(180);

/// One request and its right answer.
#[derive(Clone, Debug)]
pub struct Job {
    pub prompt: Vec<u32>,
    pub count: u32,
    sampling: Value,
    pub right: Vec<u64>,
}

impl Job {
    /// Conversations: prompts that share their beginnings, of one token to several hundred, greedy or drawn.
    pub fn draw(random: &mut fastrand::Rng) -> Vec<Self> {
        let tokens = |random: &mut fastrand::Rng, most: usize| -> Vec<u32> {
            (0..random.usize(1..most)).map(|_| random.u32(VOCABULARY)).collect()
        };
        let beginnings: Vec<Vec<u32>> = (0..6).map(|_| tokens(random, 400)).collect();
        (0..JOBS)
            .map(|_| {
                let mut prompt = random.choice(&beginnings).cloned().unwrap_or_default();
                prompt.extend(tokens(random, 200));
                let sampling = if random.bool() {
                    json!({"temperature": 0})
                } else {
                    json!({"temperature": 0.9, "top_p": 0.95, "sampling_seed": random.u32(..)})
                };
                Self { prompt, count: random.u32(1..150), sampling, right: Vec::new() }
            })
            .collect()
    }
}

/// How a client behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Waits for the whole answer.
    Whole,
    /// Reads it as it comes.
    Stream,
    /// Hangs up after so many events.
    Leave(usize),
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Answer(Vec<u64>),
    Left,
    /// The connection broke, or there was none.
    Broken(String),
    /// The server says that there will be no answer.
    Refused(String),
}

/// Sends a request to the server at a URL.
pub fn ask(url: &str, job: &Job, manner: Manner) -> Outcome {
    try_ask(url, job, manner).unwrap_or_else(|error| Outcome::Broken(error.to_string()))
}

fn try_ask(url: &str, job: &Job, manner: Manner) -> std::io::Result<Outcome> {
    let mut sampling = job.sampling.clone();
    sampling["max_new_tokens"] = json!(job.count);
    sampling["ignore_eos"] = json!(true);
    let body =
        json!({"input_ids": job.prompt, "stream": manner != Manner::Whole, "sampling_params": sampling})
            .to_string();
    let mut connection = TcpStream::connect(url.trim_start_matches("http://"))?;
    connection.set_read_timeout(Some(PATIENCE))?;
    write!(
        connection,
        "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut reader = BufReader::new(connection);
    let (mut status, mut head) = (String::new(), String::new());
    reader.read_line(&mut status)?;
    loop {
        head.clear();
        if reader.read_line(&mut head)? == 0 {
            return Ok(Outcome::Broken("the connection ended in the answer's head".to_owned()));
        }
        if head.trim().is_empty() {
            break;
        }
    }
    if !status.contains(" 200 ") {
        let mut text = String::new();
        reader.read_to_string(&mut text)?;
        return Ok(Outcome::Refused(format!("{} {text}", status.trim())));
    }
    if manner == Manner::Whole {
        let mut text = String::new();
        reader.read_to_string(&mut text)?;
        return Ok(match serde_json::from_str::<Value>(&text) {
            Ok(answer) => Outcome::Answer(tokens(&answer)),
            Err(error) => Outcome::Broken(format!("half an answer: {error}")),
        });
    }
    let (mut last, mut events) = (Value::Null, 0);
    for line in reader.lines() {
        let line = line?;
        let Some(event) = line.strip_prefix("data: ") else { continue };
        if event == "[DONE]" {
            return Ok(Outcome::Answer(tokens(&last)));
        }
        let Ok(event) = serde_json::from_str::<Value>(event) else {
            return Ok(Outcome::Broken("half an event".to_owned()));
        };
        if event["error"].is_object() {
            return Ok(Outcome::Refused(event["error"].to_string()));
        }
        last = event;
        events += 1;
        if matches!(manner, Manner::Leave(after) if events >= after) {
            return Ok(Outcome::Left);
        }
    }
    Ok(Outcome::Broken("the stream ended before [DONE]".to_owned()))
}

fn tokens(answer: &Value) -> Vec<u64> {
    answer["output_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
}

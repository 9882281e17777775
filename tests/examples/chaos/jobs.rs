//! Requests, and the way a client sends one.

use host_tests::cluster::agent;
use host_tests::streaming::{Ended, Events, tokens};
use serde_json::{Value, json};

/// Number of different requests.
const JOBS: usize = 48;
/// Token ids of the synthetic model that prompts use.
const VOCABULARY: std::ops::Range<u32> = 0..256;

/// One request and its right answer.
#[derive(Clone, Debug)]
pub struct Job {
    pub prompt: Vec<u32>,
    pub count: u32,
    sampling: Value,
    pub right: Vec<u32>,
}

impl Job {
    /// Draws requests: prompts of one to several hundred tokens that share prefixes, with greedy or random sampling.
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
    /// Reads the answer as it comes.
    Stream,
    /// Hangs up after so many events.
    Leave(usize),
}

/// Outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Answer(Vec<u32>),
    Left,
    /// The connection broke, or there was none.
    Broken(String),
    /// The server says that there will be no answer.
    Refused(String),
}

/// Sends a request to the server at `url`.
pub fn ask(url: &str, job: &Job, manner: Manner) -> Outcome {
    let mut sampling = job.sampling.clone();
    sampling["max_new_tokens"] = json!(job.count);
    sampling["ignore_eos"] = json!(true);
    let streams = manner != Manner::Whole;
    let request = json!({"input_ids": job.prompt, "stream": streams, "sampling_params": sampling});
    let outcome = if streams { read(url, &request, manner) } else { wait(url, &request) };
    outcome.unwrap_or_else(|ended| match ended {
        Ended::Refused(why) => Outcome::Refused(why),
        Ended::Broken(why) => Outcome::Broken(why),
    })
}

fn wait(url: &str, request: &Value) -> Result<Outcome, Ended> {
    let broken = |error: ureq::Error| Ended::Broken(error.to_string());
    let sent = agent().post(format!("{url}/generate")).header("content-type", "application/json");
    let mut answer = sent.header("connection", "close").send(request.to_string()).map_err(broken)?;
    let text = answer.body_mut().read_to_string().map_err(broken)?;
    if answer.status() != 200 {
        return Err(Ended::Refused(format!("{} {text}", answer.status())));
    }
    let answer: Value =
        serde_json::from_str(&text).map_err(|error| Ended::Broken(format!("half an answer: {error}")))?;
    Ok(Outcome::Answer(tokens(&answer)))
}

fn read(url: &str, request: &Value, manner: Manner) -> Result<Outcome, Ended> {
    let mut last = Value::Null;
    for (events, event) in Events::of(url, request)?.enumerate() {
        let event = event?;
        if event["error"].is_object() {
            return Err(Ended::Refused(event["error"].to_string()));
        }
        if manner == Manner::Leave(events + 1) {
            return Ok(Outcome::Left);
        }
        last = event;
    }
    Ok(Outcome::Answer(tokens(&last)))
}

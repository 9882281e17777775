//! A load of requests of several kinds, the way a client sends one, and the answers of one aggregated worker.

mod aggregated;
mod answer;
mod draw;
mod model;

use serde_json::{Value, json};

use crate::streaming::{Ended, Events, whole};

pub use aggregated::Aggregated;
pub use answer::Answer;
pub use draw::draw;
pub use model::Model;

/// An endpoint of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Generate,
    Completions,
    Chat,
}

impl Endpoint {
    const fn path(self) -> &'static str {
        match self {
            Self::Generate => "/generate",
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// One request and its right answer.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its kind, as the report names it.
    pub kind: &'static str,
    endpoint: Endpoint,
    body: Value,
    /// Whether a router draws its seed.
    pub is_unseeded: bool,
    /// Most events of its answer, about.
    pub events: usize,
    /// The answer of one aggregated worker. `None` for a request without a seed, whose answer differs each time.
    pub right: Option<Answer>,
}

impl Job {
    /// Returns the same request with the seed that a router drew for it.
    #[must_use]
    pub fn seeded(&self, seed: i64) -> Self {
        let mut job = self.clone();
        job.body["sampling_params"]["sampling_seed"] = json!(seed);
        job
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
    /// The whole answer.
    Answer(Answer),
    /// The client hung up, and had read so much.
    Left(Answer),
    /// The connection broke, or there was none.
    Broken(String),
    /// The server says that there will be no answer.
    Refused(String),
}

/// Sends a request to the server at `url`.
#[must_use]
pub fn ask(url: &str, job: &Job, manner: Manner) -> Outcome {
    let url = format!("{url}{}", job.endpoint.path());
    let mut body = job.body.clone();
    let outcome = if manner == Manner::Whole {
        whole(&url, &body).map(|reply| Outcome::Answer(Answer::of_reply(job.endpoint, &reply)))
    } else {
        body["stream"] = json!(true);
        read(&url, &body, job.endpoint, manner)
    };
    outcome.unwrap_or_else(|ended| match ended {
        Ended::Refused(why) => Outcome::Refused(why),
        Ended::Broken(why) => Outcome::Broken(why),
    })
}

fn read(url: &str, body: &Value, endpoint: Endpoint, manner: Manner) -> Result<Outcome, Ended> {
    let mut answer = Answer::default();
    for (events, event) in Events::of(url, body)?.enumerate() {
        let event = event?;
        if event["error"].is_object() {
            return Err(Ended::Refused(event["error"].to_string()));
        }
        answer.add_event(endpoint, &event);
        if manner == Manner::Leave(events + 1) {
            return Ok(Outcome::Left(answer));
        }
    }
    Ok(Outcome::Answer(answer))
}

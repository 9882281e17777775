//! One request to the server, and what its client saw of the answer.

use host_simulate::Seen;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::measured::Server;
use crate::cli::server::{Events, message_in};

/// What came of a request.
#[derive(Debug, Default)]
pub struct Answered {
    /// Its times.
    pub seen: Seen,
    /// The seconds between its tokens.
    pub gaps: Vec<f64>,
    /// Tokens of the prompt that were found in caches.
    pub cached: u64,
    /// The text of the answer.
    pub text: String,
    /// Why it failed, on one line.
    pub failure: Option<String>,
}

/// The fields of an event that are read.
#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    #[serde(default)]
    error: Value,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u32,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

/// Sends a prompt of tokens and reads the answer, which has `tokens` tokens. Times are since `begun`.
pub async fn ask(server: &Server, prompt: &[u32], tokens: u32, begun: Instant) -> Answered {
    let body = json!({
        "model": server.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true},
    });
    let mut answered = Answered::default();
    answered.seen.prompt = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    answered.seen.sent = begun.elapsed();
    let ended = answered.read(server, &body, begun).await;
    answered.seen.ended = Some(begun.elapsed());
    match ended {
        Ok(()) if answered.seen.received == tokens => answered.seen.complete = true,
        Ok(()) => {
            answered.fail(format!("the answer has {} tokens instead of {tokens}", answered.seen.received))
        }
        Err(why) => answered.fail(why),
    }
    answered
}

impl Answered {
    /// Makes it a request that failed.
    pub fn fail(&mut self, why: String) {
        self.seen.complete = false;
        self.failure = Some(why);
    }

    async fn read(&mut self, server: &Server, body: &Value, begun: Instant) -> Result<(), String> {
        let mut answer =
            server.client.post("/v1/completions", body).await.map_err(|error| error.to_string())?;
        if !answer.status.is_success() {
            return Err(answer.error().await);
        }
        let mut events = Events::default();
        loop {
            let bytes = answer.next().await.map_err(|error| format!("the answer broke off: {error}"))?;
            let Some(bytes) = bytes else { return Err("the answer broke off".to_owned()) };
            for data in events.push(&bytes)? {
                if data == "[DONE]" {
                    return Ok(());
                }
                self.event(&data, begun)?;
            }
        }
    }

    fn event(&mut self, data: &str, begun: Instant) -> Result<(), String> {
        let now = begun.elapsed();
        let event: Event = serde_json::from_str(data)
            .map_err(|error| format!("the server sent an event that is not of a completion: {error}"))?;
        if !event.error.is_null() {
            return Err(message_in(data));
        }
        event.choices.iter().for_each(|choice| self.text.push_str(&choice.text));
        let Some(usage) = event.usage else {
            let is_counted = event.choices.iter().all(|choice| choice.text.is_empty());
            let missing =
                "the server does not count tokens in each event, which continuous_usage_stats asks for";
            return if is_counted { Ok(()) } else { Err(missing.to_owned()) };
        };
        self.cached =
            usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(self.cached);
        let new = usage.completion_tokens.saturating_sub(self.seen.received);
        if new == 0 {
            return Ok(());
        }
        self.seen.received += new;
        match &mut self.seen.tokens {
            None => self.seen.tokens = Some((now, now)),
            Some((_, last)) => {
                // Tokens that one event brings share the time since the event before, as in SGLang's client.
                let gap = now.saturating_sub(*last).as_secs_f64() / f64::from(new);
                self.gaps.extend((0..new).map(|_token| gap));
                *last = now;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_one_event_share_its_time() {
        let mut answered = Answered::default();
        let begun = Instant::now();
        let event = |tokens: u32, text: &str| {
            json!({"choices": [{"text": text}], "usage": {"completion_tokens": tokens, "prompt_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 8}}})
            .to_string()
        };
        for (tokens, text) in [(1, "a"), (2, ""), (2, ""), (5, "bcd")] {
            answered.event(&event(tokens, text), begun).unwrap();
        }
        assert_eq!((answered.seen.received, answered.gaps.len()), (5, 4));
        assert_eq!((answered.cached, answered.text.as_str()), (8, "abcd"));
        let [.., one, two, three] = answered.gaps[..] else { unreachable!() };
        assert!(one == two && two == three);
        let (first, last) = answered.seen.tokens.unwrap();
        let all: f64 = answered.gaps.iter().sum();
        assert!((all - (last - first).as_secs_f64()).abs() < 1e-9);
        let uncounted = answered.event(r#"{"choices": [{"text": "x"}]}"#, begun).unwrap_err();
        assert!(uncounted.contains("continuous_usage_stats"), "{uncounted}");
        let error = answered.event(r#"{"error": {"message": "too\nbusy"}}"#, begun).unwrap_err();
        assert_eq!(error, "too busy");
    }
}

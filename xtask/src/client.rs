//! A streaming client of the OpenAI endpoints, and its measurements.

use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

/// Longest time for one request.
const PATIENCE: Duration = Duration::from_secs(120);

/// A request. Its kind decides the path that it is sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// `/v1/completions`: a text to continue.
    Completion(String),
    /// `/v1/chat/completions`: a conversation, the newest message last.
    Chat(Vec<Message>),
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `user` or `assistant`.
    pub role: &'static str,
    /// Its text.
    pub content: String,
}

/// One generated token as the API reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its text as the API writes it.
    pub text: String,
    /// Its log probability: equal only when the computation was equal to the last bit.
    pub logprob: f64,
}

/// A streamed answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The tokens, with their log probabilities.
    pub tokens: Vec<Token>,
    /// The text, joined from its pieces.
    pub text: String,
    /// Tokens of the prompt, as the server counts them.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that a cache held.
    pub cached_tokens: u64,
    /// From sending to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub rest: Duration,
}

impl Answer {
    /// Tokens per second after the first, if there were any.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let more = self.tokens.len().checked_sub(1).filter(|more| *more > 0)?;
        let more = u32::try_from(more).ok()?;
        Some(f64::from(more) / self.rest.as_secs_f64().max(1e-9))
    }
}

impl Ask {
    /// Its path.
    pub fn path(&self) -> &'static str {
        match self {
            Ask::Completion(_) => "/v1/completions",
            Ask::Chat(_) => "/v1/chat/completions",
        }
    }

    /// Its newest part: the text, or the newest message.
    pub fn newest(&self) -> &str {
        match self {
            Ask::Completion(text) => text,
            Ask::Chat(messages) => messages.last().map_or("", |message| &message.content),
        }
    }

    fn body(&self, model: &str, tokens: u32) -> Value {
        let mut body = json!({
            "model": model, "temperature": 0, "max_tokens": tokens,
            "stream": true, "stream_options": {"include_usage": true},
        });
        match self {
            Ask::Completion(text) => {
                body["prompt"] = json!(text);
                body["logprobs"] = json!(0);
            }
            Ask::Chat(messages) => {
                let message = |message: &Message| json!({"role": message.role, "content": message.content});
                body["messages"] = messages.iter().map(message).collect();
                body["logprobs"] = json!(true);
            }
        }
        body
    }

    /// The text and the tokens of one event.
    fn piece<'a>(&self, choice: &'a Value) -> (&'a str, Vec<Token>) {
        let token = |text: &Value, logprob: &Value| Token {
            text: text.to_string(),
            logprob: logprob.as_f64().unwrap_or(f64::NAN),
        };
        match self {
            Ask::Completion(_) => {
                let logprobs = &choice["logprobs"];
                let texts = logprobs["tokens"].as_array().into_iter().flatten();
                let numbers = logprobs["token_logprobs"].as_array().into_iter().flatten();
                let tokens = texts.zip(numbers).map(|(text, logprob)| token(text, logprob)).collect();
                (choice["text"].as_str().unwrap_or_default(), tokens)
            }
            Ask::Chat(_) => {
                let content = choice["logprobs"]["content"].as_array().into_iter().flatten();
                let tokens = content.map(|entry| token(&entry["bytes"], &entry["logprob"])).collect();
                (choice["delta"]["content"].as_str().unwrap_or_default(), tokens)
            }
        }
    }

    /// Sends the request, with greedy decoding, and gives each piece of text to `show` as it comes.
    pub fn stream(
        &self,
        url: &str,
        model: &str,
        tokens: u32,
        mut show: impl FnMut(&str),
    ) -> anyhow::Result<Answer> {
        let path = self.path();
        let sent = Instant::now();
        let mut answer = agent()
            .post(format!("{url}{path}"))
            .header("content-type", "application/json")
            .send(self.body(model, tokens).to_string())
            .with_context(|| format!("no answer from {url}{path}"))?;
        if answer.status().as_u16() != 200 {
            let text = answer.body_mut().read_to_string().unwrap_or_default();
            bail!("{path} answered {}: {text}", answer.status());
        }
        let mut got = Answer {
            tokens: Vec::new(),
            text: String::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            first_token: Duration::ZERO,
            rest: Duration::ZERO,
        };
        let mut done = false;
        for line in BufReader::new(answer.body_mut().as_reader()).lines() {
            let line = line.with_context(|| format!("the answer from {path} was cut off"))?;
            let Some(data) = line.strip_prefix("data: ") else { continue };
            if data == "[DONE]" {
                done = true;
                break;
            }
            let event: Value = serde_json::from_str(data)
                .with_context(|| format!("{path} sent what is not JSON: {data}"))?;
            ensure!(event.get("error").is_none(), "{path} failed while it streamed: {data}");
            if let Some(count) = event["usage"]["prompt_tokens"].as_u64() {
                got.prompt_tokens = count;
            }
            if let Some(count) = event["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() {
                got.cached_tokens = count;
            }
            let (text, new) = self.piece(&event["choices"][0]);
            if !new.is_empty() {
                if got.tokens.is_empty() {
                    got.first_token = sent.elapsed();
                }
                got.rest = sent.elapsed().saturating_sub(got.first_token);
                got.tokens.extend(new);
            }
            if !text.is_empty() {
                show(text);
                got.text.push_str(text);
            }
        }
        ensure!(done, "the answer from {path} ended without [DONE]");
        Ok(got)
    }
}

/// Generates exactly `count` tokens after a prompt of token ids.
pub fn generate(url: &str, prompt: &[u32], count: u32) -> anyhow::Result<()> {
    let sampling = json!({ "max_new_tokens": count, "temperature": 0, "ignore_eos": true });
    let mut answer = agent()
        .post(format!("{url}/generate"))
        .header("content-type", "application/json")
        .send(json!({ "input_ids": prompt, "sampling_params": sampling }).to_string())
        .with_context(|| format!("no answer from {url}/generate"))?;
    let text = answer.body_mut().read_to_string().context("the answer was cut off")?;
    ensure!(answer.status().as_u16() == 200, "/generate answered {}: {text}", answer.status());
    let answer: Value = serde_json::from_str(&text).context("the answer is not JSON")?;
    let tokens = answer["output_ids"].as_array().map_or(0, Vec::len);
    ensure!(u32::try_from(tokens) == Ok(count), "{tokens} tokens came instead of {count}");
    Ok(())
}

/// A JSON document, if the server answers with one (whatever its status).
pub fn get_json(url: &str) -> Option<Value> {
    serde_json::from_str(&get(url)?).ok()
}

/// KV bytes that decode workers received so far, as the router counts them.
pub fn transferred_bytes(url: &str) -> anyhow::Result<u64> {
    let text = get(&format!("{url}/metrics")).context("the server does not tell its metrics")?;
    let value = text.lines().find_map(|line| line.strip_prefix("host_transferred_bytes_total "));
    value
        .and_then(|value| value.trim().parse().ok())
        .context("host_transferred_bytes_total is not in /metrics")
}

/// KV pages that came back from storage so far, on all workers that `/health` names.
pub fn restored_pages(url: &str) -> anyhow::Result<u64> {
    let health = get_json(&format!("{url}/health")).context("the server does not tell its health")?;
    let workers = health["workers"].as_array().into_iter().flatten();
    let addresses = workers.filter_map(|worker| worker["metrics"].as_str());
    let metrics = addresses.filter_map(|address| get(&format!("{address}/metrics")));
    let pages = metrics.flat_map(|text| {
        let read = |line: &str| {
            line.strip_prefix("host_storage_pages_total{")
                .filter(|labels| labels.contains("end=\"read\""))?;
            line.rsplit(' ').next()?.parse::<u64>().ok()
        };
        text.lines().filter_map(read).collect::<Vec<_>>()
    });
    Ok(pages.sum())
}

fn get(url: &str) -> Option<String> {
    agent().get(url).call().ok()?.body_mut().read_to_string().ok()
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build().into()
}

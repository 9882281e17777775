//! Clients that send the next request after the last one was answered.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context;
use serde_json::{Value, json};

use super::{ANSWER_TOKENS, IN_FLIGHT, OWN_TOKENS, PREFIX_TOKENS, PREFIXES};

/// The server of a load, and the number of requests that it gets.
pub struct Load {
    /// URL of the server.
    pub url: String,
    /// Total number of requests.
    pub requests: usize,
}

/// The times of one request, in seconds since the first one began.
#[derive(Debug)]
pub struct Answer {
    /// When it was sent.
    pub sent: f64,
    /// When each token was read.
    pub tokens: Vec<f64>,
    /// Bytes of KV that were moved for it.
    pub moved: u64,
}

impl Load {
    /// Sends all requests, and returns the answers in the order in which the requests were sent.
    pub fn run(&self) -> anyhow::Result<Vec<Answer>> {
        let start = Instant::now();
        let next = AtomicUsize::new(0);
        let answers = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let client = || -> anyhow::Result<()> {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= self.requests {
                        return Ok(());
                    }
                    let answer = self.ask(number, start)?;
                    answers.lock().unwrap_or_else(PoisonError::into_inner).push((number, answer));
                }
            };
            let clients: Vec<_> = (0..IN_FLIGHT).map(|_| scope.spawn(client)).collect();
            clients.into_iter().try_for_each(|client| match client.join() {
                Ok(result) => result,
                Err(_) => anyhow::bail!("a client panicked"),
            })
        })?;
        let mut answers = answers.into_inner().unwrap_or_else(PoisonError::into_inner);
        answers.sort_by_key(|(number, _)| *number);
        Ok(answers.into_iter().map(|(_, answer)| answer).collect())
    }

    fn ask(&self, number: usize, start: Instant) -> anyhow::Result<Answer> {
        let body = json!({
            "input_ids": prompt(number),
            "stream": true,
            "sampling_params": { "max_new_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": true },
        })
        .to_string();
        let address = self.url.strip_prefix("http://").context("an http address")?;
        let sent = start.elapsed().as_secs_f64();
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        write!(
            stream,
            "POST /generate HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = Answer { sent, tokens: Vec::new(), moved: 0 };
        let mut last = Value::Null;
        for line in BufReader::new(stream).lines() {
            let line = line?;
            let now = start.elapsed().as_secs_f64();
            let Some(event) = line.strip_prefix("data: ").filter(|event| *event != "[DONE]") else {
                continue;
            };
            last = serde_json::from_str(event)?;
            let tokens = last["output_ids"].as_array().map_or(0, Vec::len);
            // Tokens that arrive together get the same time.
            answer.tokens.resize(tokens.max(answer.tokens.len()), now);
        }
        anyhow::ensure!(answer.tokens.len() == ANSWER_TOKENS, "request {number} was not answered: {last}");
        answer.moved = last["meta_info"]["transferred_bytes"].as_u64().unwrap_or(0);
        Ok(answer)
    }
}

/// The prompt of a request: one of the prefixes, and tokens that no other prompt has.
fn prompt(number: usize) -> Vec<u32> {
    let token = |seed: u64, place: usize| (mix(mix(seed) ^ place as u64) % 250) as u32;
    let prefix = mix(number as u64 ^ 0x5eed) as usize % PREFIXES;
    let shared = (0..PREFIX_TOKENS).map(|place| token(prefix as u64, place));
    shared.chain((0..OWN_TOKENS).map(|place| token(1_000 + number as u64, place))).collect()
}

/// The output function of SplitMix64.
fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

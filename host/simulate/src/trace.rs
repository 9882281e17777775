//! Traces of requests in Mooncake's format: one JSON object per line.
//!
//! `timestamp` is in milliseconds. `hash_ids` has one number for each 512 tokens of the prompt, the last of which may
//! cover fewer. Equal numbers mean equal prefixes (`FAST25-release/traces` of `kvcache-ai/Mooncake`).

use std::time::Duration;

use serde::Deserialize;

use crate::traffic::{Ask, LATEST_ARRIVAL, Prompt, Workload};
use crate::wrong::Wrong;

/// Tokens that one hash of a trace covers.
const BLOCK: u32 = Trace::BLOCK;
/// The latest arrival, in milliseconds.
const LATEST: f64 = LATEST_ARRIVAL.as_secs() as f64 * 1e3;
/// The most tokens of a prompt or an answer.
const LONGEST: u32 = 10_000_000;
/// Numbers of blocks are below this, so that every token of every block has an id of its own.
const BLOCKS: u64 = (u32::MAX / BLOCK) as u64;

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// The requests of a trace, in order of arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    requests: Vec<Ask>,
}

impl Trace {
    /// Tokens that one entry of `hash_ids` covers.
    pub const BLOCK: u32 = 512;

    /// Reads the text of a trace, or its first `most` requests. `file` is its name in errors.
    ///
    /// # Errors
    /// [`Wrong`], with the line, when a line is not a request, or is earlier than the line before.
    pub fn parse(file: &str, text: &str, most: Option<usize>) -> Result<Self, Wrong> {
        let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
        let mut requests: Vec<Ask> = Vec::new();
        for (number, text) in lines.take(most.unwrap_or(usize::MAX)) {
            let wrong = |what: String| Wrong::new(file, format!("line {number}"), what);
            let line: Line = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
            if !(0.0..=LATEST).contains(&line.timestamp) {
                let timestamp = line.timestamp;
                return Err(wrong(format!(
                    "timestamp {timestamp}: it counts milliseconds from the beginning of the trace, from 0 to {LATEST}"
                )));
            }
            let at = Duration::from_secs_f64(line.timestamp / 1e3);
            let blocks = u64::from(line.input_length.div_ceil(BLOCK));
            if line.input_length == 0 || line.output_length == 0 {
                return Err(wrong("input_length and output_length must be at least 1".into()));
            }
            if line.input_length.max(line.output_length) > LONGEST {
                return Err(wrong(format!("input_length and output_length must be at most {LONGEST}")));
            }
            if line.hash_ids.len() as u64 != blocks {
                let (ids, tokens) = (line.hash_ids.len(), line.input_length);
                return Err(wrong(format!(
                    "hash_ids has {ids} entries, but input_length {tokens} has {blocks} blocks of {BLOCK} tokens"
                )));
            }
            if let Some(id) = line.hash_ids.iter().find(|id| **id >= BLOCKS) {
                return Err(wrong(format!("hash_ids has {id}, and ids must be below {BLOCKS}")));
            }
            if requests.last().is_some_and(|before| before.at > at) {
                return Err(wrong(
                    "timestamp is earlier than in the line before: sort the trace by it".into(),
                ));
            }
            let prompt = Prompt { blocks: line.hash_ids, block_tokens: BLOCK, tokens: line.input_length };
            requests.push(Ask { at, prompt, answer: line.output_length });
        }
        if requests.is_empty() {
            return Err(Wrong::new(file, "line 1", "the trace has no request"));
        }
        Ok(Self { requests })
    }

    /// The number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether the trace has no request. A trace that was read has at least one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Requests per second from the first to the last, or 0 when they arrive together.
    #[must_use]
    pub fn requests_per_s(&self) -> f64 {
        let [first, .., last] = &self.requests[..] else { return 0.0 };
        let seconds = (last.at - first.at).as_secs_f64();
        if seconds > 0.0 { self.requests.len() as f64 / seconds } else { 0.0 }
    }

    /// The trace with prompts and answers so many times shorter, for a machine that cannot compute the whole ones. What prompts have
    /// in common stays the same share of them.
    ///
    /// # Panics
    /// Unless `divisor` divides the tokens of a block, 512.
    #[must_use]
    pub fn shortened(mut self, divisor: u32) -> Self {
        assert!(divisor > 0 && BLOCK.is_multiple_of(divisor), "{divisor} does not divide {BLOCK}");
        for request in &mut self.requests {
            request.prompt.block_tokens = BLOCK / divisor;
            request.prompt.tokens = request.prompt.tokens.div_ceil(divisor);
            request.answer = request.answer.div_ceil(divisor);
        }
        self
    }

    /// The requests, arriving so many times as fast as in the trace.
    ///
    /// # Panics
    /// When `speed` is not positive.
    #[must_use]
    pub fn into_workload(mut self, speed: f64) -> Workload {
        assert!(speed > 0.0, "a speed is positive: {speed}");
        for request in &mut self.requests {
            request.at = request.at.div_f64(speed);
        }
        Workload::Open(self.requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Trace, Wrong> {
        Trace::parse("t.jsonl", text, None)
    }

    #[test]
    fn a_request_has_a_block_for_each_512_tokens() {
        let line = r#"{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}"#;
        let trace = parse(line).unwrap();
        let prompt = Prompt { blocks: vec![4, 9], block_tokens: 512, tokens: 600 };
        let wanted = Ask { at: Duration::from_millis(750), prompt, answer: 7 };
        assert_eq!(trace.into_workload(2.0), Workload::Open(vec![wanted]));
    }

    #[test]
    fn shorter_prompts_have_the_blocks_that_they_had() {
        let line = r#"{"timestamp": 0, "input_length": 1025, "output_length": 9, "hash_ids": [4, 9, 7]}"#;
        let whole = parse(line).unwrap().into_workload(1.0);
        let Workload::Open(shorter) = parse(line).unwrap().shortened(8).into_workload(1.0) else {
            unreachable!()
        };
        let prompt = Prompt { blocks: vec![4, 9, 7], block_tokens: 64, tokens: 129 };
        assert_eq!(shorter, [Ask { at: Duration::ZERO, prompt, answer: 2 }]);
        assert_eq!(shorter[0].prompt.text().len(), 129);
        assert_ne!(whole, Workload::Open(shorter));
    }

    #[test]
    fn a_wrong_line_is_refused_with_its_number() {
        let good = r#"{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [0]}"#;
        for (bad, said) in [
            ("{", "t.jsonl: line 3: EOF"),
            (r#"{"timestamp": 5, "input_length": 1, "hash_ids": [0]}"#, "missing field `output_length`"),
            (r#"{"timestamp": 5, "input_length": 513, "output_length": 1, "hash_ids": [0]}"#, "has 2 blocks"),
            (r#"{"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": [0]}"#, "earlier"),
            (r#"{"timestamp": -4, "input_length": 1, "output_length": 1, "hash_ids": [0]}"#, "timestamp -4"),
            (
                r#"{"timestamp": 1.7e12, "input_length": 1, "output_length": 1, "hash_ids": [0]}"#,
                "from the beginning of the trace",
            ),
            (r#"{"timestamp": 5, "input_length": 0, "output_length": 1, "hash_ids": []}"#, "at least 1"),
            (
                r#"{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [99999999999]}"#,
                "must be below",
            ),
        ] {
            let error = parse(&format!("{good}\n\n{bad}\n")).unwrap_err().to_string();
            assert!(error.contains(said) && error.starts_with("t.jsonl: line 3: "), "{error}");
        }
        assert_eq!(parse("").unwrap_err().to_string(), "t.jsonl: line 1: the trace has no request");
        assert_eq!(Trace::parse("t.jsonl", &format!("{good}\n{{"), Some(1)).unwrap().len(), 1);
    }
}

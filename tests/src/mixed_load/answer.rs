//! Answers in one form, whatever the endpoint, and whether they came at once or as events.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

use super::Endpoint;

/// The candidates of an answer, by their index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    candidates: BTreeMap<u64, Candidate>,
    /// The seed of the first candidate, where the endpoint tells it.
    pub seed: Option<i64>,
}

/// What was read of a candidate: its tokens or its text, then its calls of tools, then the reason of its end. And the log
/// probabilities of its tokens, if it has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Candidate {
    read: String,
    logprobs: String,
    end: Option<String>,
}

impl Answer {
    /// Reads a whole answer.
    pub(super) fn of_reply(endpoint: Endpoint, reply: &Value) -> Self {
        let mut answer = Self::default();
        match (endpoint, reply) {
            (Endpoint::Generate, Value::Array(candidates)) => {
                candidates.iter().for_each(|candidate| answer.add_generated(candidate));
            }
            (Endpoint::Generate, one) => answer.add_generated(one),
            _ => answer.add_choices(reply, "message"),
        }
        answer
    }

    /// Adds an event of a stream.
    pub(super) fn add_event(&mut self, endpoint: Endpoint, event: &Value) {
        match endpoint {
            Endpoint::Generate => self.add_generated(event),
            Endpoint::Completions | Endpoint::Chat => self.add_choices(event, "delta"),
        }
    }

    /// Takes a candidate of `/generate`, which has everything so far.
    fn add_generated(&mut self, candidate: &Value) {
        let (index, meta) = (candidate["index"].as_u64().unwrap_or(0), &candidate["meta_info"]);
        let tokens = candidate["output_ids"].as_array().into_iter().flatten();
        let mut read = String::new();
        for token in tokens {
            let _written = write!(read, "{token} ");
        }
        if index == 0 {
            self.seed = meta["sampling_seed"].as_i64();
        }
        let end = Some(&meta["finish_reason"]).filter(|reason| !reason.is_null());
        self.candidates
            .insert(index, Candidate { read, logprobs: String::new(), end: end.map(Value::to_string) });
    }

    fn add_choices(&mut self, reply: &Value, of_chat: &str) {
        for choice in reply["choices"].as_array().into_iter().flatten() {
            let candidate = self.candidates.entry(choice["index"].as_u64().unwrap_or(0)).or_default();
            let message = &choice[of_chat];
            for text in [&choice["text"], &message["content"]] {
                candidate.read.push_str(text.as_str().unwrap_or_default());
            }
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                let function = &call["function"];
                if let Some(name) = function["name"].as_str() {
                    let _written = write!(candidate.read, "\ncall of {name} with ");
                }
                candidate.read.push_str(function["arguments"].as_str().unwrap_or_default());
            }
            for logprob in choice["logprobs"]["token_logprobs"].as_array().into_iter().flatten() {
                let _written = write!(candidate.logprobs, "{logprob} ");
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                candidate.end = Some(reason.to_owned());
            }
        }
    }

    /// Whether it is over, with as many candidates as the other.
    #[must_use]
    pub fn is_over_like(&self, other: &Self) -> bool {
        self.candidates.len() == other.candidates.len() && self.has_ended()
    }

    fn has_ended(&self) -> bool {
        !self.candidates.is_empty() && self.candidates.values().all(|candidate| candidate.end.is_some())
    }

    /// Describes the first difference from the right answer, of which this may be the beginning if it is not `whole`.
    #[must_use]
    pub fn difference(&self, right: &Self, whole: bool) -> Option<String> {
        if whole && !self.is_over_like(right) {
            let (got, wanted) = (self.candidates.len(), right.candidates.len());
            return Some(format!(
                "{got} candidates of {wanted}, of which all have ended: {}",
                self.has_ended()
            ));
        }
        for (index, candidate) in &self.candidates {
            let Some(other) = right.candidates.get(index) else {
                return Some(format!("there is no candidate {index}"));
            };
            let is_over = whole || candidate.end.is_some();
            let read = (&candidate.read, &other.read, "text or tokens");
            for (got, wanted, what) in [read, (&candidate.logprobs, &other.logprobs, "log probabilities")] {
                let is_equal = if is_over { got == wanted } else { wanted.starts_with(got.as_str()) };
                if !is_equal {
                    let at = got.bytes().zip(wanted.bytes()).take_while(|(one, other)| one == other).count();
                    let (got, wanted) = (got.len(), wanted.len());
                    return Some(format!(
                        "the {what} of candidate {index} differ from byte {at} on, of {got} and {wanted}"
                    ));
                }
            }
            if candidate.end.is_some() && candidate.end != other.end {
                return Some(format!(
                    "candidate {index} ended by {:?} and not {:?}",
                    candidate.end, other.end
                ));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// An answer of two candidates, and the events that bring it.
    fn of_chat() -> (Answer, Vec<Value>) {
        let call = json!({"id": "call-1", "function": {"name": "weather", "arguments": "{\"town\": 1}"}});
        let reply = json!({"choices": [
            {"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"},
            {"index": 1, "message": {"content": null, "tool_calls": [call]}, "finish_reason": "tool_calls"},
        ]});
        let event = |index: u64, delta: Value| json!({"choices": [{"index": index, "delta": delta}]});
        let begins = json!({"tool_calls": [{"index": 0, "id": "call-2", "function": {"name": "weather", "arguments": ""}}]});
        let part = |text: &str| json!({"tool_calls": [{"index": 0, "function": {"arguments": text}}]});
        let mut events = vec![
            event(0, json!({"role": "assistant", "content": "a"})),
            event(1, begins),
            event(1, part("{\"town\"")),
            event(0, json!({"content": "b"})),
            event(1, part(": 1}")),
        ];
        for (index, reason) in [(0, "stop"), (1, "tool_calls")] {
            events.push(json!({"choices": [{"index": index, "delta": {}, "finish_reason": reason}]}));
        }
        (Answer::of_reply(Endpoint::Chat, &reply), events)
    }

    fn read(events: &[Value]) -> Answer {
        let mut answer = Answer::default();
        events.iter().for_each(|event| answer.add_event(Endpoint::Chat, event));
        answer
    }

    #[test]
    fn events_are_the_answer_and_each_beginning_is_its_beginning() {
        let (right, events) = of_chat();
        assert_eq!(read(&events), right);
        for count in 0..events.len() {
            let beginning = read(&events[..count]);
            assert_eq!(beginning.difference(&right, false), None, "{count}");
            assert!(beginning.difference(&right, true).is_some(), "{count} events are no whole answer");
        }
    }

    #[test]
    fn one_other_letter_end_or_candidate_is_a_difference() {
        let (right, events) = of_chat();
        for change in ["b\"", "1}", "\"stop\"", "\"index\":1", "\"weather\""] {
            let text = Value::from(events.clone()).to_string();
            let other = text.replacen(change, &change.replace(['b', '1', 's', 'w'], "7"), 20);
            assert_ne!(text, other);
            let Value::Array(events) = serde_json::from_str(&other).unwrap() else { unreachable!() };
            assert!(read(&events).difference(&right, true).is_some(), "{change}");
            assert!(read(&events).difference(&right, false).is_some(), "{change}");
        }
    }

    #[test]
    fn an_answer_of_generate_has_all_tokens_so_far_and_its_seed() {
        let event = |tokens: &[u32], end: Value| json!({"output_ids": tokens, "meta_info": {"sampling_seed": 7, "finish_reason": end}});
        let mut answer = Answer::default();
        for (count, end) in [(1, json!(null)), (3, json!({"type": "length"}))] {
            answer.add_event(Endpoint::Generate, &event(&[5, 6, 7][..count], end));
        }
        let right = Answer::of_reply(Endpoint::Generate, &event(&[5, 6, 7], json!({"type": "length"})));
        assert_eq!((answer.difference(&right, true), answer.seed), (None, Some(7)));
        let other = Answer::of_reply(Endpoint::Generate, &event(&[5, 6, 71], json!({"type": "length"})));
        assert!(other.difference(&right, true).is_some());
    }
}

//! Conversions between the core's types and those of the wire.

use host_core::ids::{PageId, Room};
use host_core::message::{Body, Message, Reserve};
use host_core::radix::NamespaceKey;
use host_core::request::{Failure, PeerRef, Request};
use host_core::{Instance, Sampled, Sampling, Shaping};

use crate::Answer;
use crate::proto::{self, control_message, generate_event};

/// A message that does not follow the schema.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message lacks {0}")]
pub struct Malformed(&'static str);

/// Writes a room message.
#[must_use]
pub fn write_message(message: &Message) -> proto::ControlMessage {
    use control_message::Body as Wire;
    let body = match &message.body {
        Body::Reserve(reserve) => Wire::Reserve(proto::Reserve {
            pages: reserve.pages.iter().map(|page| page.0).collect(),
            window: reserve.window.iter().map(|page| page.0).collect(),
            decode_prefix_len: reserve.decode_prefix_len,
            prompt_tokens: reserve.prompt_tokens,
            aux_slot: reserve.aux_slot,
            namespace: reserve.namespace,
        }),
        Body::Reserved => Wire::Reserved(proto::Reserved {}),
        Body::Refused { message, retryable } => {
            Wire::Refused(proto::Refused { message: message.clone(), retryable: *retryable })
        }
        Body::Commit => Wire::Commit(proto::Commit {}),
        Body::Committed => Wire::Committed(proto::Committed {}),
        Body::Abort => Wire::Abort(proto::Abort {}),
        Body::Drained => Wire::Drained(proto::Drained {}),
        Body::PrefillFailed { message, retryable } => {
            Wire::PrefillFailed(proto::PrefillFailed { message: message.clone(), retryable: *retryable })
        }
        Body::PrefillFailedSeen => Wire::PrefillFailedSeen(proto::PrefillFailedSeen {}),
    };
    proto::ControlMessage {
        id: message.id,
        answers: message.answers.unwrap_or(0),
        room: message.room.0,
        attempt: message.attempt,
        body: Some(body),
    }
}

/// Reads a room message.
///
/// # Errors
/// When it has no body.
pub fn read_message(message: proto::ControlMessage) -> Result<Message, Malformed> {
    use control_message::Body as Wire;
    let body = match message.body.ok_or(Malformed("a body"))? {
        Wire::Reserve(reserve) => Body::Reserve(Reserve {
            pages: reserve.pages.into_iter().map(PageId).collect(),
            window: reserve.window.into_iter().map(PageId).collect(),
            decode_prefix_len: reserve.decode_prefix_len,
            prompt_tokens: reserve.prompt_tokens,
            aux_slot: reserve.aux_slot,
            namespace: reserve.namespace,
        }),
        Wire::Reserved(_) => Body::Reserved,
        Wire::Refused(refused) => Body::Refused { message: refused.message, retryable: refused.retryable },
        Wire::Commit(_) => Body::Commit,
        Wire::Committed(_) => Body::Committed,
        Wire::Abort(_) => Body::Abort,
        Wire::Drained(_) => Body::Drained,
        Wire::PrefillFailed(failed) => {
            Body::PrefillFailed { message: failed.message, retryable: failed.retryable }
        }
        Wire::PrefillFailedSeen(_) => Body::PrefillFailedSeen,
    };
    Ok(Message {
        id: message.id,
        answers: (message.answers != 0).then_some(message.answers),
        room: Room(message.room),
        attempt: message.attempt,
        body,
    })
}

/// Reads sampling settings.
fn read_sampling(sampling: proto::Sampling) -> Sampling {
    let shaping = Shaping {
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        repetition_penalty: if sampling.repetition_penalty == 0.0 {
            1.0
        } else {
            sampling.repetition_penalty
        },
        min_tokens: sampling.min_tokens,
        end_tokens: if sampling.min_tokens > 0 { sampling.end_tokens } else { Vec::new() },
        logit_bias: sampling.logit_bias.iter().map(|bias| (bias.token, bias.bias)).collect(),
        allowed_tokens: sampling.allowed_tokens,
        bad_words: sampling.bad_words.into_iter().map(|word| word.tokens).collect(),
    };
    Sampling {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        seed: sampling.seed,
        logprobs: sampling.logprobs.map(most_likely),
        shaping: (shaping != Shaping::default()).then(|| Box::new(shaping)),
    }
}

/// A number of likeliest tokens, as far as they are reported.
fn most_likely(top: u32) -> u8 {
    u8::try_from(top).unwrap_or(u8::MAX).min(host_core::batch::MAX_TOP_LOGPROBS)
}

/// Reads a request.
///
/// # Errors
/// When its sampling is missing.
pub fn read_request(request: proto::GenerateRequest) -> Result<Request, Malformed> {
    let sampling = request.sampling.ok_or(Malformed("its sampling"))?;
    Ok(Request {
        room: Room(request.room),
        prompt: request.prompt,
        answered: request.answered,
        max_new_tokens: request.max_new_tokens,
        stop_tokens: request.stop_tokens,
        ignore_stop: request.ignore_stop,
        sampling: read_sampling(sampling),
        priority: request.priority,
        client: request.client,
        prefill: request
            .prefill
            .map(|peer| PeerRef { instance: Instance(peer.instance), address: peer.address }),
        namespace: read_namespace(request.namespace.unwrap_or_default()),
        no_cache: request.no_cache,
        scores: request.scores.map(most_likely),
        names: Vec::new(),
    })
}

fn read_namespace(namespace: proto::Namespace) -> NamespaceKey {
    NamespaceKey { model: namespace.model, extra_key: namespace.extra_key, salt: namespace.cache_salt }
}

/// Writes a namespace.
#[must_use]
pub fn write_namespace(key: &NamespaceKey) -> proto::Namespace {
    proto::Namespace {
        model: key.model.clone(),
        extra_key: key.extra_key.clone(),
        cache_salt: key.salt.clone(),
    }
}

/// Writes an event of a request.
#[must_use]
pub fn write_answer(answer: &Answer, plugin: &str) -> proto::GenerateEvent {
    let event = match answer {
        Answer::Began { cached_tokens, offload_tokens, transferred_bytes } => {
            generate_event::Event::Began(proto::Began {
                transferred_bytes: *transferred_bytes,
                transfer_plugin: plugin.to_owned(),
                cached_tokens: *cached_tokens,
                offload_tokens: *offload_tokens,
            })
        }
        Answer::Token(token) => generate_event::Event::Token(write_token(token)),
        Answer::Scores { first, tokens } => generate_event::Event::Scores(proto::Scores {
            first: *first,
            tokens: tokens.iter().map(write_token).collect(),
        }),
        Answer::Finished { reason, usage, transferred_bytes } => {
            generate_event::Event::Finished(proto::Finished {
                reason: reason.as_str().to_owned(),
                prompt_tokens: usage.prompt_tokens,
                output_tokens: usage.output_tokens,
                transferred_bytes: *transferred_bytes,
                transfer_plugin: plugin.to_owned(),
                cached_tokens: usage.cached_tokens,
                offload_tokens: usage.offload_tokens,
            })
        }
        Answer::Failed(failure) => generate_event::Event::Failed(write_failure(failure)),
    };
    proto::GenerateEvent { event: Some(event) }
}

fn write_token(token: &Sampled) -> proto::Token {
    let top = token.top.iter().map(|(token, logprob)| proto::TopToken { token: *token, logprob: *logprob });
    proto::Token { token: token.token, logprob: token.logprob, top: top.collect() }
}

/// Writes a failure.
#[must_use]
pub fn write_failure(failure: &Failure) -> proto::Failed {
    proto::Failed {
        code: failure.code.as_str().to_owned(),
        message: failure.message.clone(),
        retryable: failure.retryable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_room_message_survives_the_wire() {
        let bodies = [
            Body::Reserve(Reserve {
                pages: vec![PageId(3), PageId(1)],
                window: vec![PageId(2), PageId(9), PageId(0)],
                decode_prefix_len: 16,
                prompt_tokens: 40,
                aux_slot: 2,
                namespace: u64::MAX,
            }),
            Body::Reserved,
            Body::Refused { message: "no".into(), retryable: true },
            Body::Commit,
            Body::Committed,
            Body::Abort,
            Body::Drained,
            Body::PrefillFailed { message: "broken".into(), retryable: false },
            Body::PrefillFailedSeen,
        ];
        for (id, body) in (1..).zip(bodies) {
            let answers = (id % 2 == 0).then_some(id + 7);
            let message = Message { id, answers, room: Room(u64::MAX - id), attempt: 2, body };
            assert_eq!(read_message(write_message(&message)), Ok(message));
        }
        assert!(read_message(proto::ControlMessage::default()).is_err());
    }

    #[test]
    fn settings_of_sampling_survive_the_wire_and_those_that_change_nothing_are_none() {
        let plain = proto::Sampling { temperature: 0.5, top_p: 1.0, seed: 4, ..proto::Sampling::default() };
        let request = |sampling| proto::GenerateRequest {
            prompt: vec![1, 2],
            answered: 1,
            priority: -7,
            client: 1_500,
            sampling: Some(sampling),
            ..proto::GenerateRequest::default()
        };
        let read = read_request(request(plain.clone())).unwrap();
        assert_eq!((read.answered, read.priority, &read.sampling.shaping), (1, -7, &None));
        assert_eq!(read.client, 1_500);
        // Without `min_tokens`, end tokens are not held back, so they are not read.
        let without = proto::Sampling { end_tokens: vec![3], ..plain.clone() };
        assert_eq!(read_request(request(without)).unwrap().sampling.shaping, None);
        let full = proto::Sampling {
            min_p: 0.25,
            presence_penalty: 1.0,
            frequency_penalty: -1.0,
            repetition_penalty: 1.5,
            min_tokens: 2,
            end_tokens: vec![3],
            logit_bias: vec![proto::TokenBias { token: 5, bias: -2.0 }],
            allowed_tokens: vec![6],
            bad_words: vec![proto::TokenSequence { tokens: vec![7, 8] }],
            ..plain
        };
        let read = read_request(request(full)).unwrap().sampling;
        let expected = Shaping {
            presence_penalty: 1.0,
            frequency_penalty: -1.0,
            repetition_penalty: 1.5,
            min_tokens: 2,
            end_tokens: vec![3],
            logit_bias: vec![(5, -2.0)],
            allowed_tokens: vec![6],
            bad_words: vec![vec![7, 8]],
        };
        assert_eq!((read.min_p, read.shaping.as_deref()), (0.25, Some(&expected)));
    }
}

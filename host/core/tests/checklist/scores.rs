//! Log probabilities of prompts: what is computed, what clients are told, and what stays in the cache.

use host_core::message::{Body, Reserve};
use host_core::request::{FailureCode, Request};
use host_core::{Config, Event, Role, Room};
use host_sim::{Leg, PAGE, peer};

use super::leg::{config, tokens};

/// A request for the log probabilities of a prompt.
fn scoring(leg: &Leg, room: u64, prompt: &[u32]) -> Request {
    Request { scores: Some(3), prefill: None, ..leg.request(room, prompt, 1) }
}

/// Every token of a prompt but the first, with its position.
fn positions(prompt: &[u32]) -> Vec<(u32, u32)> {
    (0..).zip(prompt.iter().copied()).skip(1).collect()
}

/// Computes everything. Returns the number of tokens of each batch.
fn computed(leg: &mut Leg) -> Vec<usize> {
    let mut counts = Vec::new();
    while let Some(batch) = leg.batch.clone() {
        assert!(batch.sequences.iter().all(|sequence| sequence.sample.is_none()), "nothing is drawn");
        counts.push(batch.tokens());
        leg.compute();
    }
    counts
}

#[test]
fn the_worker_that_computes_prompts_tells_of_each_token_once_and_keeps_the_pages() {
    for role in [Role::Aggregated, Role::Prefill] {
        let mut leg = Leg::with(Config { chunk_tokens: 1000, max_tokens: 1000, ..config(role, 200) });
        let prompt = tokens(0..300);
        for room in [1, 2] {
            leg.send(scoring(&leg, room, &prompt));
            // The logits of all tokens of a batch are in memory, so a batch has few of them. What is cached is computed again.
            assert_eq!(computed(&mut leg), [128, 128, 44], "{role:?}");
            assert_eq!(leg.scored[&Room(room)], positions(&prompt), "{role:?}");
            assert_eq!(leg.finished.last(), Some(&Room(room)));
        }
        assert_eq!(leg.stats().cached_tokens, 0);
        if role == Role::Aggregated {
            leg.submit(3, &prompt, 1);
            assert_eq!(leg.batch.as_ref().unwrap().tokens(), PAGE, "the answer finds the pages");
            leg.compute_all();
        }
        leg.at_rest();
    }
}

/// Tokens that each batch scores and draws, until all is computed.
fn scored_and_drawn(leg: &mut Leg) -> Vec<(usize, usize)> {
    let mut counts = Vec::new();
    while let Some(batch) = leg.batch.clone() {
        let scored = batch.sequences.iter().filter(|sequence| sequence.scored.is_some());
        let drawn = batch.sequences.iter().filter(|sequence| sequence.sample.is_some()).count();
        counts.push((scored.map(|sequence| sequence.tokens.len()).sum(), drawn));
        leg.compute();
    }
    counts
}

#[test]
fn several_prompts_share_the_tokens_that_a_batch_may_score_and_answers_go_on_beside_them() {
    let mut leg = Leg::with(Config { chunk_tokens: 1000, max_tokens: 1000, ..config(Role::Aggregated, 200) });
    let prompts = [tokens(0..100), tokens(100..200), tokens(200..201)];
    leg.enqueue(9, &tokens(300..310), 3);
    for (room, prompt) in prompts.iter().enumerate() {
        leg.hear(Event::Submit(scoring(&leg, room as u64, prompt)));
    }
    leg.events([]);
    // Scoring takes about as long as drawing, so few tokens are scored beside an answer. A prompt of one token is the seventeenth.
    assert_eq!(scored_and_drawn(&mut leg), [(128, 1), (17, 1), (16, 1), (40, 0)]);
    for (room, prompt) in prompts.iter().enumerate() {
        let told = leg.scored.get(&Room(room as u64)).cloned().unwrap_or_default();
        assert_eq!(told, positions(prompt));
    }
    assert_eq!((leg.finished.len(), leg.emitted[&Room(9)].len()), (4, 3));
    leg.at_rest();
}

#[test]
fn prompts_that_would_only_wait_in_the_steps_wait_in_the_queue_and_hold_nothing() {
    let mut leg = Leg::with(Config {
        chunk_tokens: 1000,
        max_tokens: 1000,
        max_batch: 3,
        max_running: 4,
        ..config(Role::Aggregated, 200)
    });
    for room in 0..6 {
        leg.hear(Event::Submit(scoring(&leg, room, &tokens(0..100))));
    }
    leg.enqueue(9, &tokens(300..310), 1);
    leg.events([]);
    let rooms = |leg: &Leg| -> Vec<u64> {
        leg.batch.iter().flat_map(|batch| &batch.sequences).map(|sequence| sequence.room.0).collect()
    };
    assert_eq!((rooms(&leg), leg.stats().queued), (vec![0, 1, 9], 4), "a step scores 128 tokens");
    leg.compute_all();
    assert_eq!(leg.finished.len(), 7);
    leg.at_rest();
}

#[test]
fn a_preempted_request_is_told_again_what_it_was_told() {
    let mut leg = Leg::with(Config {
        chunk_tokens: 4,
        reserved_decode_tokens: 1,
        radix_cache: None,
        ..config(Role::Aggregated, 12)
    });
    leg.submit(1, &tokens(0..4), 30);
    let prompt = tokens(100..136);
    leg.send(scoring(&leg, 2, &prompt));
    leg.compute_all();
    assert!(leg.stats().retractions > 0, "the pool is too small for both");
    let told = &leg.scored[&Room(2)];
    assert!(told.len() > prompt.len(), "{told:?}");
    assert!(told.ends_with(&positions(&prompt)), "{told:?}");
    assert_eq!(leg.finished.len(), 2);
    leg.at_rest();
}

#[test]
fn a_preempted_request_goes_on_behind_what_the_cache_has_of_it() {
    let mut leg =
        Leg::with(Config { chunk_tokens: 4, reserved_decode_tokens: 1, ..config(Role::Aggregated, 12) });
    leg.submit(1, &tokens(0..4), 30);
    let prompt = tokens(100..136);
    leg.send(scoring(&leg, 2, &prompt));
    leg.compute_all();
    assert!(leg.stats().retractions > 0, "the pool is too small for both");
    let told = &leg.scored[&Room(2)];
    assert!(told.windows(2).all(|pair| pair[1].0 <= pair[0].0 + 1), "nothing is left out: {told:?}");
    // The answer has taken all of its pages but three.
    assert_eq!((told[31], told[32], told.last()), ((32, 132), (13, 113), Some(&(35, 135))));
    leg.at_rest();
}

#[test]
fn others_with_the_same_prompt_do_not_wait_for_it() {
    let mut leg = Leg::with(Config { chunk_tokens: 1000, max_tokens: 1000, ..config(Role::Aggregated, 300) });
    let prompt = tokens(0..400);
    leg.send(scoring(&leg, 1, &prompt));
    leg.submit(2, &prompt, 1);
    leg.compute();
    let batch = leg.batch.as_ref().unwrap();
    assert!(batch.sequences.iter().any(|sequence| sequence.room == Room(2)), "it computes the prompt itself");
    leg.compute_all();
    leg.at_rest();
}

#[test]
fn decode_refuses_and_prefill_sends_nothing_of_such_a_request() {
    let mut decode = Leg::with(config(Role::Decode, 64));
    decode.send(Request { prefill: peer(host_sim::PEER), ..scoring(&decode, 1, &tokens(0..9)) });
    let failure = &decode.failed[&Room(1)];
    assert_eq!(failure.code, FailureCode::Invalid);
    assert!(failure.message.contains("ask a prefill worker"), "{failure:?}");

    let reserve = |prompt: usize| Reserve {
        pages: (0..prompt.div_ceil(PAGE) as u32).map(host_core::PageId).collect(),
        window: Vec::new(),
        decode_prefix_len: 0,
        prompt_tokens: prompt as u32,
        aux_slot: 0,
        namespace: host_core::radix::NamespaceKey::default().fingerprint(),
    };
    // The reserve comes behind the request, and before it.
    for before in [false, true] {
        let mut prefill = Leg::with(config(Role::Prefill, 64));
        let request = scoring(&prefill, 1, &tokens(0..9));
        if before {
            prefill.message(1, 1, Body::Reserve(reserve(9)));
            prefill.send(request);
        } else {
            prefill.send(request);
            prefill.message(1, 1, Body::Reserve(reserve(9)));
        }
        let refused = prefill.sent.iter().any(|message| matches!(&message.body, Body::Refused { message, retryable: false } if message.contains("log probabilities alone")));
        assert!(refused, "before: {before}: {:?}", prefill.sent);
        assert!(prefill.writes.is_empty());
    }
}

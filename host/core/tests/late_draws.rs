//! Sequences that do not draw in a step, because the tokens that may follow are not known in time.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

use host_core::window::WindowShape;
use host_core::{Batch, Config, Event, Role, Room, SequenceOutput, Undrawn};
use host_sim::Leg;

fn config() -> Config {
    Config { page_tokens: 2, max_tokens: 1_000, ..host_sim::config(Role::Aggregated, 40) }
}

/// Computes the next batch, in which these rooms draw too late.
fn late(worker: &mut Leg, rooms: &[u64]) -> Batch {
    worker.compute_late(|room| rooms.contains(&room.0)).unwrap()
}

fn of(batch: &Batch, room: u64) -> (u32, Vec<u32>) {
    let sequence = batch.sequences.iter().find(|sequence| sequence.room.0 == room).unwrap();
    (sequence.start, sequence.tokens.clone())
}

#[test]
fn one_sits_a_step_out_and_the_others_go_on() {
    let mut worker = Leg::with(config());
    worker.enqueue(1, &[3; 5], 3);
    worker.submit(2, &[4; 5], 3);
    while worker.emitted.len() < 2 {
        late(&mut worker, &[]);
    }
    let told = |worker: &Leg| [1, 2].map(|room| worker.emitted[&Room(room)].len());
    let before = told(&worker);
    let first = late(&mut worker, &[1]);
    assert_eq!(told(&worker), [before[0], before[1] + 1]);
    // The late sequence computes its last token again, in each step until the draw is in time.
    let second = late(&mut worker, &[1]);
    assert_eq!(of(&first, 1), of(&second, 1));
    assert_eq!(of(&second, 1).1.len(), 1);
    let third = late(&mut worker, &[]);
    assert_eq!(of(&second, 1), of(&third, 1));
    while worker.batch.is_some() {
        late(&mut worker, &[]);
    }
    assert_eq!(told(&worker), [3, 3]);
    assert_eq!(worker.stats().late_draws, 2);
    // Five tokens of the prompt, and two of the answer, of each.
    assert_eq!((worker.stats().prefill_tokens, worker.stats().decode_tokens), (10, 4));
    worker.at_rest();
}

#[test]
fn a_prompt_whose_first_token_is_late_is_complete_when_it_is_drawn() {
    let mut worker = Leg::with(config());
    worker.submit(1, &[3; 5], 2);
    assert_eq!(of(&late(&mut worker, &[1]), 1), (0, vec![3; 5]));
    assert!(worker.begun.is_empty());
    assert_eq!(of(&late(&mut worker, &[]), 1), (4, vec![3]));
    assert_eq!((worker.begun.as_slice(), worker.emitted[&Room(1)].len()), ([Room(1)].as_slice(), 1));
    late(&mut worker, &[]);
    worker.at_rest();
}

#[test]
fn one_whose_client_has_all_it_wants_ends_with_the_step_that_was_late() {
    let mut worker = Leg::with(config());
    worker.submit(1, &[3; 5], 20);
    late(&mut worker, &[]);
    worker.hear(Event::EndAnswer(Room(1)));
    assert!(worker.finished.is_empty(), "the batch still writes its pages");
    late(&mut worker, &[1]);
    assert_eq!(worker.finished, [Room(1)]);
    worker.at_rest();
}

#[test]
fn a_state_cannot_take_a_token_in_twice() {
    let mut worker = Leg::with(Config { window: Some(WindowShape::state(1)), ..config() });
    worker.submit(1, &[3; 5], 20);
    late(&mut worker, &[]);
    late(&mut worker, &[1]);
    assert!(worker.failed[&Room(1)].message.contains("drew no token"), "{:?}", worker.failed);
    worker.at_rest();
}

#[test]
fn what_a_late_guess_had_is_given_back() {
    let mut worker = Leg::with(Config { draft_tokens: 6, ..config() });
    worker.submit(1, &[3; 5], 40);
    while worker.batch.as_ref().unwrap().sequences[0].draft().len() < 5 {
        late(&mut worker, &[]);
    }
    let batch = worker.batch.take().unwrap();
    let known = batch.sequences[0].known();
    let (drafted, right) = (worker.stats().drafted_tokens, worker.stats().drafts_right);
    let outputs = [SequenceOutput {
        room: Room(1),
        sampled: Vec::new(),
        undrawn: Some(Undrawn::Late),
        scored: Vec::new(),
    }];
    worker.hear(Event::BatchDone(outputs.to_vec()));
    assert_eq!(worker.stats().pool.held, known.div_ceil(2));
    // A late draw says nothing about the drafted tokens.
    assert_eq!((worker.stats().drafted_tokens, worker.stats().drafts_right), (drafted, right));
    worker.events([]);
    // Two draws are in time, and the draw behind the second drafted token is late: one drafted token is known to be right.
    let batch = worker.batch.take().unwrap();
    assert_eq!(batch.sequences[0].known(), known);
    let mut outputs = worker.outputs(&batch);
    outputs[0].sampled.truncate(2);
    outputs[0].undrawn = Some(Undrawn::Late);
    worker.event(Event::BatchDone(outputs));
    assert_eq!((worker.stats().drafted_tokens, worker.stats().drafts_right), (drafted + 1, right + 1));
    assert_eq!(worker.batch.as_ref().unwrap().sequences[0].known(), known + 2);
    assert_eq!(worker.stats().late_draws, 2);
    while worker.batch.is_some() {
        late(&mut worker, &[]);
    }
    assert_eq!(worker.emitted[&Room(1)], [9; 40]);
    worker.at_rest();
}

#[test]
fn a_worker_that_sends_pages_draws_in_time() {
    let mut worker = Leg::with(Config { role: Role::Prefill, ..config() });
    worker.submit(1, &[3; 5], 1);
    worker.reserve(1, &[3; 5], 0);
    late(&mut worker, &[1]);
    assert!(worker.failed[&Room(1)].message.contains("drew no token"), "{:?}", worker.failed);
}

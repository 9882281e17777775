//! What a draw depends on: the same tokens before it give the same draw, also after a preemption or in another try.

use std::collections::BTreeMap;

use host_core::request::Request;
use host_core::{Config, Draw, Event, Role, Room, Sampling, Shaping};
use host_sim::Leg;

fn shaped() -> Sampling {
    let shaping = Shaping { repetition_penalty: 1.5, ..Shaping::default() };
    Sampling { shaping: Some(Box::new(shaping)), seed: 3, ..Sampling::GREEDY }
}

fn worker(pages: u32) -> Leg {
    let config = host_sim::config(Role::Aggregated, pages);
    let config = Config { page_tokens: 2, max_tokens: 1_000, reserved_decode_tokens: 1, ..config };
    let mut leg = Leg::with(config);
    leg.draw = |sequence, _| 100 + sequence.end() as u32;
    leg
}

fn submit(worker: &mut Leg, room: u64, prompt: &[u32], answered: u32, answer: u32) {
    let request = worker.request(room, prompt, answer);
    worker.hear(Event::Submit(Request { answered, sampling: shaped(), ..request }));
}

/// The draws of a room, by their positions.
fn draws(worker: &mut Leg, room: u64) -> BTreeMap<usize, Draw> {
    let mut draws = BTreeMap::new();
    for _ in 0..500 {
        if worker.finished.contains(&Room(room)) {
            return draws;
        }
        let Some(batch) = worker.step() else { continue };
        for sequence in batch.sequences.into_iter().filter(|sequence| sequence.room == Room(room)) {
            let end = sequence.end();
            draws.extend(sequence.sample.map(|draw| (end, draw)));
        }
    }
    panic!("room {room} did not end");
}

#[test]
fn a_preempted_request_draws_by_the_same_tokens() {
    let alone = {
        let mut worker = worker(100);
        submit(&mut worker, 2, &[7; 8], 0, 12);
        draws(&mut worker, 2)
    };
    assert_eq!(alone[&8], Draw { sampling: shaped(), prompt: vec![7; 8], output: vec![] });
    assert_eq!(alone[&10], Draw { sampling: shaped(), prompt: vec![7; 8], output: vec![108, 109] });
    let mut worker = worker(14);
    submit(&mut worker, 1, &[1; 6], 0, 14);
    submit(&mut worker, 2, &[7; 8], 0, 12);
    let preempted = draws(&mut worker, 2);
    assert!(worker.stats().retractions > 0, "nothing was preempted");
    assert_eq!(preempted, alone);
}

#[test]
fn a_try_that_goes_on_with_an_answer_draws_by_the_same_tokens() {
    let mut whole = worker(100);
    submit(&mut whole, 1, &[7; 8], 0, 12);
    let whole = draws(&mut whole, 1);
    let mut resumed = worker(100);
    let prompt = [vec![7; 8], vec![108, 109, 110]].concat();
    submit(&mut resumed, 1, &prompt, 3, 9);
    let resumed = draws(&mut resumed, 1);
    assert_eq!(resumed.len(), 9);
    assert!(resumed.iter().all(|(position, draw)| *draw == whole[position]), "{resumed:?}");
}

#[test]
fn tokens_are_given_only_to_settings_that_depend_on_them() {
    let next = |sampling: &Sampling| Draw::next(sampling, &[7; 8], 0, &[5]);
    assert_eq!(next(&Sampling::GREEDY), Draw::from(Sampling::GREEDY));
    let presence = Shaping { presence_penalty: 1.0, ..Shaping::default() };
    let presence = Sampling { shaping: Some(Box::new(presence)), ..Sampling::GREEDY };
    let draw = next(&presence);
    assert_eq!((draw.prompt, draw.output), (vec![], vec![5]));
}

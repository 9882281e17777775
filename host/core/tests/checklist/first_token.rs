//! The first token of an answer, which prefill draws.

use host_core::request::FailureCode;
use host_core::{Config, Role, Room};
use host_sim::{DRAWN, Leg};

use super::leg::{config, tokens};

#[test]
fn one_that_ends_the_answer_leaves_its_pages_to_a_request_that_waits() {
    let mut leg = Leg::with(Config { max_batch: 1, ..config(Role::Decode, 6) });
    for (room, length, count) in [(1, 8, 2), (2, 8, 1), (3, 24, 1)] {
        leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + length), count);
    }
    // The second request gets its first token once the first one has ended. The third one needs all pages.
    leg.deliver(1);
    leg.deliver(2);
    leg.compute();
    assert_eq!(leg.finished, [Room(1), Room(2)]);
    // No further event follows that would make the worker admit requests again.
    assert!(leg.reserves.contains_key(&Room(3)), "it waits for nothing");
}

#[test]
fn one_that_the_model_does_not_have_ends_its_own_request_and_no_other() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    for room in 1..=3 {
        leg.submit(room, &tokens(room as u32 * 100..room as u32 * 100 + 8), 3);
        leg.arrive(room);
    }
    leg.verified(1, true);
    leg.found(2, true, 1_000);
    leg.found(3, true, 999);
    let failure = &leg.failed[&Room(2)];
    assert_eq!(failure.code, FailureCode::Transfer);
    assert!(failure.message.contains("token 1000") && failure.message.contains("end at 999"), "{failure:?}");
    // An executor cannot compute a batch with such a token for any request.
    let mut steps = 0;
    while let Some(batch) = &leg.batch {
        let fed: Vec<u32> = batch.sequences.iter().flat_map(|sequence| sequence.tokens.clone()).collect();
        assert!(fed.iter().all(|token| [DRAWN, 999].contains(token)), "{fed:?}");
        leg.compute();
        steps += 1;
    }
    assert!(steps > 0);
    leg.drained(2);
    assert_eq!(leg.finished, [Room(1), Room(3)]);
    leg.at_rest();
}

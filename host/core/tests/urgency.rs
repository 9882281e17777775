//! Requests with priorities: which goes first, and that none waits for ever.

use std::time::Duration;

use host_core::radix::Policy;
use host_core::request::Request;
use host_core::{Config, Role, Room};
use host_sim::Leg;

/// A worker without a transfer, with pages of one token, in which one request of 8 pages runs at a time.
fn worker() -> Leg {
    let config = host_sim::config(Role::Aggregated, 10);
    Leg::with(Config { page_tokens: 1, max_tokens: 10, vocabulary: 10, chunk_tokens: 8, ..config })
}

fn submit(worker: &mut Leg, room: u64, priority: i32) {
    let request = worker.request(room, &[1; 6], 3);
    worker.hear(host_core::Event::Submit(Request { priority, ..request }));
}

/// Runs until so many have ended.
fn run(worker: &mut Leg, requests: usize) -> Vec<u64> {
    for _ in 0..1_000 {
        if worker.finished.len() >= requests {
            break;
        }
        worker.step();
    }
    worker.finished.iter().map(|room| room.0).collect()
}

#[test]
fn smaller_numbers_go_first_and_equal_ones_in_order_of_arrival() {
    let mut worker = worker();
    submit(&mut worker, 1, 0);
    worker.step();
    for (room, priority) in [(2, 5), (3, 0), (4, -2), (5, 0), (6, 5), (7, -2)] {
        submit(&mut worker, room, priority);
    }
    assert_eq!(run(&mut worker, 7), [1, 4, 7, 3, 5, 2, 6]);
}

#[test]
fn without_numbers_they_go_in_order_of_arrival() {
    let mut worker = worker();
    for room in 1..6 {
        submit(&mut worker, room, 0);
    }
    assert_eq!(run(&mut worker, 5), [1, 2, 3, 4, 5]);
}

#[test]
fn a_request_that_waits_goes_before_more_urgent_ones_that_came_much_later() {
    let mut worker = worker();
    submit(&mut worker, 1, 3);
    let mut urgent = 100;
    for _ in 0..200 {
        // More urgent ones never run out.
        while worker.stats().queued < 3 {
            submit(&mut worker, urgent, 0);
            urgent += 1;
        }
        worker.step();
        worker.wait(Duration::from_millis(500));
        if worker.finished.contains(&Room(1)) {
            assert!(worker.finished.len() > 5, "it went at once");
            return;
        }
    }
    panic!("it starved: {:?}", worker.finished);
}

#[test]
fn the_least_urgent_request_is_preempted() {
    for (first, second, stays) in [(0, 1, 1), (1, 0, 2), (-1, -2, 2)] {
        let config = host_sim::config(Role::Aggregated, 14);
        let config = Config { page_tokens: 2, max_tokens: 1_000, reserved_decode_tokens: 1, ..config };
        let mut worker = Leg::with(config);
        for (room, priority) in [(1, first), (2, second)] {
            let request = worker.request(room, &[room as u32; 8], 12);
            worker.hear(host_core::Event::Submit(Request { priority, ..request }));
        }
        while worker.stats().retractions == 0 {
            worker.step().expect("neither ended without a preemption");
        }
        let batch = worker.step().unwrap();
        assert_eq!(batch.sequences[0].room, Room(stays), "priorities {first} and {second}");
        assert_eq!(run(&mut worker, 2).len(), 2);
    }
}

#[test]
fn the_last_request_that_runs_goes_on_although_one_that_is_ready_is_more_urgent() {
    let config = host_sim::config(Role::Decode, 6);
    let mut worker = Leg::with(Config { max_batch: 1, reserved_decode_tokens: 1, ..config });
    for (room, priority, count) in [(1, 1, 12), (2, 0, 2)] {
        let request = worker.request(room, &[room as u32; 8], count);
        worker.send(Request { priority, ..request });
        worker.deliver(room);
    }
    while worker.finished.is_empty() {
        worker.step().expect("nothing is computed, and nothing else will happen");
    }
    assert_eq!((worker.finished[0], worker.stats().retractions), (Room(1), 1));
}

#[test]
fn what_an_urgent_request_has_left_in_the_cache_stays_longest_under_that_policy() {
    for (policy, stays) in [(Policy::Priority, true), (Policy::Lru, false)] {
        let config = host_sim::config(Role::Aggregated, 12);
        let mut worker =
            Leg::with(Config { radix_cache: Some(policy), vocabulary: 100, chunk_tokens: 32, ..config });
        let mut ask = |room: u64, token: u32, priority: i32| {
            let request = worker.request(room, &[token; 12], 1);
            worker.hear(host_core::Event::Submit(Request { priority, ..request }));
            let before = worker.stats().cached_tokens;
            for _ in 0..4 {
                worker.step();
            }
            assert!(worker.finished.contains(&Room(room)));
            worker.stats().cached_tokens - before
        };
        ask(1, 1, -5);
        for room in 2..8 {
            ask(room, room as u32, 0);
        }
        assert_eq!(ask(9, 1, 0) > 0, stays, "{policy:?}");
    }
}

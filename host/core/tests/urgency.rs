//! Requests with priorities, and of clients with many: which goes first, and that none waits for ever.

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

/// The same for a request that counts as having come so much later.
fn submit_behind(worker: &mut Leg, room: u64, behind: Duration) {
    let request = worker.request(room, &[1; 6], 3);
    worker.hear(host_core::Event::Submit(Request { behind, ..request }));
}

const SECOND: Duration = Duration::from_secs(1);

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
fn a_request_of_another_client_goes_before_the_backlog_of_one_with_many() {
    let mut worker = worker();
    for room in 1..8 {
        submit_behind(&mut worker, room, SECOND * (room as u32 - 1));
        worker.step();
    }
    worker.wait(SECOND * 5 / 2);
    // Another client's, of which the second has been sent at the same time.
    submit_behind(&mut worker, 20, Duration::ZERO);
    submit_behind(&mut worker, 21, SECOND);
    assert_eq!(run(&mut worker, 9), [1, 2, 3, 20, 4, 21, 5, 6, 7]);
}

#[test]
fn with_priorities_it_goes_before_what_is_as_urgent() {
    let mut worker = worker();
    submit(&mut worker, 1, 0);
    worker.step();
    for room in 2..5 {
        submit_behind(&mut worker, room, SECOND * room as u32);
    }
    submit(&mut worker, 5, 1);
    submit(&mut worker, 6, 0);
    submit(&mut worker, 7, -1);
    assert_eq!(run(&mut worker, 7), [1, 7, 6, 2, 3, 4, 5]);
}

#[test]
fn a_request_of_a_client_with_many_goes_when_it_has_waited_as_long_as_it_is_behind() {
    // In seconds. A request moves up by one for each 5 s behind that.
    for (priority, behind, waits) in [(0, 20, 20), (0, 600, 600), (2, 20, 30)] {
        let mut worker = worker();
        let request = worker.request(1, &[1; 6], 3);
        submit(&mut worker, 99, 0);
        worker.step();
        let behind = Duration::from_secs(behind);
        worker.hear(host_core::Event::Submit(Request { priority, behind, ..request }));
        let (since, mut other) = (worker.now, 100);
        while !worker.finished.contains(&Room(1)) {
            // Those of clients with few never run out.
            while worker.stats().queued < 3 {
                submit(&mut worker, other, 0);
                other += 1;
            }
            worker.step();
            worker.wait(Duration::from_millis(500));
            assert!(worker.now.since(since) < Duration::from_secs(waits + 20), "it starved");
        }
        let waited = worker.now.since(since);
        assert!(waited >= Duration::from_secs(waits), "{priority} {behind:?}: it went after {waited:?}");
    }
}

#[test]
fn prompts_are_computed_in_the_same_order() {
    for behind in [Duration::ZERO, SECOND] {
        let config = host_sim::config(Role::Aggregated, 100);
        let mut worker = Leg::with(Config { max_tokens: 100, chunk_tokens: 4, ..config });
        for (room, behind) in [(1, Duration::ZERO), (2, behind), (3, Duration::ZERO)] {
            let request = worker.request(room, &[room as u32; 9], 2);
            worker.hear(host_core::Event::Submit(Request { behind, ..request }));
            worker.step();
        }
        let rooms = if behind.is_zero() { [1, 2, 3] } else { [1, 3, 2] };
        assert_eq!(run(&mut worker, 3), rooms);
    }
}

#[test]
fn what_has_arrived_on_a_decode_worker_joins_in_the_same_order() {
    for (behind, joins) in [(Duration::ZERO, [2, 3]), (SECOND, [3, 2])] {
        let config = host_sim::config(Role::Decode, 100);
        let mut worker = Leg::with(Config { max_tokens: 100, max_batch: 1, ..config });
        for (room, behind) in [(1, Duration::ZERO), (2, behind), (3, Duration::ZERO)] {
            let request = worker.request(room, &[room as u32; 9], 4);
            worker.send(Request { behind, ..request });
        }
        for room in 1..4 {
            worker.deliver(room);
        }
        assert_eq!(run(&mut worker, 3)[1..], joins, "{behind:?}");
    }
}

#[test]
fn of_equally_urgent_requests_one_that_is_far_behind_is_preempted() {
    // The second has the shorter answer. Where neither is twice as far behind, it is preempted.
    for (first, second, stays) in [(0, 0, 1), (0, 8, 1), (8, 0, 2), (8, 9, 1), (9, 8, 1)] {
        let config = host_sim::config(Role::Aggregated, 14);
        let config = Config { page_tokens: 2, max_tokens: 1_000, reserved_decode_tokens: 1, ..config };
        let mut worker = Leg::with(config);
        for (room, behind) in [(1, first), (2, second)] {
            let request = worker.request(room, &[room as u32; 8], 12);
            let behind = Duration::from_secs(behind);
            worker.hear(host_core::Event::Submit(Request { behind, ..request }));
            worker.step();
        }
        while worker.stats().retractions == 0 {
            worker.step().expect("neither ended without a preemption");
        }
        let batch = worker.step().unwrap();
        assert_eq!(batch.sequences[0].room, Room(stays), "behind by {first} and {second} s");
        assert_eq!(run(&mut worker, 2).len(), 2);
    }
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

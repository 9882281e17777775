//! Requests with priorities, and clients with many requests: the order of service, and that no request waits for ever.

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

/// Submits a request of a client.
fn submit_of(worker: &mut Leg, client: u64, room: u64, priority: i32) {
    let request = worker.request(room, &[1; 6], 3);
    worker.hear(host_core::Event::Submit(Request { client, priority, ..request }));
}

/// Runs until so many requests have ended. Returns the ended ones in order.
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
        // More urgent requests never run out.
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
    // The age of the backlog has no effect.
    for waits in [0, 600] {
        let mut worker = worker();
        (1..8).for_each(|room| submit_of(&mut worker, 1, room, 0));
        worker.step();
        worker.wait(Duration::from_secs(waits));
        submit_of(&mut worker, 2, 20, 0);
        submit_of(&mut worker, 2, 21, 0);
        assert_eq!(run(&mut worker, 9), [1, 2, 20, 3, 21, 4, 5, 6, 7]);
    }
    // Requests of unknown clients are served in order of arrival.
    let mut worker = worker();
    (1..8).for_each(|room| submit_of(&mut worker, 0, room, 0));
    worker.step();
    submit_of(&mut worker, 0, 20, 0);
    assert_eq!(run(&mut worker, 8), [1, 2, 3, 4, 5, 6, 7, 20]);
}

#[test]
fn with_priorities_it_goes_before_what_is_as_urgent() {
    let mut worker = worker();
    submit_of(&mut worker, 1, 1, 0);
    worker.step();
    (2..5).for_each(|room| submit_of(&mut worker, 1, room, 0));
    submit_of(&mut worker, 2, 5, 1);
    submit_of(&mut worker, 2, 6, 0);
    submit_of(&mut worker, 1, 7, -1);
    assert_eq!(run(&mut worker, 7), [1, 7, 2, 6, 3, 4, 5]);
    // Without priorities in the queue, only the turns of clients count.
    (8..11).for_each(|room| submit_of(&mut worker, 1, room, 0));
    submit_of(&mut worker, 2, 11, 0);
    assert_eq!(run(&mut worker, 11)[7..], [8, 11, 9, 10]);
}

#[test]
fn a_full_queue_sends_the_last_of_a_backlog_away_and_no_request_of_another_client() {
    let config = host_sim::config(Role::Aggregated, 10);
    let config =
        Config { page_tokens: 1, max_tokens: 10, vocabulary: 10, chunk_tokens: 8, max_queued: 3, ..config };
    let mut worker = Leg::with(config);
    submit_of(&mut worker, 1, 1, 0);
    worker.step();
    (2..6).for_each(|room| submit_of(&mut worker, 1, room, 0));
    submit_of(&mut worker, 2, 6, 0);
    submit_of(&mut worker, 3, 7, 0);
    // The turn of this request would come after all queued ones.
    submit_of(&mut worker, 2, 8, 0);
    submit_of(&mut worker, 4, 9, 5);
    let failed: Vec<u64> = worker.failed.keys().map(|room| room.0).collect();
    assert_eq!(failed, [3, 4, 5, 8, 9]);
    assert_eq!(run(&mut worker, 4), [1, 2, 6, 7]);
}

#[test]
fn less_urgent_requests_gather_no_turns_while_they_wait() {
    let mut worker = worker();
    submit_of(&mut worker, 1, 1, 0);
    worker.step();
    // A less urgent backlog, and then requests of other clients for longer than the backlog takes to become as urgent.
    (2..7).for_each(|room| submit_of(&mut worker, 2, room, 1));
    for room in 100..120 {
        submit_of(&mut worker, room, room, 0);
        run(&mut worker, (room - 99) as usize);
    }
    assert_eq!(worker.finished.len(), 20);
    worker.wait(Duration::from_secs(6));
    submit_of(&mut worker, 3, 7, 0);
    let order = &run(&mut worker, 27)[20..];
    let newcomer = order.iter().position(|room| *room == 7).unwrap();
    assert!(newcomer <= 3, "it waited for the backlog: {order:?}");
    assert_eq!(order.len(), 7);
}

#[test]
fn a_client_s_batch_does_not_delay_what_it_asks_for_beside() {
    let mut worker = worker();
    submit_of(&mut worker, 1, 1, 0);
    worker.step();
    (2..6).for_each(|room| submit_of(&mut worker, 1, room, 100));
    (6..9).for_each(|room| submit_of(&mut worker, 2, room, 0));
    submit_of(&mut worker, 1, 9, 0);
    assert_eq!(run(&mut worker, 9), [1, 6, 9, 7, 8, 2, 3, 4, 5]);
}

#[test]
fn a_backlog_is_served_although_requests_of_others_never_run_out() {
    let mut worker = worker();
    (1..6).for_each(|room| submit_of(&mut worker, 1, room, 0));
    let mut other = 100;
    while !worker.finished.contains(&Room(5)) {
        // Each request has a client of its own.
        while worker.stats().queued < 8 {
            submit_of(&mut worker, other, other, 0);
            other += 1;
        }
        worker.step();
        assert!(worker.finished.len() < 100, "it starved: {:?}", worker.finished);
    }
    assert!(worker.finished.len() > 10, "the others waited: {:?}", worker.finished);
}

#[test]
fn a_request_that_is_resumed_goes_on_before_all_that_have_not_begun() {
    let mut worker = worker();
    (1..5).for_each(|room| submit_of(&mut worker, 1, room, 0));
    worker.step();
    submit_of(&mut worker, 2, 5, 0);
    let request = worker.request(6, &[1; 6], 3);
    worker.hear(host_core::Event::Submit(Request { client: 1, answered: 2, ..request }));
    assert_eq!(run(&mut worker, 6), [1, 6, 2, 5, 3, 4]);
}

#[test]
fn prompts_are_computed_in_the_same_order() {
    for (client, other, rooms) in [(0, 0, [1, 2, 3, 4]), (1, 2, [1, 2, 4, 3])] {
        let config = host_sim::config(Role::Aggregated, 100);
        let mut worker = Leg::with(Config { max_tokens: 100, chunk_tokens: 4, ..config });
        for (room, client) in [(1, client), (2, client), (3, client), (4, other)] {
            let request = worker.request(room, &[room as u32; 9], 2);
            worker.hear(host_core::Event::Submit(Request { client, ..request }));
            if room == 1 {
                worker.step();
            }
        }
        assert_eq!(run(&mut worker, 4), rooms);
    }
}

#[test]
fn a_request_waits_for_no_shared_prompt_of_another_client_whose_turn_is_later() {
    // If both have the same client, the fourth request waits for the third, which computes the same prompt.
    for (other, rooms) in [(1, [1, 2, 3, 4]), (2, [1, 2, 4, 3])] {
        let config = host_sim::config(Role::Aggregated, 100);
        let config = Config { max_tokens: 100, chunk_tokens: 4, radix_cache: Some(Policy::Lru), ..config };
        let mut worker = Leg::with(config);
        for (room, client, prompt) in [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, other, 3)] {
            let request = worker.request(room, &[prompt; 24], 2);
            worker.hear(host_core::Event::Submit(Request { client, ..request }));
            if room != 2 {
                worker.step();
            }
        }
        let waits = worker.stats().queued;
        assert_eq!(waits, usize::from(other == 1), "only of its own client");
        assert_eq!(run(&mut worker, 4), rooms);
    }
}

#[test]
fn what_has_arrived_on_a_decode_worker_joins_in_the_same_order() {
    for (client, other, joins) in [(0, 0, [2, 3, 4]), (1, 2, [4, 2, 3])] {
        let config = host_sim::config(Role::Decode, 100);
        let mut worker = Leg::with(Config { max_tokens: 100, max_batch: 1, ..config });
        for (room, client) in [(1, client), (2, client), (3, client), (4, other)] {
            let request = worker.request(room, &[room as u32; 9], 4);
            worker.send(Request { client, ..request });
        }
        for room in 1..5 {
            worker.deliver(room);
        }
        assert_eq!(run(&mut worker, 4)[1..], joins, "{client} {other}");
    }
}

#[test]
fn of_equally_urgent_requests_one_of_a_client_with_many_is_preempted() {
    // Among clients with equally many requests, the last request is preempted, because its answer is the shortest.
    for (clients, victim) in [([0, 0, 0], 3), ([1, 2, 3], 3), ([1, 1, 2], 2), ([1, 2, 2], 3), ([2, 1, 2], 3)]
    {
        let config = host_sim::config(Role::Aggregated, 20);
        let config = Config { page_tokens: 2, max_tokens: 1_000, reserved_decode_tokens: 1, ..config };
        let mut worker = Leg::with(config);
        for (room, client) in (1..).zip(clients) {
            let request = worker.request(room, &[room as u32; 8], 12);
            worker.hear(host_core::Event::Submit(Request { client, ..request }));
            worker.step();
        }
        while worker.stats().retractions == 0 {
            worker.step().expect("none ended without a preemption");
        }
        let batch = worker.step().unwrap();
        let stay: Vec<u64> = batch.sequences.iter().map(|sequence| sequence.room.0).collect();
        let expected: Vec<u64> = (1..4).filter(|room| *room != victim).collect();
        assert_eq!(stay, expected, "{clients:?}");
        assert_eq!(run(&mut worker, 3).len(), 3);
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
fn a_prompt_in_the_steps_ends_although_more_urgent_ones_never_run_out() {
    let config = host_sim::config(Role::Aggregated, 100);
    let mut worker = Leg::with(Config { max_tokens: 100, chunk_tokens: 4, ..config });
    let ask = |worker: &mut Leg, room: u64, priority: i32| {
        let request = worker.request(room, &[1; 12], 1);
        worker.hear(host_core::Event::Submit(Request { priority, ..request }));
    };
    ask(&mut worker, 1, 3);
    let mut urgent = 100;
    while !worker.finished.contains(&Room(1)) {
        // More urgent prompts, each of three steps, never run out.
        while worker.stats().queued + worker.stats().active < 4 {
            ask(&mut worker, urgent, 0);
            urgent += 1;
        }
        worker.step();
        worker.wait(Duration::from_millis(500));
        assert_eq!(worker.stats().queued, 0, "all are in the steps");
        assert!(worker.now.0 < Duration::from_secs(18), "it starved: {:?}", worker.finished);
    }
    // It became as urgent as the others after three times 5 s.
    assert!(worker.now.0 > Duration::from_secs(15), "it went at once: {:?}", worker.finished);
}

#[test]
fn what_has_arrived_joins_before_more_urgent_requests_that_came_much_later() {
    for (waits, joins) in [(0, [3, 2]), (6, [2, 3])] {
        let config = host_sim::config(Role::Decode, 100);
        let mut worker = Leg::with(Config { max_tokens: 100, max_batch: 1, ..config });
        for (room, priority) in [(1, 0), (2, 1), (3, 0)] {
            let request = worker.request(room, &[room as u32; 9], 4);
            worker.send(Request { priority, ..request });
        }
        for room in 1..4 {
            worker.deliver(room);
        }
        worker.wait(Duration::from_secs(waits));
        assert_eq!(run(&mut worker, 3)[1..], joins, "{waits} s");
    }
}

#[test]
fn a_request_that_has_aged_is_not_preempted_first() {
    for (waits, stays) in [(0, 2), (6, 1)] {
        let config = host_sim::config(Role::Aggregated, 14);
        let config = Config { page_tokens: 2, max_tokens: 1_000, reserved_decode_tokens: 1, ..config };
        let mut worker = Leg::with(config);
        for (room, priority) in [(1, 1), (2, 0)] {
            let request = worker.request(room, &[room as u32; 8], 12);
            worker.hear(host_core::Event::Submit(Request { priority, ..request }));
            worker.step();
        }
        worker.wait(Duration::from_secs(waits));
        while worker.stats().retractions == 0 {
            worker.step().expect("neither ended without a preemption");
        }
        let batch = worker.step().unwrap();
        assert_eq!(batch.sequences[0].room, Room(stays), "{waits} s");
        assert_eq!(run(&mut worker, 2).len(), 2);
    }
}

#[test]
fn two_requests_that_do_not_fit_together_are_not_preempted_in_turns() {
    for priority in 1..4 {
        let config = host_sim::config(Role::Aggregated, 36);
        // Every running request is in each batch.
        let config = Config {
            page_tokens: 2,
            max_tokens: 1_000,
            chunk_tokens: 128,
            reserved_decode_tokens: 1,
            ..config
        };
        let mut worker = Leg::with(config);
        let ask = |worker: &mut Leg, room: u64, priority: i32, count: u32| {
            let request = worker.request(room, &[1; 8], count);
            worker.hear(host_core::Event::Submit(Request { priority, ..request }));
        };
        let mut short = 100;
        let (mut running, mut preempted) = (Vec::<u64>::new(), Vec::<u64>::new());
        // Either needs nearly all pages for 60 steps of half a second.
        for round in 0..140 {
            if round < 2 {
                ask(&mut worker, 1 + round, if round == 0 { priority } else { 0 }, 60);
            }
            // Short answers, as urgent as the second request, never run out.
            let ended = worker.finished.iter().filter(|room| room.0 >= 100).count() as u64;
            while short - 100 - ended < 2 {
                ask(&mut worker, short, 0, 8);
                short += 1;
            }
            worker.wait(Duration::from_millis(500));
            let batch = worker.step();
            let rooms = batch.iter().flat_map(|batch| &batch.sequences).map(|sequence| sequence.room.0);
            let rooms: Vec<u64> = rooms.filter(|room| *room < 100).collect();
            let left = |room: &u64| !rooms.contains(room) && !worker.finished.contains(&Room(*room));
            preempted.extend(running.into_iter().filter(left));
            running = rooms;
        }
        let ended = [1, 2].map(|room| worker.finished.contains(&Room(room)));
        assert_eq!(ended, [true; 2], "priority {priority}, preempted: {preempted:?}");
        let changes = preempted.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!(!preempted.is_empty() && changes <= 1, "priority {priority}, preempted: {preempted:?}");
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

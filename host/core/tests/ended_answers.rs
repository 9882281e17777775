//! Answers that end before their worker knows: at a stop string, which only the router sees.

use host_core::{Config, Event, Role, Room};
use host_sim::Leg;

fn worker(pages: u32) -> Leg {
    let config = host_sim::config(Role::Aggregated, pages);
    Leg::with(Config { page_tokens: 2, max_tokens: 1_000, reserved_decode_tokens: 1, ..config })
}

fn end(worker: &mut Leg, room: u64) {
    worker.hear(Event::EndAnswer(Room(room)));
}

fn is_at_rest(worker: &Leg) {
    let stats = worker.stats();
    assert_eq!((stats.pool.held, stats.pool.quarantined, stats.queued, stats.active), (0, 0, 0, 0));
}

#[test]
fn one_that_decodes_ends_as_finished_and_gives_its_pages_back() {
    let mut worker = worker(40);
    worker.enqueue(1, &[3; 5], 20);
    worker.step();
    worker.step();
    end(&mut worker, 1);
    assert_eq!(worker.finished, [Room(1)]);
    assert!(worker.failed.is_empty());
    assert_eq!((worker.stats().finished, worker.stats().failed), (1, 0));
    is_at_rest(&worker);
}

#[test]
fn one_in_a_batch_ends_with_the_batch_and_its_last_token_is_dropped() {
    let mut worker = worker(40);
    worker.enqueue(1, &[3; 5], 20);
    worker.step();
    worker.wait(std::time::Duration::from_millis(1));
    assert!(worker.batch.is_some(), "it is being computed");
    let told = worker.emitted[&Room(1)].len();
    end(&mut worker, 1);
    assert!(worker.finished.is_empty(), "the batch still writes its pages");
    worker.compute();
    assert_eq!((worker.finished.as_slice(), worker.emitted[&Room(1)].len()), ([Room(1)].as_slice(), told));
    is_at_rest(&worker);
}

#[test]
fn a_preempted_one_ends_in_the_queue() {
    let mut worker = worker(14);
    worker.enqueue(1, &[1; 8], 12);
    worker.enqueue(2, &[2; 8], 12);
    while worker.stats().retractions == 0 {
        worker.step().unwrap();
    }
    // Both answers had begun.
    let batch = worker.step().unwrap();
    let preempted = 3 - batch.sequences[0].room.0;
    end(&mut worker, preempted);
    assert_eq!(worker.finished, [Room(preempted)]);
    for _ in 0..50 {
        worker.step();
    }
    assert_eq!(worker.finished.len(), 2);
    is_at_rest(&worker);
}

#[test]
fn one_without_a_token_and_one_that_is_not_there_are_left_alone() {
    let mut worker = worker(40);
    end(&mut worker, 9);
    worker.enqueue(1, &[3; 5], 2);
    end(&mut worker, 1);
    assert!(worker.finished.is_empty());
    worker.step();
    worker.step();
    assert_eq!(worker.finished, [Room(1)]);
    assert_eq!(worker.emitted[&Room(1)].len(), 2);

    let mut prefill = Leg::with(host_sim::config(Role::Prefill, 40));
    prefill.submit(1, &[3; 5], 1);
    end(&mut prefill, 1);
    assert!(prefill.finished.is_empty() && prefill.failed.is_empty());
}

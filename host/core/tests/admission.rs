//! Which requests get pages when there are not enough for all.

use host_core::{Config, Role, Room};
use host_sim::Leg;

/// A worker without a transfer, with pages of one token, that computes every batch at once.
fn worker(pages: u32) -> Leg {
    let config = host_sim::config(Role::Aggregated, pages);
    Leg::with(Config { page_tokens: 1, max_tokens: pages, vocabulary: 10, chunk_tokens: 4, ..config })
}

/// Submits a request that holds `pages` pages for `steps` steps after its prompt.
fn submit(worker: &mut Leg, room: u64, pages: u32, steps: u32) {
    worker.enqueue(room, &vec![1; (pages + 1 - steps) as usize], steps);
}

#[test]
fn a_small_request_does_not_wait_behind_one_that_lacks_pages() {
    let mut worker = worker(10);
    submit(&mut worker, 1, 6, 6);
    worker.step();
    submit(&mut worker, 2, 8, 2);
    submit(&mut worker, 3, 2, 1);
    worker.step();
    worker.step();
    assert!(worker.finished.contains(&Room(3)), "the small one was held up");
    assert!(!worker.finished.contains(&Room(1)));
}

#[test]
fn a_tick_does_not_look_through_the_whole_queue_for_one_that_fits() {
    for (large, fits) in [(63, true), (64, false)] {
        let mut worker = worker(10);
        submit(&mut worker, 1, 6, 6);
        worker.step();
        for room in 0..large {
            submit(&mut worker, 100 + room, 8, 2);
        }
        submit(&mut worker, 2, 2, 1);
        worker.step();
        worker.step();
        assert_eq!(worker.finished.contains(&Room(2)), fits, "behind {large} that lack pages");
    }
}

#[test]
fn an_endless_stream_of_small_requests_starves_no_large_one() {
    let mut worker = worker(10);
    // Lifetimes differ and more wait than fit, so that 8 pages are never free by chance.
    for room in 10..20 {
        submit(&mut worker, room, 3, 1 + room as u32 % 3);
        worker.step();
    }
    submit(&mut worker, 1, 8, 1);
    let mut small = 20;
    for step in 0..200 {
        for _ in 0..3 {
            submit(&mut worker, small, 3, 1 + small as u32 % 3);
            small += 1;
        }
        worker.step();
        if worker.finished.contains(&Room(1)) {
            let overtook = worker.finished.iter().filter(|room| room.0 >= 20).count();
            println!("admitted in step {step}, after {overtook} later ones");
            assert!(overtook > 0, "nothing was let past: the line stood still from the start");
            assert!(overtook <= 32 + 5, "{overtook} later requests came first");
            return;
        }
    }
    panic!("the large request was starved by {} small ones", worker.finished.len());
}

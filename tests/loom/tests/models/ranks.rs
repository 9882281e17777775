//! The barrier of a worker's ranks.

use host_loom::group::{Broken, seats};
use loom::thread;

use crate::model::every_order;

/// Runs each rank on a thread of its own.
fn ranks<R: Send + 'static>(
    of: usize,
    rank: impl Fn(host_loom::group::Seat) -> R + Copy + Send + 'static,
) -> Vec<R> {
    let mut seats = seats(of).into_iter();
    let first = seats.next().unwrap();
    let others: Vec<_> = seats.map(|seat| thread::spawn(move || rank(seat))).collect();
    let first = rank(first);
    std::iter::once(first).chain(others.into_iter().map(|other| other.join().unwrap())).collect()
}

#[test]
fn every_rank_gets_what_all_ranks_gave_call_by_call() {
    every_order(|| {
        let gathered = ranks(2, |mut seat| {
            let number = seat.rank() as u64;
            let mut turn = seat.turn().unwrap();
            let calls: Vec<_> = (0..3).map(|call| turn.gather(&[10 * call + number]).unwrap()).collect();
            turn.finish();
            calls
        });
        let expected: Vec<_> = (0..3).map(|call| vec![vec![10 * call], vec![10 * call + 1]]).collect();
        assert_eq!(gathered, [expected.clone(), expected]);
    });
}

#[test]
fn a_rank_that_gives_up_frees_those_that_wait_and_the_next_turn_begins_afresh() {
    every_order(|| {
        let ended = ranks(2, |mut seat| {
            let number = seat.rank();
            let mut turn = seat.turn().unwrap();
            let first = if number == 1 { None } else { Some(turn.barrier()) };
            drop(turn);
            // The seat is returned with the results: a dropped seat would break the turn of the other rank.
            let mut turn = seat.turn().unwrap();
            let second = turn.gather(&[number as u64]);
            turn.finish();
            (first, second, seat)
        });
        assert_eq!(ended[0].0, Some(Err(Broken { rank: 1 })));
        for (_, second, _) in &ended {
            assert_eq!(second, &Ok(vec![vec![0], vec![1]]));
        }
    });
}

#[test]
fn a_rank_that_leaves_for_good_is_waited_for_by_none() {
    every_order(|| {
        let ended = ranks(2, |mut seat| {
            if seat.rank() == 1 {
                return Ok(());
            }
            seat.turn().and_then(|mut turn| turn.barrier())
        });
        assert_eq!(ended, [Err(Broken { rank: 1 }), Ok(())]);
    });
}

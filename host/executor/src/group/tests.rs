use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use fastrand::Rng;

use super::*;

/// Runs each rank's `work` on a thread of its own.
fn on_every_rank<R: Send>(ranks: usize, work: impl Fn(&mut Seat) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            seats(ranks).into_iter().map(|mut seat| scope.spawn(move || work(&mut seat))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn columns(widths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let next = |width: &usize| {
        end += width;
        end - width..end
    };
    widths.iter().map(next).collect()
}

#[test]
fn every_rank_gets_all_columns_in_order() {
    for widths in [vec![3], vec![2, 1], vec![0, 4, 0, 3], vec![1, 1, 1, 1, 1, 1, 1, 1]] {
        let columns = columns(&widths);
        let width = columns.last().unwrap().end;
        let expected: Vec<f32> = (0..5 * width).map(|element| element as f32).collect();
        let found = on_every_rank(widths.len(), |seat| {
            let mut whole = vec![9.0; 3];
            for _turn in 0..3 {
                let own = columns[seat.rank()].clone();
                let mut mine: Vec<f32> = (0..5)
                    .flat_map(|row| own.clone().map(move |column| (row * width + column) as f32))
                    .collect();
                let mut turn = seat.turn().unwrap();
                turn.gather_columns(&mut mine, &columns, &mut whole).unwrap();
                turn.finish();
            }
            whole
        });
        for whole in found {
            assert_eq!(whole, expected, "{widths:?}");
        }
    }
}

#[test]
fn rank_0_alone_gets_what_is_gathered_for_it() {
    let columns = columns(&[1, 1, 1]);
    let found = on_every_rank(3, |seat| {
        let (mut mine, mut whole) = (vec![seat.rank() as f32; 2], Vec::new());
        let mut turn = seat.turn().unwrap();
        turn.gather_columns_on_rank_0(&mut mine, &columns, &mut whole).unwrap();
        turn.finish();
        whole
    });
    assert_eq!(found, [vec![0.0, 1.0, 2.0, 0.0, 1.0, 2.0], vec![], vec![]]);
}

#[test]
fn a_rank_that_fails_wakes_those_that_wait_and_the_next_turn_works() {
    let found = on_every_rank(4, |seat| {
        let mut turn = seat.turn().unwrap();
        turn.barrier().unwrap();
        let first = match turn.seat.rank() {
            2 => Ok(vec![]),
            _ => turn.gather(&[1]),
        };
        drop(turn);
        let rank = seat.rank() as u64;
        let mut turn = seat.turn().unwrap();
        let second = turn.gather(&[rank]).unwrap();
        turn.finish();
        (first, second)
    });
    for (rank, (first, second)) in found.into_iter().enumerate() {
        assert!(rank == 2 || first == Err(Broken { rank: 2 }), "rank {rank}: {first:?}");
        assert_eq!(second, [[0], [1], [2], [3]]);
    }
}

#[test]
fn a_rank_that_left_for_good_breaks_all_that_follows() {
    let mut seats = seats(2);
    let (mut stays, leaves) = (seats.remove(0), seats.remove(0));
    let mut turn = stays.turn().unwrap();
    let left = thread::spawn(move || drop(leaves));
    assert_eq!(turn.gather(&[1]), Err(Broken { rank: 1 }));
    drop(turn);
    left.join().unwrap();
    assert_eq!(stays.turn().err(), Some(Broken { rank: 1 }));
}

/// The plan of a turn, which all ranks know beforehand: its calls, and which rank gives up before which call, by a panic or
/// an error.
struct Script {
    calls: u64,
    fails: Option<(usize, u64, bool)>,
}

impl Script {
    fn of(seed: u64, turn: u64, ranks: u64) -> Self {
        let mut random = Rng::with_seed(seed * 1_000_003 + turn);
        let calls = random.u64(1..=6);
        let fails = (random.u64(..3) == 0)
            .then(|| (random.u64(..ranks) as usize, random.u64(..=calls), random.bool()));
        Script { calls, fails }
    }
}

fn play(seat: &mut Seat, script: &Script, seed: u64, delay: &mut Rng) -> Result<(), Broken> {
    let mut turn = seat.turn()?;
    let (rank, ranks) = (turn.seat.rank, turn.seat.ranks);
    for call in 0..=script.calls {
        if script.fails.is_some_and(|(failing, when, _)| (failing, when) == (rank, call)) {
            if script.fails.is_some_and(|(_, _, panics)| panics) {
                // This panics without the message on the terminal.
                std::panic::resume_unwind(Box::new("as the script says"));
            }
            return Err(Broken { rank });
        }
        if call == script.calls {
            break;
        }
        for _ in 0..delay.u64(..3) {
            thread::yield_now();
        }
        let value = |rank: usize| seed ^ (call << 8) ^ rank as u64;
        if call % 2 == 0 {
            let all = turn.gather(&[value(rank)])?;
            assert!((0..ranks).all(|other| all[other] == [value(other)]), "seed {seed}: {all:?}");
        } else {
            let mine = vec![(value(rank) % 4096) as f32; 1 + call as usize];
            turn.each_ranks_floats(&mine, |other, floats| {
                assert!(floats.iter().all(|float| *float == (value(other) % 4096) as f32), "seed {seed}");
            })?;
        }
    }
    turn.finish();
    Ok(())
}

#[test]
fn the_others_go_on_whichever_rank_fails_at_whichever_call() {
    let (results, outcomes): (Sender<String>, _) = channel();
    let broken = AtomicUsize::new(0);
    for seed in 0..60 {
        let ranks = 2 + seed as usize % 7;
        on_every_rank(ranks, |seat| {
            let mut delay = Rng::with_seed(seed ^ (seat.rank() as u64) << 32);
            for number in 0..40 {
                let script = Script::of(seed, number, ranks as u64);
                let rank = seat.rank();
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    play(seat, &script, seed, &mut delay)
                }));
                let right = match (script.fails, outcome) {
                    (None, Ok(Ok(()))) => true,
                    (Some((failing, _, true)), Err(_panic)) => failing == rank,
                    (Some((failing, _, false)), Ok(Err(Broken { rank: by }))) if failing == rank => {
                        by == rank
                    }
                    // If a rank fails behind the last call, the other ranks do not notice.
                    (Some((failing, when, _)), Ok(Ok(()))) => failing != rank && when == script.calls,
                    (Some((failing, _, _)), Ok(Err(Broken { rank: by }))) => failing != rank && by == failing,
                    _ => false,
                };
                broken.fetch_add(usize::from(script.fails.is_some()), Ordering::Relaxed);
                if !right {
                    results.send(format!("seed {seed}, turn {number}, rank {rank} of {ranks}")).unwrap();
                }
            }
        });
    }
    let wrong: Vec<String> = outcomes.try_iter().collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    assert!(broken.into_inner() > 1000);
}

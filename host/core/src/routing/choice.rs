//! The rule over the costs of workers: the least cost wins, and equals take turns.

use super::Policy;
use crate::ids::{Instance, Room};

/// The key by which workers that fit a request are compared. Fields are compared in this order, and the least is
/// chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Preference {
    /// Number of workers that cannot do all that the request needs, such as those of an older release.
    pub unable: u32,
    /// Number of workers that took part in a failed try of this request. They are chosen only if there are no others.
    pub avoided: u32,
    /// Requests on the worker, or by [`Policy::Prefix`] its cost in tokens.
    pub load: u64,
    /// When it was last chosen, so that equals take turns. By [`Policy::Random`] it is the worker's lot.
    pub turn: u64,
}

impl Preference {
    /// The preference of a pair, of which both workers are needed.
    fn both(self, other: Preference) -> Preference {
        Preference {
            unable: self.unable + other.unable,
            avoided: self.avoided + other.avoided,
            load: self.load.saturating_add(other.load),
            // The later turn, as of one worker: with a sum, a pair would always come after a worker that serves alone.
            turn: self.turn.max(other.turn),
        }
    }
}

/// The load of a worker, as a router knows it without the worker's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// Requests that it has, by its last heartbeat.
    pub requests: u64,
    /// Requests of this router on it.
    pub in_flight: u64,
    /// The number of the choice that last took it.
    pub last_pick: u64,
}

impl Policy {
    /// The load of a worker by this policy, given its [cost](super::Accounts::cost) in tokens where caches are followed.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tokens, rounded down")]
    pub fn load(self, cost: Option<f64>, reported: &Reported) -> u64 {
        match (self, cost) {
            (_, Some(tokens)) => tokens as u64,
            // The heartbeat is up to a second old. The requests that this router has sent since are known at once.
            (Policy::LeastLoaded | Policy::Prefix, None) => reported.requests.max(reported.in_flight),
            (Policy::RoundRobin | Policy::Random, None) => 0,
        }
    }

    /// The turn of a worker by this policy. `seed` is any number, for [`Policy::Random`].
    #[must_use]
    pub fn turn(self, reported: &Reported, seed: u64, room: Room, worker: Instance) -> u64 {
        match self {
            Policy::Random => lot(seed, room, worker),
            _ => reported.last_pick,
        }
    }
}

/// The workers of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice<W> {
    /// The worker that computes the prompt, or `None` when the other one does.
    pub prefill: Option<W>,
    /// The worker that answers.
    pub answers: W,
}

/// Chooses among pairs of prefill and decode workers, of which `may_pair` says whether they may work together, and aggregated
/// workers. `None` without candidates. Of full equals the first in the list is chosen.
pub fn choose<W: Copy>(
    prefill: &[(Preference, W)],
    decode: &[(Preference, W)],
    aggregated: &[(Preference, W)],
    may_pair: impl Fn(W, W) -> bool,
) -> Option<Choice<W>> {
    let best = prefill.iter().min_by_key(|(preference, _)| *preference);
    let partner = |decode: W| {
        // Nearly always the best of all prefill workers fits.
        best.filter(|(_, best)| may_pair(*best, decode)).or_else(|| {
            let fits = prefill.iter().filter(|(_, prefill)| may_pair(*prefill, decode));
            fits.min_by_key(|(preference, _)| *preference)
        })
    };
    let pairs = decode.iter().filter_map(|(preference, decode)| {
        let (other, prefill) = partner(*decode)?;
        let choice = Choice { prefill: Some(*prefill), answers: *decode };
        // The decode worker's own preference decides between equal pairs. So decode workers take turns even if the
        // prefill worker's turn is later.
        Some((preference.both(*other), *preference, choice))
    });
    let pair = pairs.min_by_key(|(both, own, _)| (*both, *own)).map(|(both, _, choice)| (both, choice));
    let alone = aggregated.iter().min_by_key(|(preference, _)| *preference);
    let alone = alone.map(|(preference, worker)| (*preference, Choice { prefill: None, answers: *worker }));
    let best = pair.into_iter().chain(alone).min_by_key(|(preference, _)| *preference);
    best.map(|(_, choice)| choice)
}

/// A lot for a worker and a room, by the last step of splitmix64.
fn lot(seed: u64, room: Room, instance: Instance) -> u64 {
    let mut bits = seed ^ room.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ instance.0.rotate_left(32);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(avoided: u32, load: u64, turn: u64, name: u32) -> (Preference, u32) {
        (Preference { unable: 0, avoided, load, turn }, name)
    }

    fn chosen(choice: Option<Choice<u32>>) -> (Option<u32>, u32) {
        choice.map(|choice| (choice.prefill, choice.answers)).unwrap()
    }

    #[test]
    fn the_least_load_wins_unless_it_failed_before_and_equals_take_turns() {
        let prefill = [worker(0, 5, 1, 1), worker(1, 0, 0, 2), worker(0, 5, 0, 3)];
        let decode = [worker(0, 9, 0, 4), worker(0, 2, 7, 5), worker(0, 2, 8, 6)];
        assert_eq!(chosen(choose(&prefill, &decode, &[], |_, _| true)), (Some(3), 5));
    }

    #[test]
    fn a_worker_that_can_do_what_is_needed_wins_over_one_that_cannot() {
        let unable = |(preference, name)| (Preference { unable: 1, ..preference }, name);
        let prefill = [unable(worker(0, 0, 0, 1)), worker(1, 9, 9, 2)];
        let decode = [worker(0, 0, 0, 3)];
        assert_eq!(chosen(choose(&prefill, &decode, &[], |_, _| true)), (Some(2), 3));
        assert_eq!(chosen(choose(&prefill[..1], &decode, &[], |_, _| true)), (Some(1), 3));
        let alone = [worker(0, 99, 0, 4)];
        assert_eq!(chosen(choose(&prefill[..1], &decode, &alone, |_, _| true)), (None, 4));
    }

    #[test]
    fn decode_workers_take_turns_beside_one_prefill_worker_of_a_later_turn() {
        let decode = [worker(0, 0, 6, 2), worker(0, 0, 4, 3)];
        assert_eq!(chosen(choose(&[worker(0, 0, 9, 1)], &decode, &[], |_, _| true)), (Some(1), 3));
    }

    #[test]
    fn a_pair_that_may_not_work_together_is_not_chosen() {
        let prefill = [worker(0, 0, 0, 1), worker(0, 3, 0, 2), worker(0, 2, 0, 3)];
        let decode = [worker(0, 0, 0, 10), worker(0, 1, 0, 11)];
        let apart = |prefill: u32, decode: u32| prefill != 1 && decode == 11;
        assert_eq!(chosen(choose(&prefill, &decode, &[], apart)), (Some(3), 11));
        assert_eq!(choose(&prefill, &decode, &[], |_, _| false), None);
    }

    #[test]
    fn an_aggregated_worker_competes_with_the_sum_of_a_pair() {
        let (prefill, decode) = ([worker(0, 4, 0, 1)], [worker(0, 4, 0, 2)]);
        for (load, expected) in [(7, (None, 3)), (9, (Some(1), 2)), (8, (Some(1), 2))] {
            assert_eq!(chosen(choose(&prefill, &decode, &[worker(0, load, 0, 3)], |_, _| true)), expected);
        }
    }

    #[test]
    fn lots_differ_by_room_and_worker_and_are_drawn_again_from_a_seed() {
        let reported = Reported { last_pick: 7, ..Reported::default() };
        let lot = |seed, room, worker| Policy::Random.turn(&reported, seed, Room(room), Instance(worker));
        assert_eq!(lot(1, 2, 3), lot(1, 2, 3));
        assert!(lot(1, 2, 3) != lot(1, 2, 4) && lot(1, 2, 3) != lot(1, 3, 3) && lot(1, 2, 3) != lot(2, 2, 3));
        assert_eq!(Policy::Prefix.turn(&reported, 1, Room(2), Instance(3)), 7);
    }
}

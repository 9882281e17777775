//! Turns of clients, so that a client with many requests does not keep clients with few requests waiting.
//!
//! This is self-clocked fair queueing (Golestani, "A self-clocked fair queueing scheme for broadband applications", 1994), where
//! all requests count as equally large. A request gets its turn when it comes: one more than the turn of its client's last request
//! here, or than the turn being served, whichever is larger. Smaller numbers go first, among equals the earlier request.
//!
//! ```text
//! A sends six requests, and the first two are computed; then B and C send one, and A another
//!
//! turn    1   2   3   4   5   6   7
//! A       a   a   a   a   a   a   a
//! B               b                     after those that were begun, and one more of A
//! C               c
//! ```
//!
//! So a request waits for about one request of each other client, however long requests take. No request waits for ever, because
//! later requests get larger numbers as soon as others are served.
//!
//! Requests that wait for something other than their turn (less urgent requests, requests that another worker is not ready for)
//! must not save up turns meanwhile. So turns of waiting requests are renewed once they have passed: a client's first request gets
//! the turn being served, and its others follow one by one.

use std::collections::BTreeMap;

/// A client, and whether its requests have a priority above 0 (less urgent): such requests do not delay the client's other ones.
pub(super) type Flow = (u64, bool);

/// The turns of all requests that a worker has.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The largest turn of a request that was computed.
    served: u64,
    /// The last turn of each client that has requests here, and the number of these requests.
    flows: BTreeMap<Flow, (u64, usize)>,
    /// Requests of which the client is not known.
    unknown: usize,
    /// Requests with another priority than 0.
    prioritized: usize,
}

impl Turns {
    /// The turn that a request would get. A resumed request has waited before, and its client reads already, so it gets the
    /// present turn.
    pub fn next(&self, client: u64, priority: i32, resumed: bool) -> u64 {
        let last = self.flows.get(&(client, priority > 0)).map_or(0, |(last, _)| *last);
        if resumed { self.served } else { self.served.max(last) + 1 }
    }

    /// Takes in a request, and returns its [turn](Self::next).
    pub fn enter(&mut self, client: u64, priority: i32, resumed: bool) -> u64 {
        self.prioritized += usize::from(priority != 0);
        let turn = self.next(client, priority, resumed);
        if client == 0 {
            self.unknown += 1;
            return turn;
        }
        let (last, requests) = self.flows.entry((client, priority > 0)).or_default();
        *last = turn.max(*last);
        *requests += 1;
        turn
    }

    /// Whether this turn has passed, so that turns are to be renewed.
    pub fn has_passed(&self, turn: u64) -> bool {
        turn < self.served
    }

    /// The new turn of a waiting request that was not resumed. `last` has the turns of each client's earlier requests. Call this
    /// for all such requests, in the order of their turns.
    pub fn renew(&mut self, last: &mut BTreeMap<Flow, u64>, client: u64, priority: i32, turn: u64) -> u64 {
        let turn = turn.max(self.served);
        if client == 0 {
            return turn;
        }
        let flow = (client, priority > 0);
        let turn = last.get(&flow).map_or(turn, |last| turn.max(last + 1));
        last.insert(flow, turn);
        if let Some((last, _)) = self.flows.get_mut(&flow) {
            *last = turn.max(*last);
        }
        turn
    }

    /// Takes note that a request of this turn is computed.
    pub fn serve(&mut self, turn: u64) {
        self.served = self.served.max(turn);
    }

    /// Takes note that a request has ended.
    pub fn leave(&mut self, client: u64, priority: i32) {
        self.prioritized -= usize::from(priority != 0);
        if client == 0 {
            self.unknown -= 1;
            return;
        }
        let flow = (client, priority > 0);
        if let Some((_, requests)) = self.flows.get_mut(&flow) {
            *requests -= 1;
            if *requests == 0 {
                self.flows.remove(&flow);
            }
        }
    }

    /// Whether a request has another priority than 0.
    pub fn has_priorities(&self) -> bool {
        self.prioritized > 0
    }

    /// Whether the requests may be of several clients.
    pub fn are_several(&self) -> bool {
        self.flows.len() + usize::from(self.unknown > 0) > 1
    }

    /// Number of all requests.
    pub fn requests(&self) -> usize {
        self.unknown + self.flows.values().map(|(_, requests)| requests).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(turns: &mut Turns, clients: &[u64]) -> Vec<u64> {
        clients.iter().map(|client| turns.enter(*client, 0, false)).collect()
    }

    #[test]
    fn a_client_s_next_request_has_the_next_turn_and_others_that_after_the_present_one() {
        let mut turns = Turns::default();
        assert_eq!(enter(&mut turns, &[1, 1, 1, 1, 1, 1]), [1, 2, 3, 4, 5, 6]);
        turns.serve(2);
        turns.serve(1);
        assert_eq!(enter(&mut turns, &[2, 3, 1, 2]), [3, 3, 7, 4]);
        // Less urgent requests of a client have turns of their own, and so has a router that names no client.
        assert_eq!((turns.enter(1, 5, false), turns.enter(1, 5, false)), (3, 4));
        assert_eq!(enter(&mut turns, &[0, 0]), [3, 3]);
        assert_eq!(turns.enter(1, 0, true), 2, "it was resumed");
        assert_eq!(enter(&mut turns, &[1]), [8]);
        assert!(turns.has_priorities() && turns.are_several());
    }

    #[test]
    fn turns_that_have_passed_are_renewed_one_by_one() {
        let mut turns = Turns::default();
        assert_eq!(enter(&mut turns, &[1, 1, 1, 2, 0]), [1, 2, 3, 1, 1]);
        turns.serve(10);
        assert!(turns.has_passed(9) && !turns.has_passed(10));
        let mut last = BTreeMap::new();
        let waiting = [(1, 1), (2, 1), (0, 1), (1, 2), (0, 2), (1, 30)];
        let renewed = waiting.map(|(client, turn)| turns.renew(&mut last, client, 0, turn));
        assert_eq!(renewed, [10, 10, 10, 11, 10, 30]);
        assert_eq!(enter(&mut turns, &[1, 2, 3]), [31, 11, 11], "what comes next is behind them");
    }

    #[test]
    fn of_a_client_whose_requests_have_ended_nothing_is_kept() {
        let mut turns = Turns::default();
        enter(&mut turns, &[1, 1, 0]);
        turns.enter(1, 3, false);
        turns.leave(1, 3);
        turns.leave(0, 0);
        assert!(!turns.has_priorities() && !turns.are_several());
        turns.leave(1, 0);
        assert_eq!((enter(&mut turns, &[1]), turns.requests()), (vec![3], 2));
        turns.leave(1, 0);
        turns.leave(1, 0);
        assert!(turns.flows.is_empty() && turns.requests() == 0);
        assert_eq!(enter(&mut turns, &[1]), [1], "its turns were its own");
    }
}

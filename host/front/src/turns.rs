//! Places that clients take in turns: a client that waits with much does not delay one that waits with little.
//!
//! As fair queueing of Nagle has it (RFC 970, 1985): a queue for each client, and one after the other gives one. A client's own
//! requests keep their order.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use host_wire::shares::Client;

/// So many places.
#[derive(Clone, Debug)]
pub struct Turns {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// Only while nothing waits.
    free: usize,
    /// Clients that wait, each once, the next first.
    order: VecDeque<Client>,
    waiting: HashMap<Client, Waiting>,
}

/// What one client waits with, the next first. Some of it may be abandoned.
#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<oneshot::Sender<Turn>>,
    /// With so many it is looked through for abandoned ones.
    look_at: usize,
}

/// Fewer are not looked through.
const FEW: usize = 16;

/// A place, which goes to the next client when dropped.
#[derive(Debug)]
pub struct Turn {
    /// None when it was given back.
    of: Option<Turns>,
}

impl Turns {
    /// So many places, all free.
    #[must_use]
    pub fn new(places: usize) -> Self {
        let state = State { free: places, order: VecDeque::new(), waiting: HashMap::new() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// A place, as soon as it is the client's turn. Dropping the future leaves the queue.
    pub async fn take(&self, client: &Client) -> Turn {
        loop {
            let turn = {
                let mut state = self.state.lock();
                if state.free > 0 {
                    state.free -= 1;
                    return Turn { of: Some(self.clone()) };
                }
                state.wait(client)
            };
            // The state keeps the sender until it is this one's turn.
            if let Ok(turn) = turn.await {
                return turn;
            }
        }
    }
}

impl State {
    fn wait(&mut self, client: &Client) -> oneshot::Receiver<Turn> {
        let (sender, receiver) = oneshot::channel();
        if !self.waiting.contains_key(client) {
            self.order.push_back(client.clone());
            self.waiting.insert(client.clone(), Waiting::default());
        }
        if let Some(waiting) = self.waiting.get_mut(client) {
            waiting.push(sender);
        }
        receiver
    }

    /// What is next, which goes to the end of the order if it waits with more.
    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        let client = self.order.pop_front()?;
        let waiting = self.waiting.get_mut(&client)?;
        let next = waiting.queue.pop_front();
        if waiting.queue.is_empty() {
            self.waiting.remove(&client);
        } else {
            self.order.push_back(client);
        }
        next
    }
}

impl Waiting {
    /// What was abandoned would otherwise stay until a place is free. It is looked for when there are twice as many as the last time,
    /// so that many that wait cost each that comes no more than few do.
    fn push(&mut self, sender: oneshot::Sender<Turn>) {
        if self.queue.len() >= self.look_at.max(FEW) {
            self.queue.retain(|sender| !sender.is_closed());
            self.look_at = 2 * self.queue.len();
        }
        self.queue.push_back(sender);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(turns) = self.of.take() else { return };
        loop {
            let next = {
                let mut state = turns.state.lock();
                let next = state.next();
                if next.is_none() {
                    state.free += 1;
                }
                next
            };
            let Some(next) = next else { return };
            match next.send(Self { of: Some(turns.clone()) }) {
                Ok(()) => return,
                // Abandoned: the place is the next one's, and is given on here alone.
                Err(mut turn) => turn.of = None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::pin::Pin;

    use futures_util::FutureExt;

    use super::*;

    fn client(number: u8) -> Client {
        Client::at(IpAddr::from([10, 0, 0, number]))
    }

    type Waiting<'a> = Pin<Box<dyn Future<Output = Turn> + 'a>>;

    /// One that waits: no place is free.
    fn waiting(turns: &Turns, number: u8) -> Waiting<'_> {
        let mut waiting: Waiting = Box::pin(async move { turns.take(&client(number)).await });
        assert!(waiting.as_mut().now_or_never().is_none(), "a place was free");
        waiting
    }

    /// The clients in the order in which they get the one place.
    fn order(place: Turn, mut waiting: Vec<(u8, Waiting)>) -> Vec<u8> {
        let mut order = Vec::new();
        let mut place = Some(place);
        while !waiting.is_empty() {
            drop(place.take());
            let at = waiting.iter_mut().position(|(_, waiting)| {
                place = waiting.as_mut().now_or_never();
                place.is_some()
            });
            order.push(waiting.remove(at.expect("one of them has the place")).0);
        }
        order
    }

    #[test]
    fn clients_take_turns_however_much_each_waits_with() {
        let turns = Turns::new(1);
        let place = turns.take(&client(1)).now_or_never().unwrap();
        let waiting = [1, 1, 1, 1, 2, 2, 3].map(|number| (number, waiting(&turns, number)));
        assert_eq!(order(place, waiting.into()), [1, 2, 3, 1, 2, 1, 1]);
        assert_eq!(turns.state.lock().free, 1);
    }

    #[test]
    fn what_is_abandoned_takes_no_turn_and_no_memory() {
        let turns = Turns::new(2);
        let places = [1, 1].map(|number| turns.take(&client(number)).now_or_never().unwrap());
        for _ in 0..100 {
            drop(waiting(&turns, 1));
        }
        let left = turns.state.lock().waiting[&client(1)].queue.len();
        assert!(left <= FEW, "{left}");
        let stays = waiting(&turns, 2);
        let [one, two] = places;
        drop(one);
        let place = stays.now_or_never().expect("only it waits");
        drop((place, two));
        let state = turns.state.lock();
        assert_eq!((state.free, state.order.len(), state.waiting.len()), (2, 0, 0));
    }

    #[test]
    fn many_that_wait_are_looked_through_a_few_times_alone() {
        let turns = Turns::new(1);
        let _place = turns.take(&client(1)).now_or_never().unwrap();
        let queue = || turns.state.lock().waiting.get(&client(1)).map_or(0, |waiting| waiting.queue.len());
        let stay: Vec<_> = (0..100).map(|_| waiting(&turns, 1)).collect();
        let mut looked = 0;
        for _ in 0..10_000 {
            let before = queue();
            drop(waiting(&turns, 1));
            looked += usize::from(queue() <= before);
        }
        assert!(looked <= 100, "{looked} of 10,000 looked through the queue");
        assert!(queue() <= 2 * stay.len() + FEW, "{}", queue());
    }

    #[test]
    fn a_place_that_was_given_and_not_taken_is_the_next_ones() {
        let turns = Turns::new(1);
        let place = turns.take(&client(1)).now_or_never().unwrap();
        let (given, next) = (waiting(&turns, 2), waiting(&turns, 3));
        drop(place);
        drop(given);
        assert!(next.now_or_never().is_some());
    }
}

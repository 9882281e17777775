//! Places that clients take in turns: a client with many waiting requests does not delay a client with few.
//!
//! This is Nagle's fair queueing (RFC 970, 1985): each client has a queue, and the queues take turns to give one request. The
//! requests of one client keep their order. A client may have fewer places than there are: then a client that begins finds one
//! free, however much another waits with.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use host_wire::shares::Client;

/// A number of places that clients take in turns.
#[derive(Clone, Debug)]
pub struct Turns {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// Free places. Above 0 only while each client that waits has as many places as it may have.
    free: usize,
    /// Most places of a client.
    most: usize,
    /// The places of each client that has some.
    held: HashMap<Client, usize>,
    /// The clients that wait, each once. The next client comes first.
    order: VecDeque<Client>,
    waiting: HashMap<Client, Waiting>,
}

/// The waiting requests of one client. The next one comes first. Some may be abandoned.
#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<oneshot::Sender<Turn>>,
    /// The length at which the queue is searched for abandoned requests.
    look_at: usize,
}

/// A shorter queue is not searched.
const FEW: usize = 16;

/// A place. When it is dropped, the next client gets it.
#[derive(Debug)]
pub struct Turn {
    /// Absent when the place was given to another request.
    of: Option<(Turns, Client)>,
}

impl Turns {
    /// A number of places, all free. A client may have all of them.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self::with(places, places)
    }

    /// A number of places, all free. A client may have half of them, rounded up, but not all unless there is only one.
    #[must_use]
    pub fn halved(places: usize) -> Self {
        Self::with(places, places.div_ceil(2).min(places.saturating_sub(1)).max(1))
    }

    fn with(free: usize, most: usize) -> Self {
        let (held, waiting) = (HashMap::new(), HashMap::new());
        let state = State { free, most, held, order: VecDeque::new(), waiting };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Returns a place when it is the client's turn. Dropping the future leaves the queue.
    pub async fn take(&self, client: &Client) -> Turn {
        loop {
            let turn = {
                let mut state = self.state.lock();
                if state.may_have(client) {
                    state.give(client);
                    return Turn { of: Some((self.clone(), client.clone())) };
                }
                state.wait(client)
            };
            // The state keeps the sender until it is this request's turn.
            if let Ok(turn) = turn.await {
                return turn;
            }
        }
    }
}

impl State {
    /// Whether there is a place for a client now.
    fn may_have(&self, client: &Client) -> bool {
        self.free > 0 && self.held.get(client).is_none_or(|held| *held < self.most)
    }

    fn give(&mut self, client: &Client) {
        self.free -= 1;
        *self.held.entry(client.clone()).or_default() += 1;
    }

    fn take_back(&mut self, client: &Client) {
        self.free += 1;
        if let Some(held) = self.held.get_mut(client) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(client);
            }
        }
    }

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

    /// Gives a place to the next request of the first client that may have one. The client goes to the end of the order if it has
    /// more.
    fn next(&mut self) -> Option<(Client, oneshot::Sender<Turn>)> {
        let at = self.order.iter().position(|client| self.may_have(client))?;
        let client = self.order.remove(at)?;
        let waiting = self.waiting.get_mut(&client)?;
        let next = waiting.queue.pop_front();
        if waiting.queue.is_empty() {
            self.waiting.remove(&client);
        } else {
            self.order.push_back(client.clone());
        }
        let next = next?;
        self.give(&client);
        Some((client, next))
    }
}

impl Waiting {
    /// Adds a request. Abandoned requests would otherwise stay until a place is free, so they are removed here. The queue is
    /// searched only when it has twice its last length, so that an addition costs no more in a long queue than in a short one.
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
        let Some((turns, mut client)) = self.of.take() else { return };
        loop {
            let next = {
                let mut state = turns.state.lock();
                state.take_back(&client);
                state.next()
            };
            let Some((of_next, sender)) = next else { return };
            match sender.send(Self { of: Some((turns.clone(), of_next.clone())) }) {
                Ok(()) => return,
                // The request was abandoned. This loop gives the place to the next one, so dropping `turn` must not.
                Err(mut turn) => (turn.of, client) = (None, of_next),
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

    /// A request that waits, because no place is free.
    fn waiting(turns: &Turns, number: u8) -> Waiting<'_> {
        let mut waiting: Waiting = Box::pin(async move { turns.take(&client(number)).await });
        assert!(waiting.as_mut().now_or_never().is_none(), "a place was free");
        waiting
    }

    /// The clients in the order in which they get the only place.
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
    fn a_client_has_half_of_the_places_and_another_finds_one_free() {
        for (places, half) in [(1, 1), (2, 1), (3, 2), (8, 4)] {
            let turns = Turns::halved(places);
            let first: Vec<Turn> =
                std::iter::from_fn(|| turns.take(&client(1)).now_or_never()).take(places + 1).collect();
            assert_eq!(first.len(), half, "{places}");
            if places == 1 {
                continue;
            }
            let mut more = [(); 2].map(|()| waiting(&turns, 1));
            let other = turns.take(&client(2)).now_or_never().expect("a place is free");
            drop(other);
            assert!(more.iter_mut().all(|more| more.as_mut().now_or_never().is_none()), "it has its half");
            // Its own place is the next one's, also past one that was abandoned.
            let [abandoned, more] = more;
            drop(abandoned);
            drop(first);
            drop(more.now_or_never().expect("it has places again"));
            let state = turns.state.lock();
            assert_eq!((state.free, state.held.len(), state.order.len()), (places, 0, 0));
        }
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

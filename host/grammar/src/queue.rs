//! Decides which client is next: clients take turns, regardless of how many items each of them has waiting.
//!
//! A place is the right to work on one item. A free place goes to the waiting client that has the fewest places, among equals to
//! the client whose last turn is longest ago. A client may have only a part of the places: a client with many grammars, each of
//! which takes seconds to compile, leaves some places to the others.

use std::collections::{HashMap, VecDeque};

/// The waiting items of all clients, and the places that each client has. It only decides what is next: its owner does the work.
#[derive(Debug)]
pub struct Queue<T> {
    /// Items that are worked on at once, of all clients together. `of_a_client` is the same of one client.
    places: usize,
    of_a_client: usize,
    /// Places that each client has now. A client without places has no entry.
    taken: HashMap<u64, usize>,
    /// Each client that waits, once, with its items, of which there is at least one. Among clients with equally many places, the
    /// first is next.
    waiting: VecDeque<(u64, VecDeque<T>)>,
}

impl<T> Queue<T> {
    /// An empty queue with so many places, of which one client has `of_a_client` at most.
    #[must_use]
    pub fn new(places: usize, of_a_client: usize) -> Self {
        Self { places, of_a_client, taken: HashMap::new(), waiting: VecDeque::new() }
    }

    /// The waiting items of a client, in their order.
    pub fn of(&self, client: u64) -> impl ExactSizeIterator<Item = &T> {
        let found = self.waiting.iter().find(|(of, _)| *of == client);
        found.map(|(_, queue)| queue.iter()).unwrap_or_default()
    }

    /// The number of waiting items of all clients.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(|(_, queue)| queue.len()).sum()
    }

    /// Adds an item of a client.
    pub fn push(&mut self, client: u64, one: T) {
        match self.waiting.iter_mut().find(|(of, _)| *of == client) {
            Some((_, queue)) => queue.push_back(one),
            None => self.waiting.push_back((client, VecDeque::from([one]))),
        }
    }

    /// Removes the items that do not wait any more.
    pub fn retain(&mut self, mut waits: impl FnMut(&T) -> bool) {
        self.waiting.retain_mut(|(_, queue)| {
            queue.retain(&mut waits);
            !queue.is_empty()
        });
    }

    /// Takes the next item to work on, with its client, which has a place until [`end`](Self::end). `None` when no place is free,
    /// or no waiting client may have another place.
    #[expect(clippy::should_implement_trait, reason = "what waits may be more by the next call")]
    pub fn next(&mut self) -> Option<(u64, T)> {
        if self.taken.values().sum::<usize>() >= self.places {
            return None;
        }
        let taken = |client: &u64| self.taken.get(client).copied().unwrap_or(0);
        let waiting = self.waiting.iter().map(|(client, _)| taken(client)).enumerate();
        // The first of the clients with the fewest places.
        let (at, has) = waiting.min_by_key(|(_, taken)| *taken)?;
        if has >= self.of_a_client {
            return None;
        }
        let (client, mut queue) = self.waiting.remove(at)?;
        let one = queue.pop_front()?;
        if !queue.is_empty() {
            self.waiting.push_back((client, queue));
        }
        *self.taken.entry(client).or_default() += 1;
        Some((client, one))
    }

    /// Frees one place of a client.
    pub fn end(&mut self, client: u64) {
        if let Some(taken) = self.taken.get_mut(&client) {
            *taken -= 1;
            if *taken == 0 {
                self.taken.remove(&client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All items that get a place now.
    fn begun(queue: &mut Queue<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.next().map(|(_, name)| name)).collect()
    }

    #[test]
    fn a_client_with_many_leaves_places_to_others_and_has_one_while_they_wait() {
        let mut queue = Queue::new(4, 2);
        for name in ["a1", "a2", "a3", "a4", "a5"] {
            queue.push(1, name);
        }
        assert_eq!(begun(&mut queue), ["a1", "a2"], "half of the places");
        for (client, name) in [(2, "b1"), (2, "b2"), (3, "c1")] {
            queue.push(client, name);
        }
        assert_eq!(begun(&mut queue), ["b1", "c1"]);
        queue.push(3, "c2");
        queue.end(1);
        // Each client has one place, and the last turn of client 1 is longest ago.
        assert_eq!(begun(&mut queue), ["a3"]);
        queue.end(1);
        queue.end(1);
        assert_eq!(begun(&mut queue), ["a4", "b2"], "A had none, and then each had one");
    }

    #[test]
    fn what_does_not_wait_any_more_takes_no_turn() {
        let mut queue = Queue::new(1, 1);
        for (client, name) in [(1, "a1"), (1, "gone"), (1, "a3"), (2, "gone"), (3, "c1")] {
            queue.push(client, name);
        }
        queue.retain(|name| *name != "gone");
        assert_eq!((queue.of(1).len(), queue.of(2).len()), (2, 0));
        let mut order = Vec::new();
        while let Some((client, name)) = queue.next() {
            order.push(name);
            queue.end(client);
        }
        assert_eq!(order, ["a1", "c1", "a3"]);
        assert!(queue.taken.is_empty() && queue.waiting.is_empty());
    }
}

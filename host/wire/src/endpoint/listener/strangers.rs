//! Connections of clients that have not proved to be of the cluster: few at once, and few from one client. A new one takes the
//! place of an older one, so that idle connections do not keep others out: of its own client if that has many, else of the client
//! that has most. So a few clients that connect again and again end each other's connections and no others.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::shares::Client;

/// Most such connections at once.
pub(super) const MOST: usize = 128;
/// One client has at most 1/`PART_OF_ONE` of the places, so that one machine leaves places to the others.
const PART_OF_ONE: usize = 4;

/// The way to end a connection.
pub(super) trait Ending {
    /// Whether it has ended by itself.
    fn has_ended(&self) -> bool;
    /// Ends it.
    fn end(self);
}

/// A task that shakes hands.
impl Ending for AbortHandle {
    fn has_ended(&self) -> bool {
        self.is_finished()
    }

    fn end(self) {
        self.abort();
    }
}

/// A connection that the server has taken. The server holds the receiver.
impl Ending for oneshot::Sender<()> {
    fn has_ended(&self) -> bool {
        self.is_closed()
    }

    fn end(self) {
        // A send error is ignored: the connection has ended by itself.
        let _ended = self.send(());
    }
}

/// The connections, oldest first.
#[derive(Debug)]
pub(super) struct Strangers<E> {
    met: VecDeque<(Client, E)>,
    most: usize,
}

impl<E: Ending> Strangers<E> {
    /// No connections yet. There are never more than `most`, which is at least 1.
    pub fn at_most(most: usize) -> Self {
        Self { met: VecDeque::new(), most }
    }

    /// Adds a connection. Returns whether that ended an older one.
    pub fn meet(&mut self, from: IpAddr, ending: E) -> bool {
        let from = Client::at(from);
        self.met.retain(|(_, ending)| !ending.has_ended());
        let of_one = self.met.iter().filter(|(client, _)| *client == from).count();
        let oldest = if of_one >= self.most.div_ceil(PART_OF_ONE) {
            self.met.iter().position(|(client, _)| *client == from)
        } else {
            (self.met.len() >= self.most).then(|| self.oldest_of_the_greediest())
        };
        let ended = oldest.and_then(|oldest| self.met.remove(oldest));
        self.met.push_back((from, ending));
        ended.is_some_and(|(_, ending)| {
            ending.end();
            true
        })
    }
}

impl<E> Strangers<E> {
    /// The place of the oldest connection of the client that has most, or of the oldest of these clients.
    fn oldest_of_the_greediest(&self) -> usize {
        let mut held: HashMap<&Client, usize> = HashMap::new();
        for (client, _) in &self.met {
            *held.entry(client).or_default() += 1;
        }
        let most = held.values().max();
        self.met.iter().position(|(client, _)| held.get(client) == most).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;

    const OF_ONE: usize = MOST / PART_OF_ONE;

    fn waiting() -> JoinHandle<()> {
        tokio::spawn(std::future::pending())
    }

    #[tokio::test]
    async fn the_oldest_of_a_client_that_has_many_makes_room_and_else_the_oldest_of_all() {
        let (mut strangers, address) = (Strangers::at_most(MOST), |last: u8| IpAddr::from([10, 0, 0, last]));
        let (quiet, first) = (waiting(), waiting());
        assert!(!strangers.meet(address(1), quiet.abort_handle()));
        assert!(!strangers.meet(address(2), first.abort_handle()));
        assert!((1..OF_ONE).all(|_| !strangers.meet(address(2), waiting().abort_handle())));
        assert!(strangers.meet(address(2), waiting().abort_handle()));
        assert!(first.await.unwrap_err().is_cancelled());
        assert!(!quiet.is_finished());
        for last in 3..=u8::MAX {
            let before = strangers.met.len();
            assert_eq!(strangers.meet(address(last), waiting().abort_handle()), before == MOST, "{last}");
        }
        assert_eq!(strangers.met.len(), MOST);
        assert!(quiet.await.unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn clients_that_connect_again_and_again_end_no_connection_of_another() {
        let (mut strangers, address) = (Strangers::at_most(MOST), |last: u8| IpAddr::from([10, 0, 0, last]));
        let quiet = waiting();
        strangers.meet(address(0), quiet.abort_handle());
        for round in 0..1000_u16 {
            strangers.meet(address(1 + u8::try_from(round % 8).unwrap()), waiting().abort_handle());
        }
        tokio::task::yield_now().await;
        assert!(!quiet.is_finished());
        assert_eq!(strangers.met.len(), MOST);
    }

    #[tokio::test]
    async fn a_machine_is_one_client_however_many_addresses_it_has() {
        let (mut strangers, address) =
            (Strangers::at_most(MOST), |last: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, last]));
        for last in 0..40 {
            assert_eq!(
                strangers.meet(address(last), waiting().abort_handle()),
                usize::from(last) >= OF_ONE,
                "{last}"
            );
        }
    }
}

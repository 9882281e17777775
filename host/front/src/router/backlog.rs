//! How far behind the requests of other clients those of a client with many stand in the queues of workers.
//!
//! Workers admit in order of arrival. A request counts as having come [`PER_REQUEST`] later for each other that its client has under
//! way when it comes, up to [`MOST`]. So one of a client with few goes before the backlog of one with many:
//!
//! ```text
//! counts as having come at   0 s   1 s   2 s   3 s   4 s   ...  600 s
//! 800 requests of A at 0 s   a     a     a     a     a          a a a
//! one of B at 2.5 s                         b
//! ```
//!
//! No request counts as having come before one that its client still has, so each client's own keep their order.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use host_wire::clock::Instant;
use parking_lot::Mutex;

use crate::shares::Client;

/// A request counts as having come so much later for each other one of its client.
const PER_REQUEST: Duration = Duration::from_secs(1);
/// No request counts as having come later than this after it came.
const MOST: Duration = Duration::from_secs(600);
/// Requests of a client that would count as having come at the same time stand so far apart: more than the way to a worker differs.
const APART: Duration = Duration::from_millis(10);

/// The requests of all clients that are under way.
#[derive(Clone, Debug, Default)]
pub(super) struct Backlogs {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    /// When each request of a client counts as having come, with its number.
    clients: HashMap<Client, BTreeSet<(Instant, u64)>>,
    /// The number of the last one.
    last: u64,
}

/// One request under way. It counts no more when dropped.
#[derive(Debug)]
pub(super) struct Standing {
    of: Backlogs,
    client: Client,
    entry: (Instant, u64),
    behind: Duration,
}

impl Backlogs {
    /// A request of a client comes.
    pub fn enter(&self, client: &Client, now: Instant) -> Standing {
        let mut inner = self.inner.lock();
        inner.last += 1;
        let number = inner.last;
        let others = inner.clients.entry(client.clone()).or_default();
        let count = u32::try_from(others.len()).unwrap_or(u32::MAX);
        let own = others.last().map_or(now, |(counts_from, _)| *counts_from + APART);
        let behind = PER_REQUEST.saturating_mul(count).max(own.saturating_duration_since(now)).min(MOST);
        let entry = (now + behind, number);
        others.insert(entry);
        Standing { of: self.clone(), client: client.clone(), entry, behind }
    }
}

impl Standing {
    /// How much later than it came it counts as having come, in milliseconds.
    pub fn behind_ms(&self) -> u32 {
        u32::try_from(self.behind.as_millis()).unwrap_or(u32::MAX)
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        let mut inner = self.of.inner.lock();
        if let Some(others) = inner.clients.get_mut(&self.client) {
            others.remove(&self.entry);
            if others.is_empty() {
                inner.clients.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use host_wire::clock;

    use super::*;

    fn client(number: u8) -> Client {
        Client::at(IpAddr::from([10, 0, 0, number]))
    }

    #[test]
    fn a_request_is_behind_by_those_of_its_client_alone() {
        let (backlogs, now) = (Backlogs::default(), clock::now());
        let first: Vec<Standing> = (0..3).map(|_| backlogs.enter(&client(1), now)).collect();
        let second: Vec<Standing> = (0..2).map(|_| backlogs.enter(&client(2), now)).collect();
        let behind = |of: &[Standing]| of.iter().map(Standing::behind_ms).collect::<Vec<_>>();
        assert_eq!((behind(&first), behind(&second)), (vec![0, 1_000, 2_000], vec![0, 1_000]));
        drop(first);
        assert_eq!(backlogs.enter(&client(1), now).behind_ms(), 0, "none is under way any more");
        assert_eq!(backlogs.enter(&client(2), now).behind_ms(), 2_000);
        drop(second);
        assert!(backlogs.inner.lock().clients.is_empty());
    }

    #[test]
    fn requests_of_one_client_keep_their_order_and_are_behind_by_a_bounded_time() {
        let (backlogs, start) = (Backlogs::default(), clock::now());
        let mut under_way: Vec<Standing> = (0..800).map(|_| backlogs.enter(&client(1), start)).collect();
        assert_eq!(under_way.last().unwrap().behind, MOST);
        // All but the last have ended, and it is only one behind; but the last is not to be overtaken.
        under_way.drain(..799);
        let mut now = start;
        for wait in [0, 100, 5_000, 700_000] {
            now += Duration::from_millis(wait);
            let next = backlogs.enter(&client(1), now);
            let last = under_way.last().unwrap();
            assert!(next.entry > last.entry && next.behind <= MOST, "{next:?} {last:?}");
            assert!(next.behind_ms() >= 1_000);
            under_way.push(next);
        }
        // Time has passed the backlog: what is behind now are the five that are under way.
        assert_eq!(backlogs.enter(&client(1), now + MOST).behind_ms(), 5_000);
    }
}

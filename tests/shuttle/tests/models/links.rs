//! Links to peers, which several threads make, fence and look up.

use std::collections::HashSet;
use std::sync::Arc;

use host_shuttle::Mutex;
use host_shuttle::links::{Connected, NotReplaced, Table};
use shuttle::thread;

use crate::schedules::many_schedules;

type Peer = u8;

/// A link of a plugin: connections that may write until they are disconnected.
#[derive(Clone, Debug)]
struct Link {
    session: u64,
    open: Vec<u64>,
}

impl Connected for Link {
    fn session(&self) -> u64 {
        self.session
    }
}

/// A plugin's connections that may write: peer, session, number.
#[derive(Clone, Default)]
struct Plugin(Arc<Mutex<HashSet<(Peer, u64, u64)>>>);

impl Plugin {
    /// Makes two connections, unless the second fails.
    fn make(&self, peer: Peer, session: u64, fails: bool) -> Result<Link, (Arc<Link>, &'static str)> {
        let mut link = Link { session, open: Vec::new() };
        for number in 0..2 {
            thread::yield_now();
            if fails && number == 1 {
                return Err((Arc::new(link), "refused"));
            }
            let mut open = self.0.lock();
            assert!(
                !open.iter().any(|&(other, older, _)| other == peer && older != session),
                "an earlier link may still write: {open:?}"
            );
            open.insert((peer, session, number));
            link.open.push(number);
        }
        Ok(link)
    }

    /// Ends the connections. With `fails`, the first one stays.
    fn cut(&self, peer: Peer, link: &Link, fails: bool) -> Result<(), (Arc<Link>, &'static str)> {
        for number in link.open.iter().filter(|&&number| !fails || number != 0) {
            thread::yield_now();
            self.0.lock().remove(&(peer, link.session, *number));
        }
        if fails && link.open.contains(&0) {
            return Err((Arc::new(Link { session: link.session, open: vec![0] }), "not proven"));
        }
        Ok(())
    }

    fn writes(&self, peer: Peer, session: u64) -> bool {
        self.0.lock().iter().any(|&(other, of, _)| (other, of) == (peer, session))
    }
}

fn connect(table: &Table<Peer, Link>, plugin: &Plugin, peer: Peer, fails: bool) -> Option<u64> {
    let made = table.replace(
        peer,
        |link| plugin.cut(peer, link, false),
        |session| plugin.make(peer, session, fails),
    );
    match made {
        Ok(session) => Some(session),
        Err(NotReplaced::Made { why, left }) => {
            assert_eq!((why, left), ("refused", None));
            None
        }
        Err(NotReplaced::Earlier(error)) => panic!("no cut fails here: {error}"),
    }
}

#[test]
fn of_two_links_to_a_peer_the_earlier_is_off_before_the_next_is_made() {
    many_schedules(|| {
        let (table, plugin) = (Arc::new(Table::default()), Plugin::default());
        let threads: Vec<_> = [(0, false), (0, true), (0, false), (1, false)]
            .into_iter()
            .map(|(peer, fails)| {
                let (table, plugin) = (table.clone(), plugin.clone());
                thread::spawn(move || {
                    if let Some(session) = connect(&table, &plugin, peer, fails) {
                        let link = table.get(peer);
                        assert!(link.is_none_or(|link| link.session >= session), "an earlier link came back");
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        for peer in [0, 1] {
            let open: HashSet<u64> =
                plugin.0.lock().iter().filter(|open| open.0 == peer).map(|open| open.1).collect();
            let known: HashSet<u64> = table.get(peer).map(|link| link.session).into_iter().collect();
            assert_eq!(open, known, "what may write is what the table knows");
        }
    });
}

#[test]
fn a_link_that_was_fenced_writes_no_more_and_a_newer_one_is_left_alone() {
    many_schedules(|| {
        let (table, plugin) = (Arc::new(Table::default()), Plugin::default());
        let first = connect(&table, &plugin, 0, false).unwrap();
        let again = {
            let (table, plugin) = (table.clone(), plugin.clone());
            thread::spawn(move || connect(&table, &plugin, 0, false).unwrap())
        };
        let fences: Vec<_> = [true, false]
            .into_iter()
            .map(|fails_first| {
                let (table, plugin) = (table.clone(), plugin.clone());
                thread::spawn(move || {
                    let fence = |fails| table.cut(0, Some(first), |link| plugin.cut(0, link, fails));
                    if !fails_first || fence(true).is_err() {
                        fence(false).unwrap();
                    }
                    assert!(!plugin.writes(0, first), "a fence that was told is no fence");
                    assert!(table.get(0).is_none_or(|link| link.session != first));
                })
            })
            .collect();
        fences.into_iter().for_each(|thread| thread.join().unwrap());
        let second = again.join().unwrap();
        assert!(plugin.writes(0, second), "a fence of an earlier link cut off the next");
        assert_eq!(table.get(0).unwrap().session, second);
        table.cut(0, None, |link| plugin.cut(0, link, false)).unwrap();
        assert!(plugin.0.lock().is_empty() && table.get(0).is_none());
    });
}

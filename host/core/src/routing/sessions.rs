//! Which workers served a session last.

use std::collections::{BTreeMap, HashMap};

use crate::ids::Instance;

/// Most sessions that are remembered. The least recently used one is forgotten first.
const MOST: usize = 1 << 16;

#[derive(Clone, Copy, Debug)]
struct Served {
    prefill: Option<Instance>,
    decode: Instance,
    /// When the session was used last, counted in calls.
    used: u64,
}

/// Sessions by a hash of their name. Two sessions with the same hash count as one.
#[derive(Debug, Default)]
pub struct Sessions {
    served: HashMap<u64, Served>,
    by_use: BTreeMap<u64, u64>,
    uses: u64,
}

impl Sessions {
    /// Whether this worker served the session's last request.
    #[must_use]
    pub fn was_at(&self, session: u64, worker: Instance) -> bool {
        let served = self.served.get(&session);
        served.is_some_and(|served| served.decode == worker || served.prefill == Some(worker))
    }

    /// Notes which workers serve a session.
    pub fn remember(&mut self, session: u64, prefill: Option<Instance>, decode: Instance) {
        self.uses += 1;
        if let Some(before) = self.served.insert(session, Served { prefill, decode, used: self.uses }) {
            self.by_use.remove(&before.used);
        }
        self.by_use.insert(self.uses, session);
        if self.served.len() > MOST
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.served.remove(&oldest);
        }
    }

    /// Sessions that are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.served.len()
    }

    /// Whether no session is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.served.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_where_it_was_last_and_the_oldest_are_forgotten() {
        let mut sessions = Sessions::default();
        sessions.remember(0, Some(Instance(1)), Instance(2));
        sessions.remember(1, None, Instance(3));
        assert!(sessions.was_at(0, Instance(1)) && sessions.was_at(0, Instance(2)));
        sessions.remember(0, Some(Instance(1)), Instance(4));
        assert!(!sessions.was_at(0, Instance(2)) && sessions.was_at(0, Instance(4)));
        for session in 2..=MOST as u64 {
            sessions.remember(session, None, Instance(5));
        }
        assert_eq!((sessions.len(), sessions.by_use.len()), (MOST, MOST));
        assert!(sessions.was_at(0, Instance(4)) && !sessions.was_at(1, Instance(3)), "1 is the oldest");
    }
}

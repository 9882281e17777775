//! The link in use to each peer, and the turns in which calls change it.
//!
//! Connecting and fencing block for as long as a plugin does. Calls for one peer take turns, so that no call undoes
//! another unnoticed. Calls for different peers do not wait for one another, and looking up a link waits for no call.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// The number of turns that are kept. Beyond it, turns that no thread has are removed.
const TURNS: usize = 1024;

/// A link between this worker and a peer.
pub trait Connected {
    /// Identifies it among all links that were made.
    fn session(&self) -> u64;
}

/// The links in use, one for each peer at most.
#[derive(Debug)]
pub struct Table<P, L> {
    links: Mutex<HashMap<P, Arc<L>>>,
    turns: Mutex<HashMap<P, Arc<Mutex<()>>>>,
    sessions: AtomicU64,
}

/// Why a link was not replaced.
#[derive(Debug)]
pub enum NotReplaced<F, W> {
    /// The earlier link could not be cut off. The rest of it stays in use.
    Earlier(F),
    /// The new link could not be made.
    Made {
        /// Why.
        why: W,
        /// Why the part that had been made could not be cut off. The next try cuts it off first.
        left: Option<F>,
    },
}

impl<P, L> Default for Table<P, L> {
    fn default() -> Self {
        Self {
            links: Mutex::new(HashMap::new()),
            turns: Mutex::new(HashMap::new()),
            sessions: AtomicU64::new(0),
        }
    }
}

impl<P: Copy + Eq + Hash, L: Connected> Table<P, L> {
    /// The link to a peer.
    pub fn get(&self, peer: P) -> Option<Arc<L>> {
        self.links.lock().get(&peer).cloned()
    }

    /// Cuts off the link to a peer and makes another with a session of its own, which it returns. Blocks as `cut` and `make` do.
    ///
    /// On failure, `cut` returns what is left of the link, and `make` returns what it had made, each with the reason.
    ///
    /// # Errors
    /// When the earlier link was not cut off, so that nothing was made, or when no other link was made.
    pub fn replace<F, W>(
        &self,
        peer: P,
        cut: impl Fn(&L) -> Result<(), (Arc<L>, F)>,
        make: impl FnOnce(u64) -> Result<L, (Arc<L>, W)>,
    ) -> Result<u64, NotReplaced<F, W>> {
        let turn = self.turn(peer);
        let _turn = turn.lock();
        self.cut_off(peer, |_| true, &cut).map_err(NotReplaced::Earlier)?;
        let session = self.sessions.fetch_add(1, Ordering::Relaxed) + 1;
        match make(session) {
            Ok(link) => {
                self.links.lock().insert(peer, Arc::new(link));
                Ok(session)
            }
            Err((made, why)) => {
                // No pages were promised over the partly made link.
                self.links.lock().insert(peer, made);
                Err(NotReplaced::Made { why, left: self.cut_off(peer, |_| true, &cut).err() })
            }
        }
    }

    /// Cuts off the link to a peer. With a session, only the link of that session: an earlier one was cut off when the
    /// next was made. Blocks as `cut` does.
    ///
    /// # Errors
    /// Those of `cut`. The peer's link then is what `cut` left of it.
    pub fn cut<F>(
        &self,
        peer: P,
        session: Option<u64>,
        cut: impl Fn(&L) -> Result<(), (Arc<L>, F)>,
    ) -> Result<(), F> {
        let turn = self.turn(peer);
        let _turn = turn.lock();
        self.cut_off(peer, |link| session.is_none_or(|session| link.session() == session), cut)
    }

    /// Cuts off the peer's link if it `applies`. The caller has the peer's turn.
    fn cut_off<F>(
        &self,
        peer: P,
        applies: impl Fn(&L) -> bool,
        cut: impl Fn(&L) -> Result<(), (Arc<L>, F)>,
    ) -> Result<(), F> {
        let Some(link) = self.get(peer).filter(|link| applies(link)) else { return Ok(()) };
        match cut(&link) {
            Ok(()) => {
                self.links.lock().remove(&peer);
                Ok(())
            }
            Err((left, error)) => {
                self.links.lock().insert(peer, left);
                Err(error)
            }
        }
    }

    fn turn(&self, peer: P) -> Arc<Mutex<()>> {
        let mut turns = self.turns.lock();
        if turns.len() >= TURNS {
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        }
        turns.entry(peer).or_default().clone()
    }
}

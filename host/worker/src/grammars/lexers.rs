//! The memory of the lexers of a worker's answers.
//!
//! Each answer under a grammar has a lexer of its own, which grows as the answer meets new text. Its memory grows with the work that
//! made it. All lexers of a worker have a limit, and those of one client half of it. An answer that exceeds the limit ends: one of a
//! client beyond its half, or one that holds more than a 256th of all.

use std::collections::HashMap;
use std::sync::Arc;

use host_grammar::GrammarError;
use parking_lot::Mutex;

/// The work of all lexers of a worker, by client.
#[derive(Debug)]
pub(crate) struct Lexers {
    most: u64,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    all: u64,
    of_clients: HashMap<u64, u64>,
}

/// The work of one answer's lexer. It counts until this is dropped.
#[derive(Debug)]
pub(super) struct Lexer {
    lexers: Arc<Lexers>,
    client: u64,
    work: u64,
}

impl Lexers {
    /// No lexers, of which all together may have this much work.
    pub(super) fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { most, held: Mutex::default() })
    }

    /// A client's lexer that has not begun.
    pub(super) fn of(self: &Arc<Self>, client: u64) -> Lexer {
        Lexer { lexers: Arc::clone(self), client, work: 0 }
    }
}

impl Lexer {
    /// Counts a lexer that has this much work now.
    ///
    /// # Errors
    /// When the answer must end, because there is too much.
    pub(super) fn has(&mut self, work: u64) -> Result<(), GrammarError> {
        let most = self.lexers.most;
        let mut held = self.lexers.held.lock();
        let of_client = held.of_clients.entry(self.client).or_default();
        *of_client = (*of_client).saturating_sub(self.work).saturating_add(work);
        let of_client = *of_client;
        held.all = held.all.saturating_sub(self.work).saturating_add(work);
        self.work = work;
        if of_client > most / 2 || held.all > most && work > most / 256 {
            return Err(GrammarError::Stuck(
                "the grammars of this client's answers take too much memory; ask for fewer answers at once, or make the grammar simpler"
                    .into(),
            ));
        }
        Ok(())
    }
}

impl Drop for Lexer {
    fn drop(&mut self) {
        let mut held = self.lexers.held.lock();
        held.all = held.all.saturating_sub(self.work);
        if let Some(of_client) = held.of_clients.get_mut(&self.client) {
            *of_client = of_client.saturating_sub(self.work);
            if *of_client == 0 {
                held.of_clients.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_half_and_beyond_all_the_large_end() {
        let lexers = Lexers::new(1024);
        let [mut one, mut two, mut three] = [1, 2, 3].map(|client| lexers.of(client));
        assert_eq!((one.has(500), one.has(512), two.has(510)), (Ok(()), Ok(()), Ok(())));
        // A small one goes on, although all is taken.
        assert_eq!((three.has(3), three.has(4)), (Ok(()), Ok(())));
        assert!(three.has(5).is_err() && two.has(511).is_err());
        drop(one);
        assert!(three.has(5).is_ok() && two.has(511).is_ok() && two.has(513).is_err());
        let mut more = lexers.of(2);
        assert!(more.has(1).is_err(), "another one of the same client");
        drop((two, three, more));
        let held = lexers.held.lock();
        assert!(held.all == 0 && held.of_clients.is_empty(), "{held:?}");
    }
}

//! The memory of the lexers of a worker's answers.
//!
//! Each answer under a grammar has a lexer of its own, which grows as the answer meets new text. Its memory grows with the work that
//! made it. All lexers of a worker have a limit, and those of one client half of it. When there is more, answers with large lexers end,
//! each as its lexer grows. An answer with a small one goes on: as many as a worker runs have less than the limit together.

use std::collections::HashMap;
use std::sync::Arc;

use host_grammar::GrammarError;
use parking_lot::Mutex;

/// A lexer with this part of the limit is small: 2 MiB of a GiB.
const SMALL: u64 = 512;

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
        if (of_client > most / 2 || held.all > most) && work > most / SMALL {
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
    fn a_client_has_half_and_beyond_it_the_large_end() {
        let lexers = Lexers::new(5120);
        let [mut one, mut two, mut three] = [1, 2, 3].map(|client| lexers.of(client));
        assert_eq!((one.has(2500), one.has(2560), two.has(2555)), (Ok(()), Ok(()), Ok(())));
        // A small one goes on, although all is taken.
        assert_eq!((three.has(5), three.has(10)), (Ok(()), Ok(())));
        assert!(three.has(11).is_err() && two.has(2556).is_err());
        drop(one);
        assert!(three.has(11).is_ok() && two.has(2556).is_ok() && two.has(2561).is_err());
        let mut more = lexers.of(2);
        assert!(more.has(10).is_ok() && more.has(11).is_err(), "another one of the same client");
        drop((two, three, more));
        let held = lexers.held.lock();
        assert!(held.all == 0 && held.of_clients.is_empty(), "{held:?}");
    }
}

//! The memory of the lexers and the compiled grammars of a worker's answers.
//!
//! Each answer under a grammar has a lexer of its own, which grows as the answer meets new text. Its memory grows with the work that
//! made it. A client's answers under one compiled grammar share that grammar, which counts once. All that a worker has of these has a
//! limit, and what one client has half of it. When there is more, answers with large lexers end, each as its lexer grows, and answers
//! under large grammars do not begin. A client that has its half begins no answer under another grammar, however small. An answer with
//! a small lexer goes on: as many as a worker runs have less than the limit together.

use std::collections::HashMap;
use std::sync::Arc;

use host_grammar::{Compiled, GrammarError};
use parking_lot::Mutex;

/// A lexer with this part of the limit is small: 2 MiB of a GiB.
const SMALL: u64 = 512;

/// Bytes of a compiled grammar that count as a unit of a lexer's work: with as many, the limit on units is a GiB.
const UNIT: usize = 32;

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
    /// The clients' compiled grammars, by their addresses, with the number of answers under each. Those answers keep the address.
    compiled: HashMap<(u64, usize), usize>,
}

impl Held {
    /// Adds `more` units to what a client has and takes away `less`. Returns what the client and all have then.
    fn change(&mut self, client: u64, less: u64, more: u64) -> (u64, u64) {
        let of_client = self.of_clients.entry(client).or_default();
        *of_client = (*of_client).saturating_sub(less).saturating_add(more);
        let has = *of_client;
        if has == 0 {
            self.of_clients.remove(&client);
        }
        self.all = self.all.saturating_sub(less).saturating_add(more);
        (has, self.all)
    }
}

/// The work of one answer's lexer, and its share of a compiled grammar. They count until this is dropped.
#[derive(Debug)]
pub(super) struct Lexer {
    lexers: Arc<Lexers>,
    compiled: Arc<Compiled>,
    client: u64,
    work: u64,
}

impl Lexers {
    /// No lexers, of which all together may have this much work.
    pub(super) fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { most, held: Mutex::default() })
    }

    /// The lexer of a client's answer under a compiled grammar. It has not begun.
    ///
    /// # Errors
    /// When the answer must not begin, because there is too much.
    pub(super) fn of(self: &Arc<Self>, client: u64, compiled: &Arc<Compiled>) -> Result<Lexer, GrammarError> {
        let lexer = Lexer { lexers: Arc::clone(self), compiled: Arc::clone(compiled), client, work: 0 };
        let mut held = self.held.lock();
        let answers = held.compiled.entry(lexer.key()).or_default();
        *answers += 1;
        let units = if *answers == 1 { lexer.units() } else { 0 };
        let has = held.change(client, 0, units);
        drop(held);
        // Requests that wait have their grammars, too, and there may be many of them. So a client gets no small ones beyond its half.
        if units > 0 && has.0 > self.most / 2 {
            return Err(too_much());
        }
        self.check(has, units).map(|()| lexer)
    }

    /// Whether something with so many units may stay beside what its client and all `have`.
    fn check(&self, (of_client, all): (u64, u64), units: u64) -> Result<(), GrammarError> {
        let is_large = units > self.most / SMALL;
        if is_large && (of_client > self.most / 2 || all > self.most) { Err(too_much()) } else { Ok(()) }
    }
}

fn too_much() -> GrammarError {
    let message = "the grammars of this client's answers take too much memory; ask for fewer answers at once, or make the grammar simpler";
    GrammarError::Stuck(message.into())
}

impl Lexer {
    /// Counts a lexer that has this much work now.
    ///
    /// # Errors
    /// When the answer must end, because there is too much.
    pub(super) fn has(&mut self, work: u64) -> Result<(), GrammarError> {
        let has = self.lexers.held.lock().change(self.client, self.work, work);
        self.work = work;
        self.lexers.check(has, work)
    }

    fn key(&self) -> (u64, usize) {
        (self.client, Arc::as_ptr(&self.compiled) as usize)
    }

    /// The compiled grammar in units.
    fn units(&self) -> u64 {
        (self.compiled.memory() / UNIT) as u64
    }
}

impl Drop for Lexer {
    fn drop(&mut self) {
        let mut held = self.lexers.held.lock();
        let key = self.key();
        let answers = held.compiled.get_mut(&key).map_or(0, |answers| {
            *answers -= 1;
            *answers
        });
        let units = if answers == 0 { self.units() } else { 0 };
        if answers == 0 {
            held.compiled.remove(&key);
        }
        held.change(self.client, self.work + units, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use host_grammar::{Compiler, Limits, Source, Vocabulary};

    use super::*;

    /// A compiled choice of so many texts.
    async fn compiled(texts: usize) -> Arc<Compiled> {
        let hour = Duration::from_secs(3600);
        let limits = Limits { wait: hour, compile_time: hour, ..Limits::default() };
        let texts: Vec<String> = (0..texts).map(|text| format!("\"text {text}\"")).collect();
        let source = Source::lark(format!("start: {}", texts.join(" | ")));
        Compiler::new(&Vocabulary::bytes(), limits).unwrap().compile(1, &source).await.unwrap()
    }

    fn is_empty(lexers: &Lexers) -> bool {
        let held = lexers.held.lock();
        held.all == 0 && held.of_clients.is_empty() && held.compiled.is_empty()
    }

    #[tokio::test]
    async fn a_client_has_half_and_beyond_it_the_large_end() {
        let small = compiled(1).await;
        // As much beside the grammar of each client.
        let own = (small.memory() / UNIT) as u64;
        let most = 512 * 10 * own.max(10);
        let lexers = Lexers::new(most);
        let [mut one, mut two, mut three] = [1, 2, 3].map(|client| lexers.of(client, &small).unwrap());
        let limit = most / SMALL;
        assert_eq!((one.has(most / 2 - own), two.has(most / 2 - 3 * own - limit)), (Ok(()), Ok(())));
        // A small one goes on, although all is taken.
        assert_eq!((three.has(limit), two.has(most / 2 - 2 * own - limit)), (Ok(()), Ok(())));
        assert_eq!(three.has(limit), Ok(()));
        assert!(three.has(limit + 1).is_err() && two.has(most / 2 - own - limit).is_err());
        drop(one);
        assert!(three.has(limit + 1).is_ok() && two.has(most / 2 - own).is_ok());
        assert!(two.has(most / 2 - own + 1).is_err());
        let mut more = lexers.of(2, &small).unwrap();
        assert!(more.has(limit).is_ok() && more.has(limit + 1).is_err(), "another one of the same client");
        let another = compiled(1).await;
        assert!(lexers.of(2, &another).is_err(), "a small grammar that is new takes memory, too");
        assert!(lexers.of(3, &another).is_ok());
        drop((two, three, more));
        assert!(is_empty(&lexers));
    }

    #[tokio::test]
    async fn a_compiled_grammar_counts_once_for_its_clients_answers_and_until_the_last_has_ended() {
        let large = compiled(2000).await;
        let units = (large.memory() / UNIT) as u64;
        // Two of them fit the half of a client.
        let lexers = Lexers::new(5 * units);
        let same: Vec<Lexer> = (0..9).map(|_answer| lexers.of(1, &large).unwrap()).collect();
        assert_eq!(lexers.held.lock().all, units);
        let others = [compiled(2000).await, compiled(2000).await];
        let second = lexers.of(1, &others[0]).unwrap();
        let refused = lexers.of(1, &others[1]).unwrap_err().to_string();
        assert!(refused.contains("ask for fewer answers at once"), "{refused}");
        assert_eq!(lexers.held.lock().all, 2 * units, "what was refused does not count");
        let other = lexers.of(2, &large).unwrap();
        drop(same);
        assert!(lexers.of(1, &others[1]).is_ok());
        drop((second, other));
        assert!(is_empty(&lexers));
    }
}

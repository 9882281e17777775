//! Compiled grammars, kept for their next use. When space is short, the client with the most grammars loses its least recently used.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use crate::GrammarError;
use crate::compiled::Compiled;
use crate::source::Source;

/// The result of compiling a grammar.
pub(crate) type Outcome = Result<Arc<Compiled>, GrammarError>;

/// A compiled grammar that takes more than one in so many of the bytes is not kept.
const LARGEST: usize = 8;

/// Bounded by the number of grammars and by their bytes. A grammar that compiled counts for all that it takes, as estimated, which may
/// be a thousand times its text. One that did not counts for its text.
#[derive(Debug)]
pub(crate) struct Cache {
    kept: HashMap<Source, Kept>,
    bytes: usize,
    uses: u64,
    most: usize,
    most_bytes: usize,
}

#[derive(Debug)]
struct Kept {
    outcome: Outcome,
    /// The client for which it was compiled.
    client: u64,
    used: u64,
    bytes: usize,
}

impl Cache {
    pub(crate) fn new(most: usize, most_bytes: usize) -> Self {
        Self { kept: HashMap::new(), bytes: 0, uses: 0, most, most_bytes }
    }

    /// The outcome of a grammar, if the cache has it.
    pub(crate) fn find(&mut self, source: &Source) -> Option<Outcome> {
        self.uses += 1;
        let kept = self.kept.get_mut(source)?;
        kept.used = self.uses;
        Some(kept.outcome.clone())
    }

    /// Keeps the outcome of a grammar that was compiled for a client. One that alone takes more than an eighth of the bytes is not kept,
    /// so that it pushes out no other.
    pub(crate) fn keep(&mut self, client: u64, source: Source, outcome: Outcome) {
        self.forget(&source);
        self.uses += 1;
        let bytes = outcome.as_ref().map_or(source.text.len(), |compiled| compiled.memory());
        if outcome.is_ok() && bytes > self.most_bytes / LARGEST {
            return;
        }
        self.bytes += bytes;
        self.kept.insert(source, Kept { outcome, client, used: self.uses, bytes });
        while self.kept.len() > 1 {
            let by_bytes = self.bytes > self.most_bytes;
            if !by_bytes && self.kept.len() <= self.most {
                break;
            }
            self.forget_one(by_bytes);
        }
    }

    /// Forgets one grammar: the least recently used of the client that holds the most bytes, or the most grammars. The newest entry
    /// stays.
    fn forget_one(&mut self, by_bytes: bool) {
        let cost = |kept: &Kept| if by_bytes { kept.bytes } else { 1 };
        let mut of_clients: HashMap<u64, usize> = HashMap::new();
        for kept in self.kept.values() {
            *of_clients.entry(kept.client).or_default() += cost(kept);
        }
        let others = self.kept.iter().filter(|(_, kept)| kept.used < self.uses);
        let first = others.max_by_key(|(_, kept)| (of_clients.get(&kept.client), Reverse(kept.used)));
        if let Some(source) = first.map(|(source, _)| source.clone()) {
            self.forget(&source);
        }
    }

    fn forget(&mut self, source: &Source) {
        if let Some(kept) = self.kept.remove(source) {
            self.bytes -= kept.bytes;
        }
    }

    /// Whether the cache has a grammar. This is no use of it.
    pub(crate) fn holds(&self, source: &Source) -> bool {
        self.kept.contains_key(source)
    }
}

#[cfg(test)]
mod tests {
    use llguidance::Matcher;
    use llguidance::api::TopLevelGrammar;

    use super::*;

    /// A grammar that counts for this many bytes. Its engine is of no use.
    fn of_bytes(memory: usize) -> Outcome {
        let wrong = TopLevelGrammar::from_tagged_str("no such kind", "");
        let matcher = Matcher::new(wrong.map(|_grammar| unreachable!("it was refused")));
        Ok(Arc::new(Compiled::new(matcher, 256, 0, memory)))
    }

    #[test]
    fn the_least_recently_used_goes_first_by_number_and_by_bytes() {
        let named = |name: &str| Source::regex(name);
        let mut cache = Cache::new(2, 100);
        let mut keep = |name: &str| {
            cache.keep(7, named(name), Err(GrammarError::Refused(name.into())));
            if name == "b" {
                assert!(cache.find(&named("a")).is_some());
            }
        };
        ["a", "b", "c"].into_iter().for_each(&mut keep);
        assert!(cache.holds(&named("a")) && !cache.holds(&named("b")) && cache.holds(&named("c")));
        let long = named(&"x".repeat(99));
        cache.keep(7, long.clone(), Err(GrammarError::Busy(1)));
        cache.keep(7, long.clone(), Err(GrammarError::Busy(2)));
        assert_eq!(cache.find(&long).unwrap().err(), Some(GrammarError::Busy(2)));
        assert!(cache.holds(&long) && !cache.holds(&named("a")), "only {} bytes fit", cache.most_bytes);
        cache.forget(&long);
        assert_eq!((cache.bytes, cache.kept.len()), (1, 1));
    }

    #[test]
    fn a_client_with_many_pushes_out_its_own_alone() {
        let refused = || Err(GrammarError::Refused("no".into()));
        let named = |client: u64, number: u32| Source::regex(format!("{client} {number:03}"));
        let mut cache = Cache::new(8, 1000);
        for (client, numbers) in [(1, 0..3), (2, 0..100), (3, 0..2)] {
            numbers.for_each(|number| cache.keep(client, named(client, number), refused()));
        }
        let kept = |cache: &Cache, client: u64| -> Vec<u32> {
            (0..100).filter(|number| cache.holds(&named(client, *number))).collect()
        };
        assert_eq!(kept(&cache, 1), [0, 1, 2]);
        assert_eq!(kept(&cache, 2), [97, 98, 99], "the oldest of the client with the most make room");
        assert_eq!(kept(&cache, 3), [0, 1]);
        let long = |number: u32| Source::regex(format!("{number}{}", "x".repeat(399)));
        (0..4).for_each(|number| cache.keep(2, long(number), refused()));
        assert_eq!((kept(&cache, 1).len(), kept(&cache, 3).len()), (3, 2), "texts are counted by bytes");
        assert!(cache.holds(&long(3)) && cache.holds(&long(2)) && !cache.holds(&long(1)));
        assert!(cache.bytes <= 1000);
    }

    #[test]
    fn a_compiled_grammar_counts_for_its_memory_and_pushes_out_its_own_clients() {
        let named = |name: &str| Source::regex(name);
        let mut cache = Cache::new(128, 10_000);
        cache.keep(1, named("small"), of_bytes(1250));
        let names: Vec<String> = (0..9).map(|number| format!("large {number}")).collect();
        names.iter().for_each(|name| cache.keep(2, named(name), of_bytes(1200)));
        assert!(cache.holds(&named("small")) && cache.holds(&named("large 8")), "{cache:?}");
        assert!(!cache.holds(&named("large 1")) && cache.holds(&named("large 2")), "{cache:?}");
        assert_eq!(cache.bytes, 1250 + 7 * 1200);
        // One that takes more than an eighth is not kept, and what was kept under its name is gone.
        cache.keep(2, named("large 8"), of_bytes(1251));
        assert!(!cache.holds(&named("large 8")) && cache.holds(&named("small")), "{cache:?}");
        assert_eq!(cache.bytes, 1250 + 6 * 1200);
    }
}

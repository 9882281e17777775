//! Grammars that were compiled, the least recently used first to go.

use std::collections::HashMap;
use std::sync::Arc;

use crate::GrammarError;
use crate::compiled::Compiled;
use crate::source::Source;

/// What came of compiling a grammar.
pub(crate) type Outcome = Result<Arc<Compiled>, GrammarError>;

/// Bounded by the number of grammars and by the bytes of their texts.
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
    used: u64,
}

impl Cache {
    pub(crate) fn new(most: usize, most_bytes: usize) -> Self {
        Self { kept: HashMap::new(), bytes: 0, uses: 0, most, most_bytes }
    }

    /// What came of a grammar, if it is known.
    pub(crate) fn find(&mut self, source: &Source) -> Option<Outcome> {
        self.uses += 1;
        let kept = self.kept.get_mut(source)?;
        kept.used = self.uses;
        Some(kept.outcome.clone())
    }

    /// Keeps what came of one.
    pub(crate) fn keep(&mut self, source: Source, outcome: Outcome) {
        self.forget(&source);
        while !self.kept.is_empty()
            && (self.kept.len() >= self.most || self.bytes + source.text.len() > self.most_bytes)
        {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used).map(|(source, _)| source.clone());
            let Some(oldest) = oldest else { break };
            self.forget(&oldest);
        }
        self.uses += 1;
        self.bytes += source.text.len();
        self.kept.insert(source, Kept { outcome, used: self.uses });
    }

    fn forget(&mut self, source: &Source) {
        if self.kept.remove(source).is_some() {
            self.bytes -= source.text.len();
        }
    }

    #[cfg(test)]
    fn holds(&self, source: &Source) -> bool {
        self.kept.contains_key(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_goes_first_by_number_and_by_bytes() {
        let named = |name: &str| Source::regex(name);
        let mut cache = Cache::new(2, 100);
        let mut keep = |name: &str| {
            cache.keep(named(name), Err(GrammarError::Refused(name.into())));
            if name == "b" {
                assert!(cache.find(&named("a")).is_some());
            }
        };
        ["a", "b", "c"].into_iter().for_each(&mut keep);
        assert!(cache.holds(&named("a")) && !cache.holds(&named("b")) && cache.holds(&named("c")));
        let long = named(&"x".repeat(99));
        cache.keep(long.clone(), Err(GrammarError::Busy(1)));
        cache.keep(long.clone(), Err(GrammarError::Busy(2)));
        assert_eq!(cache.find(&long).unwrap().err(), Some(GrammarError::Busy(2)));
        assert!(cache.holds(&long) && !cache.holds(&named("a")), "only {} bytes fit", cache.most_bytes);
        cache.forget(&long);
        assert_eq!((cache.bytes, cache.kept.len()), (1, 1));
    }
}

//! Grammars that were compiled, the least recently used first to go.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::GrammarError;
use crate::compiled::Compiled;
use crate::source::Source;

/// What came of compiling a grammar, once it has.
pub(crate) type Outcome = OnceLock<Result<Arc<Compiled>, GrammarError>>;

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
    outcome: Arc<Outcome>,
    used: u64,
}

impl Cache {
    pub(crate) fn new(most: usize, most_bytes: usize) -> Self {
        Self { kept: HashMap::new(), bytes: 0, uses: 0, most, most_bytes }
    }

    /// The place for a grammar's outcome: the first to ask compiles it, the others wait for that.
    pub(crate) fn place(&mut self, source: &Source) -> Arc<Outcome> {
        self.uses += 1;
        if let Some(kept) = self.kept.get_mut(source) {
            kept.used = self.uses;
            return Arc::clone(&kept.outcome);
        }
        while !self.kept.is_empty()
            && (self.kept.len() >= self.most || self.bytes + source.text.len() > self.most_bytes)
        {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used).map(|(source, _)| source.clone());
            let Some(oldest) = oldest else { break };
            self.forget(&oldest);
        }
        let outcome = Arc::new(Outcome::new());
        self.bytes += source.text.len();
        self.kept.insert(source.clone(), Kept { outcome: Arc::clone(&outcome), used: self.uses });
        outcome
    }

    /// What came of it holds for now alone.
    pub(crate) fn forget(&mut self, source: &Source) {
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
        cache.place(&named("a"));
        cache.place(&named("b"));
        cache.place(&named("a"));
        cache.place(&named("c"));
        assert!(cache.holds(&named("a")) && !cache.holds(&named("b")) && cache.holds(&named("c")));
        let long = named(&"x".repeat(99));
        cache.place(&long);
        assert!(cache.holds(&long) && !cache.holds(&named("a")), "only {} bytes fit", cache.most_bytes);
        cache.forget(&long);
        assert_eq!((cache.bytes, cache.kept.len()), (1, 1));
    }
}

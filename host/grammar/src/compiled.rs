//! A compiled grammar, from which answers begin.

use llguidance::Matcher;
use parking_lot::Mutex;

use crate::state::State;

/// A compiled grammar. All answers under it start from one copy of the engine.
pub struct Compiled {
    /// The engine at the beginning of an answer. It is copied and never advanced.
    fresh: Mutex<Matcher>,
    width: u32,
    /// The work that the lexer was made with, in the engine's units.
    lexer: u64,
    memory: usize,
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiled").field("width", &self.width).finish_non_exhaustive()
    }
}

impl Compiled {
    /// Wraps an engine that is at the beginning of an answer. `memory`: see [`memory`](Self::memory).
    pub(crate) fn new(fresh: Matcher, width: u32, lexer: u64, memory: usize) -> Self {
        Self { fresh: Mutex::new(fresh), width, lexer, memory }
    }

    /// Bytes that it takes with its text, as estimated: rather too many than too few. Answers that are under way are not counted:
    /// they share its rules, and each has a [lexer](Self::lexer) of its own.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.memory
    }

    /// The work that a copy of the lexer was made with, as of [`State::lexer`].
    #[must_use]
    pub fn lexer(&self) -> u64 {
        self.lexer
    }

    /// The state at the beginning of an answer. The tokens `ends` end the answer.
    #[must_use]
    pub fn begin(&self, ends: Vec<u32>) -> State {
        // A deep copy has its own lexer, so answers under one grammar never wait for each other.
        State::new(self.fresh.lock().deep_clone(), self.width, ends, self.lexer)
    }
}

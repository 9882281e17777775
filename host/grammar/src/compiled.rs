//! What comes of compiling a grammar: answers begin from it.

use llguidance::Matcher;
use parking_lot::Mutex;

use crate::state::State;

/// A grammar that can be carried out.
pub struct Compiled {
    /// At the beginning, never moved on.
    fresh: Mutex<Matcher>,
    width: u32,
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiled").field("width", &self.width).finish_non_exhaustive()
    }
}

impl Compiled {
    /// From the engine at the beginning of an answer.
    pub(crate) fn new(fresh: Matcher, width: u32) -> Self {
        Self { fresh: Mutex::new(fresh), width }
    }

    /// The place at which an answer begins that these tokens end.
    #[must_use]
    pub fn begin(&self, ends: Vec<u32>) -> State {
        // Its own lexer: answers under one grammar wait for each other nowhere.
        State::new(self.fresh.lock().deep_clone(), self.width, ends)
    }
}

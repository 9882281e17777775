//! The place of an answer in its grammar, and the tokens that it allows next.

use llguidance::Matcher;
use toktrie::SimpleVob;

use crate::GrammarError;

/// One answer's place in its grammar. It depends only on the tokens that it has consumed. For one thread at a time.
pub struct State {
    matcher: Matcher,
    width: u32,
    /// Tokens that end the answer. They stand for no text.
    ends: Vec<u32>,
    ended: bool,
    lexer: u64,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("ended", &self.ended).finish_non_exhaustive()
    }
}

/// The tokens that may come next.
#[derive(Clone, Debug)]
pub struct Mask {
    allowed: SimpleVob,
    width: u32,
}

impl State {
    /// `lexer`: see [`lexer`](Self::lexer).
    pub(crate) fn new(matcher: Matcher, width: u32, ends: Vec<u32>, lexer: u64) -> Self {
        Self { matcher, width, ends, ended: false, lexer }
    }

    /// The work that the answer's lexer was made with, in the engine's units. Its memory grows with it.
    #[must_use]
    pub fn lexer(&self) -> u64 {
        self.lexer
    }

    /// Advances by one token of the answer.
    ///
    /// # Errors
    /// When the grammar does not allow the token here.
    pub fn consume(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.ended {
            return Ok(());
        }
        if self.ends.contains(&token) {
            return match self.may_end()? {
                true => {
                    self.ended = true;
                    Ok(())
                }
                false => Err(GrammarError::Stuck(format!("token {token} ends it too early"))),
            };
        }
        self.matcher.consume_token(token).map_err(stuck)
    }

    /// The tokens that may come next. Tokens that end the answer are allowed only where the grammar can end.
    ///
    /// # Errors
    /// When no token may come next, or finding them takes too much work.
    pub fn mask(&mut self) -> Result<Mask, GrammarError> {
        let over = self.ended || (self.matcher.is_stopped() && !self.matcher.is_error());
        let mut allowed = match over {
            true => SimpleVob::alloc(self.width as usize + 1),
            false => {
                let allowed = self.matcher.compute_mask().map_err(stuck)?;
                self.lexer += self.matcher.last_step_stats().map_or(0, |stats| stats.lexer_cost);
                allowed
            }
        };
        let may_end = over || allowed.get(self.width as usize);
        for &end in &self.ends {
            if end < self.width {
                allowed.set(end as usize, may_end);
            }
        }
        allowed.set(self.width as usize, false);
        if allowed.is_zero() {
            return Err(GrammarError::Stuck("no token of the vocabulary may come next".into()));
        }
        Ok(Mask { allowed, width: self.width })
    }

    /// Whether the answer may end here.
    ///
    /// # Errors
    /// When the engine has failed earlier.
    pub fn may_end(&mut self) -> Result<bool, GrammarError> {
        if self.ended || (self.matcher.is_stopped() && !self.matcher.is_error()) {
            return Ok(true);
        }
        self.matcher.is_accepting().map_err(stuck)
    }
}

/// An error with the first line of the engine's message, without the engine's own state.
fn stuck(error: impl std::fmt::Display) -> GrammarError {
    GrammarError::Stuck(first_line(&error.to_string()))
}

pub(crate) fn first_line(message: &str) -> String {
    const LONGEST: usize = 300;
    let line = message.lines().next().unwrap_or_default();
    line.chars().take(LONGEST).collect()
}

impl Mask {
    /// Sets the logits of tokens that may not come next to minus infinity.
    pub fn apply(&self, logits: &mut [f32]) {
        let words = self.allowed.as_slice();
        for (index, logit) in logits.iter_mut().enumerate() {
            let word = words.get(index / 32).copied().unwrap_or(0);
            if word >> (index % 32) & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Whether this token may come next.
    #[must_use]
    pub fn allows(&self, token: u32) -> bool {
        token < self.width && self.allowed.get(token as usize)
    }

    /// The tokens that may come next, in ascending order.
    #[must_use]
    pub fn tokens(&self) -> Vec<u32> {
        self.allowed.to_list()
    }
}

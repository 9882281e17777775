//! Batches that an executor computes, and their results.

use std::borrow::Cow;
use std::ops::Range;

use crate::ids::{PageId, Room};
use crate::sampling::Draw;
use crate::window::WindowPages;

/// One forward pass over any mix of prefill chunks and decode steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Counts up from 1 on each worker.
    pub id: u64,
    /// The sequences, each at most once.
    pub sequences: Vec<Sequence>,
    /// The executor reports progress each time the KV of so many more layers is in the pool. With 0 it reports none.
    pub layer_group: u32,
}

impl Batch {
    /// Tokens to compute, over all sequences.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).sum()
    }
}

/// One sequence of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// The request.
    pub room: Room,
    /// Tokens to compute now, at least one.
    pub tokens: Vec<u32>,
    /// Position of `tokens[0]` in the sequence. `pages` hold the KV of everything before this position. `window` holds
    /// the KV of sliding layers for what this position sees.
    pub start: u32,
    /// Pages that hold positions `0 .. start + tokens.len()`, in order. The executor writes the KV of the new
    /// positions, but for those in `recompute`.
    pub pages: Vec<PageId>,
    /// Where the sliding layers' KV lies, which is not in `pages`: the window parts of the token pages from
    /// [`first_live`](crate::window::first_live)`(start)` to the page of the last new position. Parts of earlier pages
    /// may be here too, but none before the first position of `recompute`.
    pub window: WindowPages,
    /// The recompute range: positions that are computed, now or before, for the KV of sliding layers alone. None of these
    /// layers sees a position before them. No other layer's KV is written for them, since `pages` hold it already. Empty
    /// for most sequences, and once all of them are computed.
    pub recompute: Range<u32>,
    /// How many of the last `tokens` are drafted, that is, guesses at future draws. 0 for most sequences, and always fewer than
    /// `tokens`.
    pub drafted: u32,
    /// The draw behind the last token that is not drafted, if that token is wanted. The executor then also draws behind each
    /// drafted token, as long as the drafted tokens equal the drawn ones.
    pub sample: Option<Draw>,
    /// The tokens of the prompt whose log probabilities are wanted. Such a sequence draws nothing.
    pub scored: Option<Scored>,
}

/// Tokens of a prompt whose log probabilities a batch finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scored {
    /// The token behind each of the sequence's `tokens`, in order. It has none for the last token of a prompt.
    pub next: Vec<u32>,
    /// The number of likeliest tokens that are reported with each, at most [`MAX_TOP_LOGPROBS`].
    pub top: u8,
}

impl Sequence {
    /// Positions that have KV once this batch is done.
    #[must_use]
    pub fn end(&self) -> usize {
        self.start as usize + self.tokens.len()
    }

    /// The drafted tokens.
    #[must_use]
    pub fn draft(&self) -> &[u32] {
        &self.tokens[self.tokens.len().saturating_sub(self.drafted as usize)..]
    }

    /// Position behind the last token that is not drafted: that of the first draw.
    #[must_use]
    pub fn known(&self) -> usize {
        self.end().saturating_sub(self.drafted as usize)
    }

    /// The rows that the sequence draws from: behind its last known token, and behind each drafted one.
    #[must_use]
    pub fn drawing_rows(&self) -> usize {
        self.sample.as_ref().map_or(0, |_draw| 1 + self.draft().len())
    }

    /// Rows of logits that are wanted: the last ones of the sequence. They are those that it draws from, or all if its tokens are
    /// scored.
    #[must_use]
    pub fn wanted_rows(&self) -> usize {
        if self.scored.is_some() { self.tokens.len() } else { self.drawing_rows() }
    }

    /// Draws the tokens that the sequence wants. `draw` gets the number of drafted tokens before the wanted one, and the draw. It
    /// is called for the token behind the next drafted one as long as the drafted token equals the drawn one.
    ///
    /// An error of `draw` ends the drawing. It is returned with the tokens drawn before it.
    pub fn sampled<E>(
        &self,
        mut draw: impl FnMut(usize, &Draw) -> Result<Sampled, E>,
    ) -> (Vec<Sampled>, Option<E>) {
        let mut drawn: Vec<Sampled> = Vec::new();
        let Some(first) = &self.sample else { return (drawn, None) };
        let mut next = Cow::Borrowed(first);
        for before in 0..=self.draft().len() {
            if let Some(drafted) = before.checked_sub(1).map(|last| self.draft()[last]) {
                if drawn.last().is_none_or(|last| last.token != drafted) {
                    break;
                }
                next.to_mut().goes_on(drafted);
            }
            match draw(before, &next) {
                Ok(sampled) => drawn.push(sampled),
                Err(why) => return (drawn, Some(why)),
            }
        }
        (drawn, None)
    }
}

/// Most entries of [`Sampled::top`].
pub const MAX_TOP_LOGPROBS: u8 = 20;

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Its log probability (natural logarithm, at temperature 1), when asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens, best first, when asked for.
    pub top: Vec<(u32, f32)>,
}

/// The result of one sequence of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceOutput {
    /// The request.
    pub room: Room,
    /// The tokens that were drawn, in order: one if the batch asked for a sample, and one more for each drafted token before
    /// the first wrong one.
    pub sampled: Vec<Sampled>,
    /// Why a token that was asked for was not drawn: the first one, or one behind a drafted token.
    pub undrawn: Option<Undrawn>,
    /// The tokens of [`Scored::next`] with their log probabilities, in order.
    pub scored: Vec<Sampled>,
}

/// Why no token was drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undrawn {
    /// The request can have no further token, on any worker. Says why.
    Refused(String),
    /// The executor could not find out which tokens may follow. Says why.
    Failed(String),
    /// The tokens that may follow were not known in time. The sequence draws in a later batch. If it drew nothing, its next batch
    /// computes the last known token again, so only workers that [may draw late](crate::Config::may_draw_late) answer this.
    Late,
}

//! The progress of an answer over all tries.
//!
//! A draw depends on the seed and on the token's place in the sequence. So a try that begins with the client's prompt and the
//! answer so far brings the same tokens that the broken try would have brought.

use std::borrow::Borrow;

/// The sequence that the next try begins with, and the tokens that the try under way has brought. `P` holds the tokens of a
/// prompt, which others may share.
#[derive(Clone, Debug)]
pub struct Answer<P> {
    /// The client's prompt, and after it the tokens of the answer that earlier tries brought.
    prompt: P,
    /// Tokens of the client's prompt.
    given: usize,
    /// Tokens that the try under way has brought.
    tokens: Vec<u32>,
    /// Tokens that the answer may have in all, once a worker has been chosen for it.
    most: Option<u32>,
}

impl<P: Borrow<Vec<u32>>> Answer<P> {
    /// An answer to the client's prompt that has no token yet.
    #[must_use]
    pub fn new(prompt: P) -> Self {
        let given = prompt.borrow().len();
        Self { prompt, given, tokens: Vec::new(), most: None }
    }

    /// The prompt of the next try.
    #[must_use]
    pub fn prompt(&self) -> &P {
        &self.prompt
    }

    /// Tokens of the client's prompt.
    #[must_use]
    pub fn given(&self) -> usize {
        self.given
    }

    /// Tokens that the try under way may still bring. Zero before [`limit`](Self::limit).
    #[must_use]
    pub fn left(&self) -> u32 {
        self.most.unwrap_or(0).saturating_sub(self.answered())
    }

    /// Sets how many tokens the answer may have. After its first token the limit is fixed.
    pub fn limit(&mut self, most: u32) {
        if self.answered() == 0 {
            self.most = Some(most);
        }
    }

    /// Tokens that the try under way has brought.
    #[must_use]
    pub fn brought(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens of the answer.
    #[must_use]
    pub fn answered(&self) -> u32 {
        u32::try_from(self.prompt.borrow().len() - self.given + self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// Adds one more token. Returns false, and adds none, if the answer has enough.
    pub fn push(&mut self, token: u32) -> bool {
        let wanted = self.left() > 0;
        if wanted {
            self.tokens.push(token);
        }
        wanted
    }

    /// The last token of the answer so far.
    #[must_use]
    pub fn last(&self) -> Option<u32> {
        let answered = self.answered() > 0;
        if answered { self.tokens.last().or(self.prompt.borrow().last()).copied() } else { None }
    }

    /// Ends a try, and appends its tokens to the prompt of the next try. `own` makes the prompt writable.
    pub fn keep(&mut self, own: impl FnOnce(&mut P) -> &mut Vec<u32>) {
        own(&mut self.prompt).append(&mut self.tokens);
    }

    /// Ends a try, and drops its tokens.
    pub fn forget(&mut self) {
        self.tokens.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_broken_try_are_part_of_the_next_prompt_and_of_the_answer() {
        let mut answer = Answer::new(vec![1, 2, 3]);
        answer.limit(3);
        assert_eq!(answer.last(), None);
        assert!(answer.push(7));
        answer.keep(|prompt| prompt);
        answer.limit(100);
        assert!(answer.push(8));
        assert_eq!((answer.answered(), answer.left(), answer.last()), (2, 1, Some(8)));
        answer.keep(|prompt| prompt);
        assert_eq!((answer.prompt().as_slice(), answer.given()), (&[1, 2, 3, 7, 8][..], 3));
        assert_eq!(answer.last(), Some(8));
        assert!(answer.push(9));
        assert!(!answer.push(10), "one more than was asked for");
    }
}

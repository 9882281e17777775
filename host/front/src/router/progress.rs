//! How far an answer has come, over all tries.
//!
//! A draw depends on the seed and on the token's place in the sequence. So a try whose prompt is the client's and the answer so
//! far brings the tokens that the broken one would have brought.

use std::sync::Arc;

use host_wire::proto::{Began, Finished};

/// The sequence that the next try begins with, and what the client has been told.
#[derive(Clone, Debug)]
pub(super) struct Progress {
    /// The client's prompt, and after it what earlier tries brought of the answer.
    prompt: Arc<Vec<u32>>,
    /// Tokens of the client's prompt.
    given: usize,
    /// What the try under way has brought.
    tokens: Vec<u32>,
    /// Tokens that the answer may have in all, once a worker has been chosen for it.
    most: Option<u32>,
    /// What the client was told of its prompt's KV.
    began: Option<Began>,
}

impl Progress {
    pub fn new(prompt: Arc<Vec<u32>>) -> Self {
        let given = prompt.len();
        Self { prompt, given, tokens: Vec::new(), most: None, began: None }
    }

    /// The prompt of the next try.
    pub fn prompt(&self) -> &Arc<Vec<u32>> {
        &self.prompt
    }

    /// Tokens that the try under way may still bring. Zero before [`Progress::limit`].
    pub fn left(&self) -> u32 {
        self.most.unwrap_or(0).saturating_sub(self.answered())
    }

    /// Says how many tokens the answer may have. Once it has one, that is fixed.
    pub fn limit(&mut self, most: u32) {
        if self.answered() == 0 {
            self.most = Some(most);
        }
    }

    /// Tokens that the try under way has brought.
    pub fn brought(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens of the answer.
    pub fn answered(&self) -> u32 {
        u32::try_from(self.prompt.len() - self.given + self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// Tokens at the end of the prompt of the next try that belong to the answer.
    pub fn kept(&self) -> u32 {
        u32::try_from(self.prompt.len() - self.given).unwrap_or(u32::MAX)
    }

    /// Notes one more token. False when there were enough.
    pub fn push(&mut self, token: u32) -> bool {
        let wanted = self.left() > 0;
        if wanted {
            self.tokens.push(token);
        }
        wanted
    }

    /// Notes what a worker reports of the prompt's KV, and returns what the client is told: nothing after the first time.
    pub fn begin(&mut self, began: Began) -> Option<Began> {
        let first = self.began.is_none();
        first.then(|| self.began.insert(began).clone())
    }

    /// The last token of the answer so far.
    pub fn last(&self) -> Option<u32> {
        let answered = self.answered() > 0;
        if answered { self.tokens.last().or(self.prompt.last()).copied() } else { None }
    }

    /// Ends a try: what it brought is part of the next one's prompt.
    pub fn keep(&mut self) {
        Arc::make_mut(&mut self.prompt).append(&mut self.tokens);
    }

    /// Ends a try: what it brought is void.
    pub fn forget(&mut self) {
        self.tokens.clear();
        self.began = None;
    }

    /// The end of the whole answer, from the end of its last try.
    pub fn finish(&self, last: Finished) -> Finished {
        if self.given == self.prompt.len() {
            return last;
        }
        Finished {
            prompt_tokens: u32::try_from(self.given).unwrap_or(u32::MAX),
            output_tokens: self.answered(),
            cached_tokens: self.began.as_ref().map_or(last.cached_tokens, |began| began.cached_tokens),
            ..last
        }
    }

    /// The end of an answer whose last try broke after its last token.
    pub fn finished(&self, reason: &str) -> Finished {
        let began = self.began.clone().unwrap_or_default();
        Finished {
            reason: reason.to_owned(),
            prompt_tokens: u32::try_from(self.given).unwrap_or(u32::MAX),
            output_tokens: self.answered(),
            transferred_bytes: began.transferred_bytes,
            transfer_plugin: began.transfer_plugin,
            cached_tokens: began.cached_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress() -> Progress {
        let mut progress = Progress::new(Arc::new(vec![1, 2, 3]));
        progress.limit(3);
        progress
    }

    #[test]
    fn tokens_of_a_broken_try_are_part_of_the_next_prompt_and_of_the_answer() {
        let mut progress = progress();
        assert_eq!(progress.last(), None);
        assert!(progress.push(7));
        progress.keep();
        progress.limit(100);
        assert!(progress.push(8));
        assert_eq!((progress.answered(), progress.left(), progress.last()), (2, 1, Some(8)));
        progress.keep();
        assert_eq!((progress.prompt().as_slice(), progress.kept()), (&[1, 2, 3, 7, 8][..], 2));
        assert_eq!(progress.last(), Some(8));
        assert!(progress.push(9));
        assert!(!progress.push(10), "one more than was asked for");
        let last =
            Finished { prompt_tokens: 5, output_tokens: 1, reason: "length".into(), ..Finished::default() };
        let finished = progress.finish(last);
        assert_eq!((finished.prompt_tokens, finished.output_tokens), (3, 3));
    }

    #[test]
    fn the_prompts_kv_is_told_of_once_and_again_only_when_the_answer_begins_again() {
        let mut progress = progress();
        let began = |cached_tokens| Began { cached_tokens, ..Began::default() };
        assert_eq!(progress.begin(began(1)), Some(began(1)));
        progress.push(7);
        progress.keep();
        assert_eq!(progress.begin(began(4)), None);
        assert_eq!(progress.finish(Finished { cached_tokens: 4, ..Finished::default() }).cached_tokens, 1);
        assert_eq!(progress.finished("stop").cached_tokens, 1);
        progress.forget();
        assert_eq!(progress.begin(began(2)), Some(began(2)));
    }
}

//! The progress of an answer over all tries of its request.

use std::sync::Arc;

use host_core::routing::Answer;
use host_wire::proto::{Began, Finished};

/// How far the answer has come, and what the client knows of it.
#[derive(Clone, Debug)]
pub(super) struct Progress {
    pub answer: Answer<Arc<Vec<u32>>>,
    /// The report on the prompt's KV that the client got.
    began: Option<Began>,
}

impl Progress {
    pub fn new(answer: Answer<Arc<Vec<u32>>>) -> Self {
        Self { answer, began: None }
    }

    /// Notes a worker's report on the prompt's KV. Returns it for the client the first time, and `None` later.
    pub fn begin(&mut self, began: Began) -> Option<Began> {
        let first = self.began.is_none();
        first.then(|| self.began.insert(began).clone())
    }

    /// Ends a try whose tokens are void.
    pub fn forget(&mut self) {
        self.answer.forget();
        self.began = None;
    }

    /// The end of the whole answer, from the end of its last try.
    pub fn finish(&self, last: Finished) -> Finished {
        if self.answer.given() == self.answer.prompt().len() {
            return last;
        }
        Finished {
            prompt_tokens: u32::try_from(self.answer.given()).unwrap_or(u32::MAX),
            output_tokens: self.answer.answered(),
            cached_tokens: self.began.as_ref().map_or(last.cached_tokens, |began| began.cached_tokens),
            ..last
        }
    }

    /// The end of an answer whose last try broke after its last token.
    pub fn finished(&self, reason: &str) -> Finished {
        let began = self.began.clone().unwrap_or_default();
        Finished {
            reason: reason.to_owned(),
            prompt_tokens: u32::try_from(self.answer.given()).unwrap_or(u32::MAX),
            output_tokens: self.answer.answered(),
            transferred_bytes: began.transferred_bytes,
            transfer_plugin: began.transfer_plugin,
            cached_tokens: began.cached_tokens,
            offload_tokens: began.offload_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress() -> Progress {
        let mut answer = Answer::new(Arc::new(vec![1, 2, 3]));
        answer.limit(3);
        Progress::new(answer)
    }

    #[test]
    fn the_end_of_an_answer_that_went_on_elsewhere_counts_all_of_its_tokens() {
        let mut progress = progress();
        for token in [7, 8] {
            assert!(progress.answer.push(token));
            progress.answer.keep(Arc::make_mut);
        }
        assert!(progress.answer.push(9));
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
        progress.answer.push(7);
        progress.answer.keep(Arc::make_mut);
        assert_eq!(progress.begin(began(4)), None);
        assert_eq!(progress.finish(Finished { cached_tokens: 4, ..Finished::default() }).cached_tokens, 1);
        assert_eq!(progress.finished("stop").cached_tokens, 1);
        progress.forget();
        assert_eq!(progress.begin(began(2)), Some(began(2)));
    }
}

//! Asks whether objects are there. NIXL's question blocks, so a thread of its own asks it, of many names at once.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

use host_plugin_api::{Level, log};
use host_transfer_kit::locked;

use crate::capi::Agent;

/// Most names in one question.
const NAMES: usize = 256;

#[derive(Default)]
struct State {
    waiting: VecDeque<(u64, Vec<u8>)>,
    /// How many questions there were so far, and how many of them wait no more.
    questions: u64,
    sent: u64,
    answers: Vec<(u64, Option<bool>)>,
    stopping: bool,
}

/// Questions and answers, by page.
#[derive(Default)]
pub struct Asking {
    state: Mutex<State>,
    news: Condvar,
}

impl Asking {
    /// Adds a question. Returns its number.
    pub fn ask(&self, page: u64, name: Vec<u8>) -> u64 {
        let mut state = locked(&self.state);
        state.waiting.push_back((page, name));
        state.questions += 1;
        let number = state.questions;
        drop(state);
        self.news.notify_one();
        number
    }

    /// Whether a question is still to be sent, so that its answer is newer than this call.
    pub fn is_to_come(&self, number: u64) -> bool {
        number > locked(&self.state).sent
    }

    /// Takes the answers since the last call. `None` where the bucket gave no answer.
    pub fn answers(&self) -> Vec<(u64, Option<bool>)> {
        std::mem::take(&mut locked(&self.state).answers)
    }

    /// Forgets questions that were not sent yet, unless `wanted` accepts their page.
    pub fn keep(&self, wanted: impl Fn(u64) -> bool) {
        let mut state = locked(&self.state);
        let before = state.waiting.len();
        state.waiting.retain(|(page, _)| wanted(*page));
        // The questions after them seem to be sent sooner than they are, which does no harm.
        state.sent += (before - state.waiting.len()) as u64;
    }

    pub fn stop(&self) {
        locked(&self.state).stopping = true;
        self.news.notify_all();
    }

    /// The thread that asks, until it is stopped.
    pub fn run(&self, mut agent: Agent) {
        while let Some(questions) = self.next() {
            let (pages, names): (Vec<u64>, Vec<Vec<u8>>) = questions.into_iter().unzip();
            let answers: Vec<Option<bool>> = match agent.query_objects(&names) {
                Ok(there) => there.into_iter().map(Some).collect(),
                Err(refusal) => {
                    log!(Level::WARN, "{} objects could not be queried: {refusal}", names.len());
                    vec![None; names.len()]
                }
            };
            locked(&self.state).answers.extend(pages.into_iter().zip(answers));
        }
    }

    fn next(&self) -> Option<Vec<(u64, Vec<u8>)>> {
        let idle = |state: &mut State| state.waiting.is_empty() && !state.stopping;
        let state = self.news.wait_while(locked(&self.state), idle);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let count = state.waiting.len().min(NAMES);
        state.sent += count as u64;
        (!state.stopping).then(|| state.waiting.drain(..count).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_shared_until_its_question_is_sent_and_never_after() {
        let asking = Asking::default();
        let numbers: Vec<u64> = (0..4).map(|page| asking.ask(page, Vec::new())).collect();
        assert!(numbers.iter().all(|number| asking.is_to_come(*number)));
        asking.keep(|page| page != 1);
        assert!(asking.is_to_come(numbers[3]));
        assert_eq!(asking.next().unwrap().len(), 3);
        assert!(!numbers.iter().any(|number| asking.is_to_come(*number)));
        let next = asking.ask(9, Vec::new());
        assert!(asking.is_to_come(next));
        assert_eq!(asking.next().unwrap(), [(9, Vec::new())]);
        assert!(!asking.is_to_come(next));
        asking.stop();
        assert!(asking.next().is_none());
    }
}

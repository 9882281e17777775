//! The prompts of the demo.

use crate::client::{Ask, Message};

/// One prompt, or one turn of the conversation.
pub struct Prompt {
    /// Its name in the tables.
    pub name: String,
    /// The request.
    pub ask: Ask,
}

const PASSAGE: &str = "A prompt is computed once, on a worker that does nothing else. What the computation leaves \
    behind, keys and values for every token and layer, is written page by page into the memory of another worker, \
    which then adds one token after the other. ";

/// A user's messages of four turns.
pub const TURNS: [&str; 4] = [
    "What is the capital of France?",
    "Name two things to see there.",
    "Which of them is older?",
    "What do people like to eat in that city?",
];

/// Prompts that stand alone: a sentence, letters of other scripts, and one that takes many pages.
pub fn prompts() -> Vec<Prompt> {
    let prompt = |name: &str, text: String| Prompt { name: name.to_owned(), ask: Ask::Completion(text) };
    vec![
        prompt("sentence", "The quick brown fox jumps over".into()),
        prompt("unicode", "Café, naïve, 漢字 and 🦀:".into()),
        prompt("long", PASSAGE.repeat(8)),
    ]
}

/// The next turn of a conversation so far.
pub fn turn(number: usize, messages: &[Message]) -> Prompt {
    Prompt { name: format!("turn {number}"), ask: Ask::Chat(messages.to_vec()) }
}

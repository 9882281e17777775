//! Grammars that limit an answer: a JSON schema, a regular expression, a choice, or rules.
//!
//! ```text
//! what a client writes ─► Source ─► Compiler ─► Compiled ─► State ─► Mask ─► logits
//!                         text      vocabulary   shared      one request's, moved on by each token
//! ```
//!
//! A [`Source`] is text and travels with its request. Every worker compiles it over the bytes of its own model's
//! [`Vocabulary`], and caches the result. A [`State`] depends only on the tokens of the answer so far: the same tokens, fed to a
//! fresh state on another worker, allow the same next tokens.
//!
//! The engine is llguidance. None of its names is part of this crate's interface.

#![forbid(unsafe_code)]

mod cache;
mod compiled;
mod compiler;
pub mod ebnf;
mod jobs;
mod limits;
mod memory;
mod queue;
mod schema;
mod source;
mod state;
mod vocabulary;

pub use compiled::Compiled;
pub use compiler::Compiler;
pub use jobs::Asked;
pub use limits::Limits;
pub use queue::Queue;
pub use source::{Kind, MAX_DEPTH, MAX_TEXT, Source, json_rule, quoted as lark_text};
pub use state::{Mask, State};
pub use vocabulary::Vocabulary;

/// Why a grammar cannot be used, or an answer under it cannot go on. It displays as a sentence for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The text is too large or too deep, or contains something that clients may not send.
    #[error("{0}")]
    Refused(String),
    /// The text is no grammar, or a grammar that the engine cannot use.
    #[error("the {kind} cannot be used: {reason}")]
    Compile {
        /// What the text should be.
        kind: &'static str,
        /// The engine's message.
        reason: String,
    },
    /// Compiling takes longer than a request may wait.
    #[error("the {kind} takes longer to compile than {seconds} s; make it smaller")]
    Slow {
        /// What the text is.
        kind: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// Too many grammars of the client wait to be compiled.
    #[error(
        "{0} grammars of this client wait to be compiled, which is the limit; send more when some have been answered"
    )]
    Busy(usize),
    /// The grammar's turn to be compiled did not come in time.
    #[error(
        "the {kind} waited {seconds} s for its turn to be compiled, which is the limit: others take long; try again soon"
    )]
    Waited {
        /// What the text is.
        kind: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// This process could not compile it now. Nothing is said about the grammar, and another process may compile it.
    #[error("the {kind} could not be compiled: {reason}; try again soon")]
    Unable {
        /// What the text is.
        kind: &'static str,
        /// What was missing.
        reason: String,
    },
    /// The answer cannot go on under its grammar.
    #[error("the answer cannot go on under its grammar: {0}")]
    Stuck(String),
}

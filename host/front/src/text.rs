//! Text to token ids and back: tokenizers, chat templates, incremental decoding, stop strings.

pub mod byte;
pub mod calls;
pub mod decode;
pub mod huggingface;
pub mod model;
pub mod reasoning;
pub mod stop;
pub mod strftime;
pub mod template;

use std::sync::Arc;

pub use byte::ByteTokenizer;
pub use calls::CallFormat;
pub use decode::TextStream;
pub use model::{Dialect, TextModel};
pub use stop::StopMatcher;
pub use template::ChatTemplate;

/// Text that could not be turned into tokens, a template that could not be rendered, or a model folder that could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file of the model folder.
    #[error("cannot use {file}: {problem}")]
    File {
        /// Its path.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The tokenizer refused the text.
    #[error("the prompt cannot be tokenized: {0}")]
    Encode(String),
    /// The chat template refused the messages (often by its own `raise_exception`).
    #[error("the chat template refused the messages: {0}")]
    Template(String),
}

/// Whether special tokens are part of a text that is decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Specials {
    /// They never show.
    #[default]
    Hidden,
    /// They show as their names.
    Shown,
}

/// Turns text into token ids and back. It is cheap to share. All methods may be called from any thread at once.
pub trait Tokenizer: Send + Sync {
    /// Token ids of `text`. `add_special` adds what the model wants around a plain prompt (a begin-of-sequence token). Chat
    /// templates write these themselves.
    ///
    /// # Errors
    /// When the tokenizer cannot represent the text.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError>;

    /// The bytes that one token stands for, as a `logprobs` field shows them. A special token gives its name, and an id outside
    /// the vocabulary no bytes.
    fn token_bytes(&self, token: u32) -> Vec<u8>;

    /// True for tokens that show in an answer's text only when [`Specials::Shown`] is asked for.
    fn is_special(&self, token: u32) -> bool;

    /// Token ids are less than this.
    fn vocabulary(&self) -> u32;

    /// The tokens that a text has at least, where that is known without tokenizing it and saves work.
    fn least_tokens(&self, _text: &str) -> Option<usize> {
        None
    }

    /// Decodes an answer as it comes, one token at a time, never splitting a character.
    fn stream(self: Arc<Self>, specials: Specials) -> Box<dyn TextStream>;
}

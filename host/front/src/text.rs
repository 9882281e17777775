//! Text to token ids and back: tokenizers, chat templates, incremental decoding, stop strings.

pub mod byte;
pub mod calls;
pub mod decode;
pub(crate) mod held;
pub mod huggingface;
pub mod model;
pub mod reasoning;
pub mod stop;
pub mod strftime;
pub mod template;
pub(crate) mod work;

use std::sync::Arc;

pub use byte::ByteTokenizer;
pub use calls::CallFormat;
pub use decode::TextStream;
pub use model::{Dialect, TextModel};
pub use stop::{StopMatcher, Stops};
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
    /// The chat template writes a prompt of more bytes than this limit.
    #[error("the chat template refused the messages: it writes a prompt of more than {0} bytes")]
    TooLong(usize),
}

/// Whether decoded text shows special tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Specials {
    /// Special tokens never show.
    #[default]
    Hidden,
    /// Special tokens show as their names.
    Shown,
}

/// Turns text into token ids and back. It is cheap to share. All methods may be called from any thread at once.
pub trait Tokenizer: Send + Sync {
    /// Token ids of `text`. `add_special` adds the special tokens that the model needs around a plain prompt (a begin-of-sequence
    /// token). Chat templates write these themselves.
    ///
    /// # Errors
    /// When the tokenizer cannot represent the text.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError>;

    /// The bytes that one token stands for, as a `logprobs` field shows them. For a special token these are its name, and for an
    /// id outside the vocabulary none.
    fn token_bytes(&self, token: u32) -> Vec<u8>;

    /// Whether an answer's text shows the token only with [`Specials::Shown`].
    fn is_special(&self, token: u32) -> bool;

    /// Token ids are less than this.
    fn vocabulary(&self) -> u32;

    /// The least number of tokens of a text, where this is known without tokenizing and saves work.
    fn least_tokens(&self, _text: &str) -> Option<usize> {
        None
    }

    /// A decoder for one answer. It takes one token at a time and never splits a character.
    fn stream(self: Arc<Self>, specials: Specials) -> Box<dyn TextStream>;
}

//! The tokenizer that needs no file: one token per byte.

use std::sync::Arc;

use super::decode::{TextStream, Utf8Stream};
use super::{Specials, TextError, Tokenizer};

/// A tokenizer with one token per byte. Ids 0 to 255 are bytes. Then come [`BOS`](Self::BOS), [`EOS`](Self::EOS) and
/// [`PAD`](Self::PAD). All further ids of the vocabulary have no text, and decode to U+FFFD.
#[derive(Clone, Copy, Debug)]
pub struct ByteTokenizer {
    vocabulary: u32,
}

impl ByteTokenizer {
    /// Begin of sequence. Never added by `encode`.
    pub const BOS: u32 = 256;
    /// End of sequence.
    pub const EOS: u32 = 257;
    /// Padding.
    pub const PAD: u32 = 258;
    /// Smallest vocabulary.
    pub const MIN_VOCABULARY: u32 = 259;

    /// A tokenizer for a model with this many token ids, at least [`MIN_VOCABULARY`](Self::MIN_VOCABULARY).
    #[must_use]
    pub fn new(vocabulary: u32) -> Self {
        Self { vocabulary: vocabulary.max(Self::MIN_VOCABULARY) }
    }
}

impl Tokenizer for ByteTokenizer {
    fn encode(&self, text: &str, _add_special: bool) -> Result<Vec<u32>, TextError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        match (u8::try_from(token), token) {
            (Ok(byte), _) => vec![byte],
            (_, Self::BOS) => b"<bos>".to_vec(),
            (_, Self::EOS) => b"<eos>".to_vec(),
            (_, Self::PAD) => b"<pad>".to_vec(),
            // No valid text has this byte, so it decodes to exactly one U+FFFD.
            (_, token) if token < self.vocabulary => vec![0xff],
            _ => Vec::new(),
        }
    }

    fn is_special(&self, token: u32) -> bool {
        (Self::BOS..=Self::PAD).contains(&token)
    }

    fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    fn stream(self: Arc<Self>, specials: Specials) -> Box<dyn TextStream> {
        Box::new(Utf8Stream::new(self, specials))
    }
}

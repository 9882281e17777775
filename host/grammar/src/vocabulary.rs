//! The bytes that a model's tokens stand for.

use std::sync::Arc;

use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// Marks a special token: no text matches it.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// What each token of a model stands for.
#[derive(Clone)]
pub struct Vocabulary {
    environment: TokEnv,
    /// Token ids are less than this. The engine has one more token, which stands for the end.
    width: u32,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("width", &self.width).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// A vocabulary for logits of this width. `token` gives an id's bytes, and whether the token is special. A special token is no
    /// text, and its bytes are its name. An id without bytes is never allowed.
    #[must_use]
    pub fn new(width: u32, token: impl Fn(u32) -> (Vec<u8>, bool)) -> Self {
        let mut words: Vec<Vec<u8>> = (0..width)
            .map(|id| match token(id) {
                (bytes, _) if bytes.is_empty() => Vec::new(),
                (mut bytes, true) => {
                    bytes.insert(0, SPECIAL);
                    bytes
                }
                // The engine would take this token for a special one. No text has such a byte.
                (bytes, false) if bytes.first() == Some(&SPECIAL) => Vec::new(),
                (bytes, false) => bytes,
            })
            .collect();
        let end = width;
        words.push(b"\xff<|end of the grammar|>".to_vec());
        let trie = TokTrie::from(&TokRxInfo::new(width + 1, end), &words);
        // The environment is not canonical: the engine does not turn forced bytes into tokens. The model chooses how to cut a
        // text into tokens, as without a grammar. The allowed tokens depend only on the text so far.
        Self { environment: Arc::new(ApproximateTokEnv::new(trie)), width }
    }

    /// One token for each byte.
    #[must_use]
    pub fn bytes() -> Self {
        Self::new(256, |id| (u8::try_from(id).map(|byte| vec![byte]).unwrap_or_default(), false))
    }

    /// Token ids are less than this.
    #[must_use]
    pub fn width(&self) -> u32 {
        self.width
    }

    pub(crate) fn environment(&self) -> &TokEnv {
        &self.environment
    }
}

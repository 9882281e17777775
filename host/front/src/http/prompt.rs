//! From a prompt's text to its tokens, and back.

use std::sync::Arc;

use super::App;
use super::error::ApiError;
use crate::router::Failure;
use crate::text::Specials;

/// The tokens of a text. A text that is too long for any prompt is refused before the tokenizer sees it, because the tokenizer's
/// work would grow with the text.
pub(super) fn encode(app: &App, text: &str, add_special: bool) -> Result<Vec<u32>, ApiError> {
    if let (Some(least), Some(limit)) =
        (app.text.tokenizer.least_tokens(text), app.router.registry().max_tokens())
    {
        let least = least as u64;
        // The answer needs at least one token.
        if least >= u64::from(limit) {
            return Err(Failure::TooLongText { limit, least }.into());
        }
    }
    Ok(app.text.tokenizer.encode(text, add_special)?)
}

/// The text of tokens, if it has at most so many bytes. A longer one is not made: a token may stand for many.
pub(super) fn decode_within(app: &App, tokens: &[u32], specials: Specials, most: usize) -> Option<String> {
    let mut stream = Arc::clone(&app.text.tokenizer).stream(specials);
    let mut text = String::new();
    for token in tokens {
        text.push_str(&stream.push(*token));
        if text.len() > most {
            return None;
        }
    }
    text.push_str(&stream.finish());
    (text.len() <= most).then_some(text)
}

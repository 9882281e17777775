//! Decoding while tokens arrive.
//!
//! A character can lie across several tokens, so text is held back until it is certain. Two ways:
//! [`Utf8Stream`] for tokenizers whose tokens are pieces of the text's bytes (exact for any sequence of tokens), and
//! [`WindowStream`] for tokenizers whose text depends on the neighbours (sentencepiece's leading spaces).

use std::sync::Arc;

use super::{Specials, Tokenizer};

/// One answer's decoder.
pub trait TextStream: Send {
    /// The text that became certain with this token, often empty while a character is incomplete.
    fn push(&mut self, token: u32) -> String;

    /// Returns the held text: the rest of an incomplete character, as U+FFFD. Call it once, at the end.
    fn finish(&mut self) -> String;
}

/// For byte-level tokenizers: the bytes of the tokens, joined, are the bytes of the text.
pub struct Utf8Stream<T: ?Sized> {
    tokenizer: Arc<T>,
    specials: Specials,
    /// At most three bytes: the start of a character.
    held: Vec<u8>,
}

impl<T: Tokenizer + ?Sized> Utf8Stream<T> {
    /// A decoder at the start of an answer.
    pub fn new(tokenizer: Arc<T>, specials: Specials) -> Self {
        Self { tokenizer, specials, held: Vec::new() }
    }
}

impl<T: Tokenizer + ?Sized> TextStream for Utf8Stream<T> {
    fn push(&mut self, token: u32) -> String {
        if self.specials == Specials::Hidden && self.tokenizer.is_special(token) {
            return String::new();
        }
        self.held.extend(self.tokenizer.token_bytes(token));
        let held = std::mem::take(&mut self.held);
        let mut text = String::new();
        let mut rest = held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return text;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        Some(wrong) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = after.get(wrong..).unwrap_or_default();
                        }
                        None => {
                            self.held = after.to_vec();
                            return text;
                        }
                    }
                }
            }
        }
    }

    fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}

/// For tokenizers that decode only whole sequences: decodes a window of recent tokens twice, with and without the new ones,
/// and gives the difference.
pub struct WindowStream<F> {
    decode: F,
    tokens: Vec<u32>,
    /// Tokens before this index only give context.
    shown: usize,
}

/// A character has at most four bytes, so after this many tokens an incomplete end will never complete.
const LONGEST_WAIT: usize = 8;

impl<F: Fn(&[u32]) -> String + Send> WindowStream<F> {
    /// A decoder at the start of an answer. `decode` gives the text of a whole sequence of tokens.
    pub fn new(decode: F) -> Self {
        Self { decode, tokens: Vec::new(), shown: 0 }
    }

    fn take(&mut self, even_incomplete: bool) -> String {
        let before = (self.decode)(&self.tokens[..self.shown]);
        let after = (self.decode)(&self.tokens);
        let waits = after.ends_with(char::REPLACEMENT_CHARACTER);
        let waited = self.tokens.len() - self.shown >= LONGEST_WAIT;
        if waits && !waited && !even_incomplete {
            return String::new();
        }
        // If the tokenizer changes text that was already shown, no new text is certain.
        let new = after.strip_prefix(&before).unwrap_or_default().to_owned();
        if new.is_empty() && !waited {
            return new;
        }
        self.tokens.drain(..self.shown);
        self.shown = self.tokens.len();
        new
    }
}

impl<F: Fn(&[u32]) -> String + Send> TextStream for WindowStream<F> {
    fn push(&mut self, token: u32) -> String {
        self.tokens.push(token);
        self.take(false)
    }

    fn finish(&mut self) -> String {
        self.take(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::ByteTokenizer;
    use super::*;

    fn streamed(tokens: &[u32]) -> (Vec<String>, String) {
        streamed_with(Specials::Hidden, tokens)
    }

    fn streamed_with(specials: Specials, tokens: &[u32]) -> (Vec<String>, String) {
        let mut stream = Arc::new(ByteTokenizer::new(300)).stream(specials);
        let mut pieces: Vec<String> = tokens.iter().map(|&token| stream.push(token)).collect();
        pieces.push(stream.finish());
        let whole = pieces.concat();
        (pieces, whole)
    }

    #[test]
    fn a_character_over_several_tokens_comes_out_whole() {
        let tokens: Vec<u32> = "aé漢🦀".bytes().map(u32::from).collect();
        let (pieces, whole) = streamed(&tokens);
        assert_eq!(whole, "aé漢🦀");
        assert_eq!(pieces[1], "", "half an é is held back");
        assert_eq!(pieces[2], "é");
    }

    #[test]
    fn any_bytes_decode_to_what_a_lossy_decode_of_all_of_them_gives() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2000 {
            let mut bytes = Vec::new();
            for _ in 0..12 {
                // Bytes around the borders of UTF-8's classes.
                let classes = [0x41, 0x80, 0xbf, 0xc3, 0xe2, 0x82, 0xac, 0xf0, 0x9f, 0xa6, 0x80, 0xff];
                bytes.push(classes[random.usize(..classes.len())]);
            }
            let tokens: Vec<u32> = bytes.iter().map(|&byte| u32::from(byte)).collect();
            assert_eq!(streamed(&tokens).1, String::from_utf8_lossy(&bytes), "bytes {bytes:x?}");
        }
    }

    #[test]
    fn special_tokens_show_as_their_names_when_they_are_asked_for() {
        assert_eq!(streamed(&[65, ByteTokenizer::EOS, 66]).1, "AB");
        let shown = streamed_with(Specials::Shown, &[65, ByteTokenizer::EOS, 66]).1;
        assert!(shown.starts_with('A') && shown.ends_with('B') && shown.len() > 2, "{shown}");
    }

    #[test]
    fn a_window_shows_each_character_once_and_keeps_the_context() {
        // Like sentencepiece: "▁" begins a word, and the first space of a text is dropped.
        let words = ["▁Hello", "▁wor", "ld", "▁!"];
        let decode = move |tokens: &[u32]| {
            let text: String = tokens.iter().map(|&token| words[token as usize]).collect();
            text.replace('▁', " ").trim_start_matches(' ').to_owned()
        };
        let mut stream = WindowStream::new(decode);
        let pieces: Vec<String> = (0..4).map(|token| stream.push(token)).collect();
        assert_eq!(pieces, ["Hello", " wor", "ld", " !"]);
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn a_window_gives_up_on_a_character_that_never_completes() {
        let mut stream = WindowStream::new(|tokens: &[u32]| {
            let bytes: Vec<u8> = tokens.iter().map(|_| 0xe2).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let text: String = (0..100).map(|_| stream.push(0)).collect();
        assert!(text.chars().count() >= 90, "held {} of 100", 100 - text.chars().count());
    }
}

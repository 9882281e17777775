//! Follows the syntax of a JSON object as it comes, so that text that is none is known at its first wrong byte.
//!
//! What begins an object within a wrong one is read again. As a marker of a call is wrong JSON outside of strings, a text can be part
//! of two objects that are right so far, and not of more.

use crate::text::work::looked_at;

/// The parser takes no JSON with more open brackets.
const DEEPEST: usize = 128;

/// What may come next.
#[derive(Clone, Copy, Debug)]
enum Next {
    Key,
    KeyOrEnd,
    Colon,
    Value,
    ValueOrEnd,
    /// After a value.
    Comma,
    /// In a number or a name such as `true`, whose letters the parser checks.
    Word,
    /// In a string.
    Text {
        key: bool,
        escaped: bool,
    },
}

/// Finds the end of a JSON object.
#[derive(Clone, Debug)]
pub(super) struct Syntax {
    /// The open brackets: whether each is that of an object.
    open: Vec<bool>,
    next: Next,
}

impl Syntax {
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), next: Next::Value }
    }

    /// Reads more text. The length of the text up to and including the bracket that closes the object, or up to a byte that makes it
    /// wrong. The object is not complete then.
    pub(super) fn end(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            looked_at(1);
            match self.after(byte) {
                None => return Some(at),
                Some(Next::Comma) if self.open.is_empty() => return Some(at + 1),
                Some(next) => self.next = next,
            }
        }
        None
    }

    /// What may come after this byte. `None`: it is wrong.
    fn after(&mut self, byte: u8) -> Option<Next> {
        let is_word = byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
        let in_object = self.open.last() == Some(&true);
        Some(match (self.next, byte) {
            (Next::Text { key, escaped: true }, _) => Next::Text { key, escaped: false },
            (Next::Text { key, .. }, b'\\') => Next::Text { key, escaped: true },
            (Next::Text { key, .. }, b'"') => {
                if key {
                    Next::Colon
                } else {
                    Next::Comma
                }
            }
            (next @ Next::Text { .. }, _) => next,
            (Next::Word, _) if is_word => Next::Word,
            (Next::Word, b' ' | b'\t' | b'\r' | b'\n') => Next::Comma,
            (next, b' ' | b'\t' | b'\r' | b'\n') => next,
            (Next::Colon, b':') => Next::Value,
            (Next::Key | Next::KeyOrEnd, b'"') => Next::Text { key: true, escaped: false },
            (Next::Value | Next::ValueOrEnd, b'"') => Next::Text { key: false, escaped: false },
            (Next::Value | Next::ValueOrEnd, b'{' | b'[') if self.open.len() < DEEPEST => {
                self.open.push(byte == b'{');
                if byte == b'{' { Next::KeyOrEnd } else { Next::ValueOrEnd }
            }
            (Next::Value | Next::ValueOrEnd, _) if is_word => Next::Word,
            (Next::Comma | Next::Word, b',') => {
                if in_object {
                    Next::Key
                } else {
                    Next::Value
                }
            }
            (Next::KeyOrEnd, b'}') | (Next::ValueOrEnd, b']') => self.close(),
            (Next::Comma | Next::Word, b'}') if in_object => self.close(),
            (Next::Comma | Next::Word, b']') if !in_object => self.close(),
            _ => return None,
        })
    }

    fn close(&mut self) -> Next {
        self.open.pop();
        Next::Comma
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Some JSON.
    fn drawn(random: &mut fastrand::Rng, depth: usize) -> Value {
        const TEXTS: [&str; 7] = ["", "a", "\"", "\\", "}]", "{[,:", "é\n<tool_call>"];
        let mut text = || (*random.choice(&TEXTS).unwrap()).to_owned();
        let (key, word) = (text(), text());
        match random.usize(..if depth > 3 { 5 } else { 9 }) {
            0 => Value::Null,
            1 => Value::Bool(random.bool()),
            2 => Value::from(random.i64(..)),
            3 => Value::from(random.f64() * 1e30),
            4 => Value::from(word),
            5 | 6 => (0..random.usize(..4)).map(|_| drawn(random, depth + 1)).collect(),
            _ => (0..random.usize(..4))
                .map(|index| (format!("{key}{index}"), drawn(random, depth + 1)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        }
    }

    #[test]
    fn an_object_ends_where_the_parser_says_and_a_wrong_byte_ends_it() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..5_000 {
            let object = serde_json::json!({"a": drawn(&mut random, 0), "b": drawn(&mut random, 0)});
            let text = if random.bool() {
                object.to_string()
            } else {
                serde_json::to_string_pretty(&object).unwrap()
            };
            assert_eq!(Syntax::new().end(&(text.clone() + "} more")), Some(text.len()), "{text}");
            let cut = text.floor_char_boundary(random.usize(..text.len()));
            let mut syntax = Syntax::new();
            assert_eq!(syntax.end(&text[..cut]), None, "{text} at {cut}");
            assert_eq!(syntax.end(&text[cut..]), Some(text.len() - cut), "{text} at {cut}");
            // Whatever is put in, text that the parser takes is no wrong text.
            let put = *random.choice(&["<", "\"", "{", "]", "é", "1", " ", ",", "\\", "\u{3000}"]).unwrap();
            let changed = format!("{}{put}{}", &text[..cut], &text[cut..]);
            if serde_json::from_str::<Value>(&changed).is_ok() {
                assert_eq!(
                    Syntax::new().end(changed.trim_end()),
                    Some(changed.trim_end().len()),
                    "{changed}"
                );
            }
        }
        for (wrong, end) in [
            ("{\"a\": <tool_call>", 6),
            ("{\"a\" \"b\"", 5),
            ("{\"a\": 1]", 7),
            ("{\"a\": [1}", 8),
            ("{é", 1),
            ("{\"a\": 1é", 7),
            ("{,", 1),
        ] {
            assert_eq!(Syntax::new().end(wrong), Some(end), "{wrong}");
        }
        let nested = |depth: usize| "{\"a\":".repeat(depth) + "1" + &"}".repeat(depth);
        for depth in [100, 127, 128, 129] {
            let is_taken = serde_json::from_str::<Value>(&nested(depth)).is_ok();
            let is_whole = Syntax::new().end(&nested(depth)) == Some(nested(depth).len());
            assert!(is_whole || !is_taken, "{depth}");
            assert_eq!(is_whole, depth <= DEEPEST, "{depth}");
        }
    }
}

//! FunctionGemma: calls between markers, with texts between two `<escape>`.
//!
//! ```text
//! <start_function_call>call:get_weather{days:3,place:<escape>Oslo<escape>,units:{wind:<escape>m/s<escape>}}<end_function_call>
//! ```
//!
//! Names have no quotes, and other values are written as JSON has them. JSON texts and names in quotes are read, too, because the
//! grammar of demanded calls writes lists and objects as JSON. The source of the format is
//! `ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices`. A call is passed on when its closing bracket has come.

use serde_json::{Map, Number, Value};

use super::arguments::LONGEST_NAME;
use super::{AnswerPart, CallReader, text};
use crate::text::held::Held;
use crate::text::work::looked_at;

/// Begins a call.
pub(super) const OPEN: &str = "<start_function_call>";
/// Ends a call.
pub(super) const CLOSE: &str = "<end_function_call>";
/// Stands before the name of the tool.
pub(super) const CALL: &str = "call:";
/// Stands before a text and after it.
pub(super) const ESCAPE: &str = "<escape>";
/// Deepest nesting of a value.
const DEEPEST: usize = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Text,
    /// After a marker, up to the name of the tool.
    Head,
    /// After the name. The cursor is in the arguments.
    Arguments,
    /// After a call.
    After,
}

/// What the text at a position belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Within {
    #[default]
    Structure,
    /// A text between two `<escape>`.
    Escape,
    /// A text in quotes.
    Quotes { escaped: bool },
}

/// Finds the bracket that closes the arguments.
#[derive(Debug, Default)]
struct Brackets {
    depth: usize,
    within: Within,
}

impl Brackets {
    /// Reads more text. The number of bytes that are read, and whether the last one is that of the bracket. A part of a `<escape>`
    /// at the end is not read.
    fn closed(&mut self, text: &str) -> (usize, bool) {
        let bytes = text.as_bytes();
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            looked_at(1);
            let rest = &bytes[at..];
            let mut read = 1;
            match (self.within, byte) {
                (Within::Quotes { escaped: true }, _) => self.within = Within::Quotes { escaped: false },
                (Within::Quotes { .. }, b'\\') => self.within = Within::Quotes { escaped: true },
                (Within::Quotes { .. }, b'"') => self.within = Within::Structure,
                (Within::Quotes { .. }, _) => {}
                (within, b'<') if rest.starts_with(ESCAPE.as_bytes()) => {
                    let begins = within == Within::Structure;
                    self.within = if begins { Within::Escape } else { Within::Structure };
                    read = ESCAPE.len();
                }
                (_, b'<') if ESCAPE.as_bytes().starts_with(rest) => return (at, false),
                (Within::Escape, _) => {}
                (Within::Structure, b'"') => self.within = Within::Quotes { escaped: false },
                (Within::Structure, b'{' | b'[') => self.depth += 1,
                (Within::Structure, b'}' | b']') => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                (Within::Structure, _) => {}
            }
            at += read;
        }
        (at, false)
    }
}

/// The reader of this format, see the module.
#[derive(Debug, Default)]
pub(super) struct FunctionGemma {
    stage: Stage,
    /// Text that was read and not passed on.
    held: Held,
    /// White space before the marker of a call.
    space: String,
    /// Whether there was a call. White space after a call is no text.
    called: bool,
    /// The brackets of the call in `held`, before the cursor.
    seen: Brackets,
}

/// The meaning of the text after a marker.
enum Head {
    Incomplete,
    Other,
    /// The bracket of the arguments is after this many bytes.
    Found(usize),
}

/// Reads `call:NAME{`.
fn head(behind: &str) -> Head {
    let Some(rest) = behind.strip_prefix(CALL) else {
        return if CALL.starts_with(behind) { Head::Incomplete } else { Head::Other };
    };
    let usual = |letter: char| letter.is_ascii_alphanumeric() || "_-.".contains(letter);
    let end = rest.find(|letter: char| !usual(letter));
    looked_at(end.unwrap_or(rest.len()));
    match end {
        None if rest.len() <= LONGEST_NAME => Head::Incomplete,
        Some(end @ 1..=LONGEST_NAME) if rest[end..].starts_with('{') => Head::Found(CALL.len() + end),
        _ => Head::Other,
    }
}

impl FunctionGemma {
    /// Reads one step of `held`. Returns whether there may be more to read.
    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.stage {
            Stage::Text => {
                let (shown, marker) = self.held.take_until(&[OPEN]);
                text(parts, &shown);
                let Some(marker) = marker else {
                    if !shown.is_empty() {
                        self.called = false;
                    }
                    return false;
                };
                self.held.drop(OPEN.len());
                self.space = marker.space;
                self.stage = Stage::Head;
            }
            Stage::Head => match head(self.held.skip_space()) {
                Head::Incomplete => return false,
                Head::Other => {
                    // No call begins at this marker, but one may begin at the next.
                    self.held.rewind();
                    self.no_call(parts);
                }
                Head::Found(at) => {
                    self.held.advance(at);
                    self.seen = Brackets::default();
                    self.stage = Stage::Arguments;
                }
            },
            Stage::Arguments => {
                let (read, is_closed) = self.seen.closed(self.held.ahead());
                self.held.advance(read);
                if !is_closed {
                    return false;
                }
                let raw = &self.held.rest()[..self.held.seen()];
                looked_at(raw.len());
                match call(raw) {
                    Some((name, arguments)) => {
                        parts.extend([AnswerPart::Call(name), AnswerPart::Arguments(arguments)]);
                        self.held.drop_seen();
                        self.called = true;
                        self.stage = Stage::After;
                    }
                    // What lies within the brackets is not read again, for each marker in it.
                    None => self.no_call(parts),
                }
            }
            Stage::After => {
                let behind = self.held.skip_space();
                let is_close = behind.starts_with(CLOSE);
                if !is_close && CLOSE.starts_with(behind) {
                    return false;
                }
                if is_close {
                    self.held.drop(CLOSE.len());
                } else {
                    self.held.rewind();
                }
                self.stage = Stage::Text;
            }
        }
        true
    }

    /// Passes the marker and the text before the cursor on as text.
    fn no_call(&mut self, parts: &mut Vec<AnswerPart>) {
        let shown = std::mem::take(&mut self.space) + OPEN + &self.held.take_seen();
        text(parts, &shown);
        self.called = false;
        self.stage = Stage::Text;
    }
}

impl CallReader for FunctionGemma {
    fn push(&mut self, new: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        self.held.push(new);
        while self.step(&mut parts) {}
        parts
    }

    fn finish(&mut self) -> Vec<AnswerPart> {
        let held = self.held.take();
        let rest = match self.stage {
            Stage::Text if self.called && held.trim().is_empty() => String::new(),
            Stage::Text => held,
            Stage::Head | Stage::Arguments => std::mem::take(&mut self.space) + OPEN + &held,
            Stage::After => String::new(),
        };
        let mut parts = Vec::new();
        text(&mut parts, &rest);
        parts
    }
}

/// Reads `call:f{a:1,b:<escape>x<escape>}` as a name and a JSON object.
fn call(raw: &str) -> Option<(String, String)> {
    let raw = raw.trim_start().strip_prefix(CALL)?;
    let (name, arguments) = raw.split_at(raw.find('{')?);
    let mut rest = Rest(arguments);
    let arguments = rest.value(0)?;
    rest.0.is_empty().then(|| (name.to_owned(), arguments.to_string()))
}

/// The rest of a value that is being read.
struct Rest<'a>(&'a str);

impl Rest<'_> {
    /// Takes this text and the white space behind it, if it is the next.
    fn take(&mut self, text: &str) -> bool {
        let rest = self.0.strip_prefix(text);
        self.0 = rest.map_or(self.0, str::trim_start);
        rest.is_some()
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        if self.is_text() {
            return self.text().map(Value::String);
        }
        if self.take("[") {
            let mut items = Vec::new();
            while !self.take("]") {
                items.push(self.value(depth + 1)?);
                if !self.take(",") && !self.0.starts_with(']') {
                    return None;
                }
            }
            return Some(Value::Array(items));
        }
        if self.take("{") {
            let mut fields = Map::new();
            while !self.take("}") {
                let name = if self.is_text() {
                    self.text()?
                } else {
                    self.word(&[':', ',', '{', '}', '[', ']'])?.to_owned()
                };
                if !self.take(":") {
                    return None;
                }
                fields.insert(name, self.value(depth + 1)?);
                if !self.take(",") && !self.0.starts_with('}') {
                    return None;
                }
            }
            return Some(Value::Object(fields));
        }
        let word = self.word(&[',', '{', '}', '[', ']'])?;
        Some(match word {
            "true" | "True" => Value::Bool(true),
            "false" | "False" => Value::Bool(false),
            "null" | "None" => Value::Null,
            // Models may leave out `<escape>`.
            word => word.parse::<Number>().map_or_else(|_wrong| Value::from(word), Value::Number),
        })
    }

    /// Whether a text between two `<escape>` or in quotes is next.
    fn is_text(&self) -> bool {
        self.0.starts_with(ESCAPE) || self.0.starts_with('"')
    }

    /// Takes this text.
    fn text(&mut self) -> Option<String> {
        if let Some(rest) = self.0.strip_prefix(ESCAPE) {
            let (text, rest) = rest.split_once(ESCAPE)?;
            self.0 = rest.trim_start();
            return Some(text.to_owned());
        }
        let mut is_escaped = false;
        let (end, _) = self.0.bytes().enumerate().skip(1).find(|(_, byte)| {
            let is_end = *byte == b'"' && !is_escaped;
            is_escaped = *byte == b'\\' && !is_escaped;
            is_end
        })?;
        let (quoted, rest) = self.0.split_at(end + 1);
        self.0 = rest.trim_start();
        serde_json::from_str(quoted).ok()
    }

    /// Takes the text before the first of these letters, without the white space around it. `None` if there is no such text.
    fn word(&mut self, ends: &[char]) -> Option<&str> {
        let (word, rest) = self.0.split_at(self.0.find(ends)?);
        self.0 = rest;
        Some(word.trim()).filter(|word| !word.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_read_as_the_model_and_as_json_write_them() {
        for (written, read) in [
            ("{}", json!({})),
            ("{a:<escape>x, }<escape>}", json!({"a": "x, }"})),
            ("{a:<escape><escape>,b:-1.5e3}", json!({"a": "", "b": -1500.0})),
            (
                "{a:[<escape>x<escape>,true,null],b:{c:{d:False}}}",
                json!({"a": ["x", true, null], "b": {"c": {"d": false}}}),
            ),
            ("{<escape>a:b<escape>:None}", json!({"a:b": null})),
            ("{a: [\"x\\\"]\", {\"b\" : 1}] , \"c\":\"}\"}", json!({"a": ["x\"]", {"b": 1}], "c": "}"})),
            ("{a:New York,b:05}", json!({"a": "New York", "b": "05"})),
            ("{a:http://x.org,b:1}", json!({"a": "http://x.org", "b": 1})),
        ] {
            let found = call(&format!("call:f{written}"));
            let (name, arguments) = found.unwrap_or_else(|| panic!("{written} is not read"));
            assert_eq!(name, "f");
            assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), read, "{written}");
        }
        for wrong in ["{a}", "{a:}", "{:1}", "{a:<escape>x}", "{a:1 b:[2]}", "{a:[1}]", "{a:{}{}}"] {
            assert_eq!(call(&format!("call:f{wrong}")), None, "{wrong}");
        }
        let deep = |depth: usize| format!("call:f{{a:{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert!(call(&deep(DEEPEST)).is_some() && call(&deep(DEEPEST + 1)).is_none());
    }
}

//! Reads an answer that is a list of calls in Python's notation. A call is passed on when its closing bracket has come.

use serde_json::{Map, Number, Value};

use super::{AnswerPart, CallReader, text};
use crate::text::held::Held;
use crate::text::work::looked_at;

/// Special tokens that may stand around the list.
const MARKERS: [&str; 2] = ["<|python_start|>", "<|python_end|>"];
/// Deepest nesting of a value.
const DEEPEST: usize = 64;

/// The beginning of a call must be within this many bytes.
const LONGEST_HEAD: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Before the list, where the marker may come.
    Start,
    /// Before the list.
    Before,
    /// Before the first call in the list.
    First,
    Call,
    /// After a call, where a comma may come.
    After,
    /// Before another call, or the end of the list.
    Next,
    /// After the list, where the marker may come.
    Behind,
    /// After the list and its marker.
    End,
    /// The rest is text.
    Text,
}

/// The reader of this format, see the module.
#[derive(Debug)]
pub(super) struct Pythonic {
    stage: Stage,
    held: Held,
    /// The text before the first call, while it may be text of the answer.
    lead: String,
    names: Vec<String>,
    /// The brackets of the call in `held`, before the cursor.
    seen: Brackets,
}

/// The brackets that are open at a position.
#[derive(Debug, Default)]
pub(super) struct Brackets {
    depth: usize,
    quote: Option<u8>,
    escaped: bool,
}

impl Brackets {
    /// Reads more text. The position after the bracket that closes the first one.
    pub(super) fn closed(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            looked_at(1);
            if std::mem::take(&mut self.escaped) {
                continue;
            }
            match (byte, self.quote) {
                (b'\\', Some(_)) => self.escaped = true,
                (byte, Some(quote)) if byte == quote => self.quote = None,
                (_, Some(_)) => {}
                (b'\'' | b'"', None) => self.quote = Some(byte),
                (b'(' | b'[' | b'{', None) => self.depth += 1,
                (b')' | b']' | b'}', None) => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// The meaning of the text ahead.
pub(super) enum Begin {
    Incomplete,
    Other,
    Call,
}

/// Whether the text ahead begins with a call: the name of a tool and a bracket.
pub(super) fn begin(ahead: &str, names: &[String]) -> Begin {
    let head = &ahead[..ahead.floor_char_boundary(LONGEST_HEAD)];
    let name = head.split('(').next().unwrap_or_default();
    looked_at(name.len());
    let open = name.len() < head.len();
    match open {
        true if names.iter().any(|known| known == name.trim()) => Begin::Call,
        false
            if head.len() == ahead.len() && names.iter().any(|known| known.starts_with(name.trim_end())) =>
        {
            Begin::Incomplete
        }
        _ => Begin::Other,
    }
}

impl Pythonic {
    pub(super) fn new(names: Vec<String>) -> Self {
        let (held, lead) = (Held::default(), String::new());
        Self { stage: Stage::Start, held, lead, names, seen: Brackets::default() }
    }

    /// Goes on to the next stage, or returns false where that needs more text.
    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let may_be = |held: &mut Held, marker: &str| marker.starts_with(held.skip_space());
        self.stage = match self.stage {
            Stage::Start if self.held.skip_behind_space(MARKERS[0]) => Stage::Before,
            Stage::Start | Stage::Before if may_be(&mut self.held, MARKERS[0]) => return false,
            Stage::Start | Stage::Before if self.held.skip("[") => Stage::First,
            Stage::Start | Stage::Before => Stage::Text,
            Stage::First => {
                self.held.skip_space();
                match begin(self.held.ahead(), &self.names) {
                    Begin::Incomplete => return false,
                    Begin::Other => Stage::Text,
                    Begin::Call => {
                        self.lead = self.held.take_seen();
                        Stage::Call
                    }
                }
            }
            Stage::Call => {
                let Some(end) = self.seen.closed(self.held.ahead()) else {
                    self.held.advance(self.held.ahead().len());
                    return false;
                };
                self.held.advance(end);
                self.seen = Brackets::default();
                let raw = &self.held.rest()[..self.held.seen()];
                looked_at(raw.len());
                match call(raw) {
                    Some((name, arguments)) => {
                        parts.extend([AnswerPart::Call(name), AnswerPart::Arguments(arguments)]);
                        self.held.drop_seen();
                        self.lead.clear();
                        Stage::After
                    }
                    None => Stage::Text,
                }
            }
            Stage::After if self.held.skip_space().is_empty() => return false,
            Stage::After => {
                self.held.skip(",");
                Stage::Next
            }
            Stage::Next if self.held.skip_space().is_empty() => return false,
            Stage::Next => {
                let is_end = self.held.skip("]");
                self.held.drop_seen();
                if is_end { Stage::Behind } else { Stage::Call }
            }
            Stage::Behind if self.held.skip_behind_space(MARKERS[1]) => Stage::End,
            Stage::Behind | Stage::End if may_be(&mut self.held, MARKERS[1]) => return false,
            Stage::Behind | Stage::End => {
                self.held.drop_seen();
                Stage::Text
            }
            Stage::Text => {
                text(parts, &(std::mem::take(&mut self.lead) + &self.held.take()));
                return false;
            }
        };
        true
    }
}

impl CallReader for Pythonic {
    fn push(&mut self, new: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        self.held.push(new);
        while self.step(&mut parts) {}
        parts
    }

    fn finish(&mut self) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.lead) + &self.held.take();
        let dropped = match self.stage {
            Stage::After | Stage::Next => rest.trim().is_empty(),
            Stage::Behind | Stage::End => true,
            Stage::Start | Stage::Before | Stage::First | Stage::Call | Stage::Text => false,
        };
        if !dropped {
            text(&mut parts, &rest);
        }
        parts
    }
}

/// Reads `f(a=1, b='x')` as a name and a JSON object.
pub(super) fn call(text: &str) -> Option<(String, String)> {
    let (name, rest) = text.split_once('(')?;
    let mut rest = Literal(rest.trim_start());
    let mut arguments = Map::new();
    while !rest.take(")") {
        let (key, value) = rest.0.split_once('=')?;
        let key = key.trim();
        // Any other text is an argument without a name, or another expression.
        if key.is_empty() || !key.chars().all(|letter| letter.is_alphanumeric() || letter == '_') {
            return None;
        }
        rest.0 = value.trim_start();
        arguments.insert(key.to_owned(), rest.value(0)?);
        if !rest.take(",") && !rest.0.starts_with(')') {
            return None;
        }
    }
    rest.0.trim().is_empty().then(|| (name.trim().to_owned(), Value::Object(arguments).to_string()))
}

/// The rest of a literal that is being read.
struct Literal<'a>(&'a str);

impl Literal<'_> {
    fn take(&mut self, text: &str) -> bool {
        let rest = self.0.strip_prefix(text);
        self.0 = rest.map_or(self.0, str::trim_start);
        rest.is_some()
    }

    /// Reads a literal of Python or of JSON.
    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        for (word, value) in [
            ("True", Value::Bool(true)),
            ("true", Value::Bool(true)),
            ("False", Value::Bool(false)),
            ("false", Value::Bool(false)),
            ("None", Value::Null),
            ("null", Value::Null),
        ] {
            if self.take(word) {
                return Some(value);
            }
        }
        match self.0.chars().next()? {
            quote @ ('\'' | '"') => self.text(quote).map(Value::String),
            '[' | '(' => {
                let close = if self.take("[") { "]" } else { (self.take("("), ")").1 };
                let mut items = Vec::new();
                while !self.take(close) {
                    items.push(self.value(depth + 1)?);
                    if !self.take(",") && !self.0.starts_with(close) {
                        return None;
                    }
                }
                Some(Value::Array(items))
            }
            '{' => {
                self.take("{");
                let mut fields = Map::new();
                while !self.take("}") {
                    let Value::String(key) = self.value(depth + 1)? else { return None };
                    if !self.take(":") {
                        return None;
                    }
                    fields.insert(key, self.value(depth + 1)?);
                    if !self.take(",") && !self.0.starts_with('}') {
                        return None;
                    }
                }
                Some(Value::Object(fields))
            }
            _ => {
                let end =
                    self.0.find(|letter: char| !(letter.is_ascii_alphanumeric() || "+-.".contains(letter)));
                let (number, rest) = self.0.split_at(end.unwrap_or(self.0.len()));
                self.0 = rest.trim_start();
                number.parse::<Number>().ok().map(Value::Number)
            }
        }
    }

    fn text(&mut self, quote: char) -> Option<String> {
        let mut text = String::new();
        let mut letters = self.0.char_indices().skip(1);
        while let Some((at, letter)) = letters.next() {
            match letter {
                letter if letter == quote => {
                    self.0 = self.0[at + letter.len_utf8()..].trim_start();
                    return Some(text);
                }
                '\\' => match letters.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    'u' => {
                        let digits: String = letters.by_ref().take(4).map(|(_, digit)| digit).collect();
                        text.push(char::from_u32(u32::from_str_radix(&digits, 16).ok()?)?);
                    }
                    other => text.push(other),
                },
                other => text.push(other),
            }
        }
        None
    }
}

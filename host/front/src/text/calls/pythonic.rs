//! Reads an answer that is a list of calls in Python's notation. A call is passed on when its closing bracket has come.

use serde_json::{Map, Number, Value};

use super::{CallReader, Part};

/// Special tokens that may stand around the list.
const MARKERS: [&str; 2] = ["<|python_start|>", "<|python_end|>"];
/// Deepest nesting of a value.
const DEEPEST: usize = 64;

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// Before the list.
    Before,
    /// Before a call in the list.
    Within,
    /// After the list.
    Behind,
    /// The rest is text.
    Text,
}

/// The reader of this format, see the module.
#[derive(Debug)]
pub(super) struct Pythonic {
    stage: Stage,
    held: String,
    /// The text before the first call.
    lead: String,
    names: Vec<String>,
    called: bool,
    /// The brackets of the call in `held`, as far as they were read.
    seen: Brackets,
}

/// The brackets that are open at a position.
#[derive(Debug, Default)]
struct Brackets {
    at: usize,
    depth: usize,
    quote: Option<u8>,
    escaped: bool,
}

impl Brackets {
    /// The position after the bracket that closes the first one.
    fn closed(&mut self, text: &str) -> Option<usize> {
        for byte in text.bytes().skip(self.at) {
            self.at += 1;
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
                        return Some(self.at);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// The meaning of the beginning of `held`.
enum Begin {
    Incomplete,
    Other,
    Call,
}

impl Pythonic {
    pub(super) fn new(names: Vec<String>) -> Self {
        Self {
            stage: Stage::Before,
            held: String::new(),
            lead: String::new(),
            names,
            called: false,
            seen: Brackets::default(),
        }
    }

    /// Whether `held` begins with a call: the name of a tool and a bracket.
    fn begin(&self) -> Begin {
        let name: &str = self.held.split('(').next().unwrap_or_default();
        let open = name.len() < self.held.len();
        match open {
            true if self.names.iter().any(|known| known == name.trim()) => Begin::Call,
            false if self.names.iter().any(|known| known.starts_with(name.trim_end())) => Begin::Incomplete,
            _ => Begin::Other,
        }
    }

    /// If there was no call, the text before the expected call is text of the answer.
    fn restore(&mut self) {
        if !self.called {
            self.held.insert_str(0, &std::mem::take(&mut self.lead));
        }
    }

    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        let trimmed = self.held.trim_start();
        match self.stage {
            Stage::Before => {
                let next = trimmed.strip_prefix(MARKERS[0]).map_or(trimmed, str::trim_start);
                if next.is_empty() || MARKERS[0].starts_with(next) {
                    return false;
                }
                let Some(rest) = next.strip_prefix('[') else {
                    self.stage = Stage::Text;
                    return true;
                };
                let rest = rest.trim_start().to_owned();
                let whole = std::mem::replace(&mut self.held, rest);
                match self.begin() {
                    Begin::Call => {
                        self.lead = whole[..whole.len() - self.held.len()].to_owned();
                        self.stage = Stage::Within;
                    }
                    Begin::Incomplete => {
                        self.held = whole;
                        return false;
                    }
                    Begin::Other => {
                        self.held = whole;
                        self.stage = Stage::Text;
                    }
                }
                true
            }
            Stage::Within => {
                let next = if self.called {
                    trimmed.strip_prefix(',').unwrap_or(trimmed).trim_start()
                } else {
                    trimmed
                };
                if next.is_empty() {
                    return false;
                }
                if let Some(rest) = next.strip_prefix(']') {
                    (self.held, self.stage) = (rest.to_owned(), Stage::Behind);
                    return true;
                }
                if self.seen.at == 0 {
                    self.held = next.to_owned();
                }
                let Some(end) = self.seen.closed(&self.held) else { return false };
                self.seen = Brackets::default();
                let rest = self.held.split_off(end);
                match call(&self.held) {
                    Some((name, arguments)) => {
                        parts.extend([Part::Call(name), Part::Arguments(arguments)]);
                        (self.held, self.called) = (rest, true);
                    }
                    None => {
                        self.held.push_str(&rest);
                        self.restore();
                        self.stage = Stage::Text;
                    }
                }
                true
            }
            Stage::Behind => {
                let rest = trimmed.strip_prefix(MARKERS[1]).map_or(trimmed, str::trim_start);
                if rest.is_empty() || MARKERS[1].starts_with(rest) {
                    return false;
                }
                self.held = rest.to_owned();
                self.stage = Stage::Text;
                true
            }
            Stage::Text => {
                if !self.held.is_empty() {
                    parts.push(Part::Text(std::mem::take(&mut self.held)));
                }
                false
            }
        }
    }
}

impl CallReader for Pythonic {
    fn push(&mut self, new: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        self.held.push_str(new);
        while self.step(&mut parts) {}
        parts
    }

    fn finish(&mut self) -> Vec<Part> {
        self.restore();
        let held = std::mem::take(&mut self.held);
        let dropped = self.called && (self.stage == Stage::Behind || held.trim().is_empty());
        if held.is_empty() || dropped { Vec::new() } else { vec![Part::Text(held)] }
    }
}

/// Reads `f(a=1, b='x')` as a name and a JSON object.
fn call(text: &str) -> Option<(String, String)> {
    let (name, rest) = text.split_once('(')?;
    let mut rest = Literal(rest.trim_start());
    let mut arguments = Map::new();
    while !rest.take(")") {
        let (key, value) = rest.0.split_once('=')?;
        rest.0 = value.trim_start();
        arguments.insert(key.trim().to_owned(), rest.value(0)?);
        if !rest.take(",") && !rest.0.starts_with(')') {
            return None;
        }
    }
    Some((name.trim().to_owned(), Value::Object(arguments).to_string()))
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

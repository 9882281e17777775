//! Reads a call that is a JSON object, `{"name": …, "arguments": {…}}`, in pieces.

use serde_json::Value;

use super::Part;

/// The beginning of a call must be within this many bytes.
const LONGEST_HEAD: usize = 1024;
/// The keys that models use for the arguments.
const KEYS: [&str; 2] = ["arguments", "parameters"];

/// Finds the end of a JSON object.
#[derive(Clone, Copy, Debug, Default)]
struct Balance {
    depth: usize,
    quoted: bool,
    escaped: bool,
}

impl Balance {
    /// The length of the text up to and including the bracket that closes the object.
    fn end(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            if std::mem::take(&mut self.escaped) {
                continue;
            }
            match byte {
                b'\\' if self.quoted => self.escaped = true,
                b'"' => self.quoted = !self.quoted,
                b'{' | b'[' if !self.quoted => self.depth += 1,
                b'}' | b']' if !self.quoted => {
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

#[derive(Debug)]
enum Stage {
    /// Before the arguments.
    Head,
    Arguments(Balance),
    /// After the arguments.
    Tail(Balance),
    /// The fields are in another order: the object is read when it is complete.
    Whole(Balance),
}

/// The outcome of a piece of text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// The object has ended, and this text follows it.
    Done(String),
    /// The object is no call. This is all of its text, and the text after it.
    NoCall(String),
}

/// A call that is being read.
#[derive(Debug)]
pub(super) struct Object {
    /// Text that was read and not passed on.
    raw: String,
    stage: Stage,
}

impl Object {
    pub(super) fn new() -> Self {
        Self { raw: String::new(), stage: Stage::Head }
    }

    /// Whether a part of the object was passed on as a call.
    pub(super) fn is_call(&self) -> bool {
        matches!(self.stage, Stage::Arguments(_) | Stage::Tail(_))
    }

    /// Takes the text that was not passed on.
    pub(super) fn held(&mut self) -> String {
        std::mem::take(&mut self.raw)
    }

    /// Reads more text. `is_tool` tells whether a name may be that of a call.
    pub(super) fn push(&mut self, text: &str, is_tool: &dyn Fn(&str) -> bool, parts: &mut Vec<Part>) -> Step {
        match &mut self.stage {
            Stage::Head => {
                self.raw.push_str(text);
                match head(&self.raw) {
                    Head::Incomplete if self.raw.len() <= LONGEST_HEAD => Step::More,
                    Head::NoObject => Step::NoCall(std::mem::take(&mut self.raw)),
                    Head::Found { name, at } if is_tool(&name) => {
                        parts.push(Part::Call(name));
                        let rest = std::mem::take(&mut self.raw).split_off(at);
                        self.stage = Stage::Arguments(Balance::default());
                        self.push(&rest, is_tool, parts)
                    }
                    Head::Incomplete | Head::Other | Head::Found { .. } => {
                        self.stage = Stage::Whole(Balance::default());
                        let raw = std::mem::take(&mut self.raw);
                        self.push(&raw, is_tool, parts)
                    }
                }
            }
            Stage::Arguments(balance) => {
                let end = balance.end(text);
                let (more, rest) = text.split_at(end.unwrap_or(text.len()));
                if !more.is_empty() {
                    parts.push(Part::Arguments(more.to_owned()));
                }
                if end.is_none() {
                    return Step::More;
                }
                self.stage = Stage::Tail(Balance { depth: 1, ..Balance::default() });
                self.push(rest, is_tool, parts)
            }
            Stage::Tail(balance) => match balance.end(text) {
                Some(end) => Step::Done(text[end..].to_owned()),
                None => Step::More,
            },
            Stage::Whole(balance) => {
                let end = balance.end(text);
                self.raw.push_str(&text[..end.unwrap_or(text.len())]);
                let Some(end) = end else { return Step::More };
                let raw = std::mem::take(&mut self.raw);
                match call(&raw).filter(|(name, _)| is_tool(name)) {
                    Some((name, arguments)) => {
                        parts.extend([Part::Call(name), Part::Arguments(arguments)]);
                        Step::Done(text[end..].to_owned())
                    }
                    None => Step::NoCall(raw + &text[end..]),
                }
            }
        }
    }
}

/// The name and the arguments of a whole call.
fn call(raw: &str) -> Option<(String, String)> {
    let value: Value = serde_json::from_str(raw).ok()?;
    let name = value.get("name")?.as_str()?.to_owned();
    let arguments = KEYS.iter().find_map(|key| value.get(key));
    let arguments = match arguments {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(object @ Value::Object(_)) => object.to_string(),
        // Some models write the object as a text.
        Some(Value::String(text)) => {
            let object: Value = serde_json::from_str(text).ok()?;
            object.is_object().then(|| text.clone())?
        }
        Some(_) => return None,
    };
    Some((name, arguments))
}

enum Head {
    Incomplete,
    /// The text does not begin with a bracket.
    NoObject,
    /// An object of another kind, or with fields in another order.
    Other,
    /// The bracket of the arguments is at this byte.
    Found {
        name: String,
        at: usize,
    },
}

/// Reads `{"name": "…", "arguments": {`.
fn head(raw: &str) -> Head {
    let mut rest = Rest { raw, at: 0 };
    match rest.next_is('{') {
        None => return Head::Incomplete,
        Some(false) => return Head::NoObject,
        Some(true) => {}
    }
    let found = (|| -> Result<(String, usize), Head> {
        let other = |is: Option<bool>| match is {
            None => Err(Head::Incomplete),
            Some(false) => Err(Head::Other),
            Some(true) => Ok(()),
        };
        let is_name = rest.text()? == "name";
        other(Some(is_name))?;
        other(rest.next_is(':'))?;
        let name = rest.text()?;
        other(rest.next_is(','))?;
        let key = rest.text()?;
        other(Some(KEYS.contains(&key.as_str())))?;
        other(rest.next_is(':'))?;
        other(rest.next_is('{'))?;
        Ok((name, rest.at - 1))
    })();
    match found {
        Ok((name, at)) => Head::Found { name, at },
        Err(head) => head,
    }
}

struct Rest<'a> {
    raw: &'a str,
    at: usize,
}

impl Rest<'_> {
    fn skip_space(&mut self) {
        let rest = &self.raw[self.at..];
        self.at += rest.len() - rest.trim_start().len();
    }

    /// Whether the next letter is this one. If so, takes it. `None` at the end.
    fn next_is(&mut self, letter: char) -> Option<bool> {
        self.skip_space();
        let next = self.raw[self.at..].chars().next()?;
        let is = next == letter;
        if is {
            self.at += letter.len_utf8();
        }
        Some(is)
    }

    /// Takes a text in quotes.
    fn text(&mut self) -> Result<String, Head> {
        let start = {
            self.skip_space();
            self.at
        };
        match self.next_is('"') {
            None => return Err(Head::Incomplete),
            Some(false) => return Err(Head::Other),
            Some(true) => {}
        }
        let mut escaped = false;
        for (at, byte) in self.raw[self.at..].bytes().enumerate() {
            match byte {
                _ if std::mem::take(&mut escaped) => {}
                b'\\' => escaped = true,
                b'"' => {
                    self.at += at + 1;
                    return serde_json::from_str(&self.raw[start..self.at]).map_err(|_wrong| Head::Other);
                }
                _ => {}
            }
        }
        Err(Head::Incomplete)
    }
}

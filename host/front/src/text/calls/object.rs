//! Reads a call that is a JSON object, `{"name": …, "arguments": {…}}`, in pieces.

mod syntax;

use serde_json::Value;
use syntax::Syntax;

use super::AnswerPart;
use crate::text::held::Held;
use crate::text::work::looked_at;

/// The beginning of a call must be within this many bytes.
const LONGEST_HEAD: usize = 1024;
/// The keys that models use for the arguments.
const KEYS: [&str; 2] = ["arguments", "parameters"];

/// Finds the end of a JSON object that was passed on, right or wrong.
#[derive(Clone, Copy, Debug)]
struct Balance {
    depth: usize,
    quoted: bool,
    escaped: bool,
}

impl Balance {
    fn new(depth: usize) -> Self {
        Self { depth, quoted: false, escaped: false }
    }

    /// The length of the text up to and including the bracket that closes the object.
    fn end(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            looked_at(1);
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
    Whole(Syntax),
}

/// The outcome of a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// The object has ended, and was passed on. The held text follows it.
    Done,
    /// The object is no call. The held text begins with it.
    NoCall,
}

/// A call that is being read.
#[derive(Debug)]
pub(super) struct Object(Stage);

impl Object {
    pub(super) fn new() -> Self {
        Self(Stage::Head)
    }

    /// Whether a part of the object was passed on as a call.
    pub(super) fn is_call(&self) -> bool {
        matches!(self.0, Stage::Arguments(_) | Stage::Tail(_))
    }

    /// Reads the held text, which begins with the part of the object that was not passed on. `is_tool` tells whether a name may be
    /// that of a call.
    pub(super) fn read(
        &mut self,
        held: &mut Held,
        is_tool: &dyn Fn(&str) -> bool,
        parts: &mut Vec<AnswerPart>,
    ) -> Step {
        loop {
            match &mut self.0 {
                Stage::Head => {
                    let rest = held.rest();
                    let most = rest.ceil_char_boundary(LONGEST_HEAD + 1);
                    match head(&rest[..most]) {
                        Head::Incomplete if rest.len() <= LONGEST_HEAD => return Step::More,
                        Head::NoObject => return Step::NoCall,
                        Head::Found { name, at } if is_tool(&name) => {
                            parts.push(AnswerPart::Call(name));
                            held.drop(at);
                            self.0 = Stage::Arguments(Balance::new(0));
                        }
                        Head::Incomplete | Head::Other | Head::Found { .. } => {
                            self.0 = Stage::Whole(Syntax::new());
                        }
                    }
                }
                Stage::Arguments(balance) => {
                    let ended = advance(held, |text| balance.end(text));
                    let more = held.take_seen();
                    if !more.is_empty() {
                        parts.push(AnswerPart::Arguments(more));
                    }
                    if !ended {
                        return Step::More;
                    }
                    self.0 = Stage::Tail(Balance::new(1));
                }
                Stage::Tail(balance) => {
                    let ended = advance(held, |text| balance.end(text));
                    held.drop_seen();
                    return if ended { Step::Done } else { Step::More };
                }
                Stage::Whole(syntax) => {
                    if !advance(held, |text| syntax.end(text)) {
                        return Step::More;
                    }
                    let raw = &held.rest()[..held.seen()];
                    looked_at(raw.len());
                    let Some((name, arguments)) = call(raw).filter(|(name, _)| is_tool(name)) else {
                        held.rewind();
                        return Step::NoCall;
                    };
                    parts.extend([AnswerPart::Call(name), AnswerPart::Arguments(arguments)]);
                    held.drop_seen();
                    return Step::Done;
                }
            }
        }
    }
}

/// Moves the cursor to the end of the object, or of the text. Returns whether the object ends.
fn advance(held: &mut Held, end: impl FnOnce(&str) -> Option<usize>) -> bool {
    let end = end(held.ahead());
    held.advance(end.unwrap_or(held.ahead().len()));
    end.is_some()
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
        let space = rest.len() - rest.trim_start().len();
        looked_at(space + 1);
        self.at += space;
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
                    looked_at(2 * at);
                    self.at += at + 1;
                    return serde_json::from_str(&self.raw[start..self.at]).map_err(|_wrong| Head::Other);
                }
                _ => {}
            }
        }
        looked_at(self.raw.len() - self.at);
        Err(Head::Incomplete)
    }
}

//! Qwen3-Coder: calls as tags, with a tag for each argument and its value as plain text.
//!
//! ```text
//! <tool_call>
//! <function=write>
//! <parameter=path>
//! a.txt
//! </parameter>
//! <parameter=lines>
//! [1, 2]
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! The arguments become a JSON object, `{"path": "a.txt", "lines": [1, 2]}`. The tool's schema decides whether a value is text or
//! JSON. Texts are passed on as they come. Models sometimes leave out `<tool_call>`: `<function=NAME>` of a known tool begins a
//! call, too.

use std::sync::Arc;

use serde_json::Value;

use super::arguments::{Kind, LONGEST_NAME, json};
use super::{AnswerPart, CallReader, Tool, overlap, text};
use crate::text::held::Held;
use crate::text::work::looked_at;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";
/// The newline before the closing tag is not part of the value.
const END_LINE: &str = "\n</parameter>";
/// An answer is read in pieces of about this many bytes, which limits the held text.
const PIECE: usize = 4096;

#[derive(Debug)]
enum Stage {
    Text,
    /// After a marker, up to the name of the tool.
    Head(&'static str),
    /// Between the arguments of a call. `some`: the call already has an argument.
    Between {
        tool: Option<usize>,
        some: bool,
    },
    /// In the value of an argument.
    Value {
        tool: Option<usize>,
        kind: Kind,
        /// Whether the next byte is the first of the value, or the end of the tag's line.
        first: bool,
    },
    /// After a call.
    After,
}

/// A text as it is between the quotes of a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// The reader of this format, see the module.
#[derive(Debug)]
pub(super) struct QwenXml {
    stage: Stage,
    /// Text that was read and not passed on.
    held: Held,
    /// White space before the marker of a call.
    space: String,
    /// Whether there was a call. White space after a call is no text.
    called: bool,
    /// How far `held` was searched for the end of a value.
    searched: Searched,
    tools: Arc<[Tool]>,
}

/// The state of the search for the end of a value, see [`QwenXml::end`].
#[derive(Clone, Copy, Debug, Default)]
struct Searched {
    bytes: usize,
    quoted: bool,
    escaped: bool,
}

impl QwenXml {
    pub(super) fn new(tools: Arc<[Tool]>) -> Self {
        Self {
            stage: Stage::Text,
            held: Held::default(),
            space: String::new(),
            called: false,
            searched: Searched::default(),
            tools,
        }
    }

    fn tool(&self, name: &str) -> Option<usize> {
        self.tools.iter().position(|tool| tool.name == name)
    }

    /// Reads one step of `held`. Returns whether there may be more to read.
    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.stage {
            Stage::Text => self.text(parts),
            Stage::Head(marker) => self.head(marker, parts),
            Stage::Between { tool, some } => self.between(tool, some, parts),
            Stage::Value { tool, kind, first } => self.value(tool, kind, first, parts),
            Stage::After => self.after(),
        }
    }

    fn text(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        // White space before a call belongs to the marker, because templates write it themselves.
        let (shown, marker) = self.held.take_until(&[OPEN, FUNCTION]);
        text(parts, &shown);
        let Some(marker) = marker else {
            if !shown.is_empty() {
                self.called = false;
            }
            return false;
        };
        self.space = marker.space;
        let is_open = marker.marker == OPEN;
        self.held.drop(if is_open { OPEN.len() } else { 0 });
        self.stage = Stage::Head(if is_open { OPEN } else { "" });
        true
    }

    fn head(&mut self, marker: &'static str, parts: &mut Vec<AnswerPart>) -> bool {
        self.held.skip_space();
        if self.held.seen() > LONGEST_NAME {
            return self.no_call(marker, parts);
        }
        let behind = self.held.ahead();
        let Some(rest) = behind.strip_prefix(FUNCTION) else {
            if FUNCTION.starts_with(behind) {
                return false;
            }
            return self.no_call(marker, parts);
        };
        let end = rest.find(['>', '<', '\n']);
        looked_at(end.unwrap_or(rest.len()));
        let Some(end) = end else {
            return rest.len() > LONGEST_NAME && self.no_call(marker, parts);
        };
        let name = &rest[..end];
        let tool = self.tool(name);
        // After `<tool_call>`, any name begins a call. Without it, only the name of a tool does.
        if end > LONGEST_NAME
            || !rest[end..].starts_with('>')
            || name.is_empty()
            || (tool.is_none() && marker.is_empty())
        {
            return self.no_call(marker, parts);
        }
        parts.push(AnswerPart::Call(name.to_owned()));
        parts.push(AnswerPart::Arguments("{".to_owned()));
        self.held.drop(FUNCTION.len() + end + 1);
        self.stage = Stage::Between { tool, some: false };
        true
    }

    /// Passes the marker on as text. No call begins at it, but one may begin at the next marker.
    fn no_call(&mut self, marker: &'static str, parts: &mut Vec<AnswerPart>) -> bool {
        self.held.rewind();
        let shown = if marker.is_empty() { FUNCTION } else { marker };
        self.held.drop(if marker.is_empty() { FUNCTION.len() } else { 0 });
        text(parts, &format!("{}{shown}", self.space));
        self.called = false;
        self.stage = Stage::Text;
        true
    }

    fn between(&mut self, tool: Option<usize>, some: bool, parts: &mut Vec<AnswerPart>) -> bool {
        self.held.skip_space();
        self.held.drop_seen();
        let behind = self.held.rest();
        if let Some(rest) = behind.strip_prefix(PARAMETER) {
            let end = rest.bytes().take(LONGEST_NAME + 1).position(|byte| byte == b'>');
            looked_at(end.unwrap_or(LONGEST_NAME + 1));
            let Some(end) = end else {
                // No argument has a name of this length, so the tag is skipped.
                let skips = rest.len() > LONGEST_NAME;
                self.held.drop(if skips { PARAMETER.len() } else { 0 });
                return skips;
            };
            let name = &rest[..end];
            let kind =
                tool.and_then(|tool| self.tools[tool].kinds.get(name)).map_or(Kind::Text, |kind| *kind);
            let quote = if kind == Kind::Text { "\"" } else { "" };
            let comma = if some { ", " } else { "" };
            parts.push(AnswerPart::Arguments(format!("{comma}{}: {quote}", Value::from(name))));
            self.held.drop(PARAMETER.len() + end + 1);
            self.stage = Stage::Value { tool, kind, first: true };
            return true;
        }
        if let Some(tag) = [END_FUNCTION, CLOSE].into_iter().find(|tag| behind.starts_with(tag)) {
            // Where the model has left out `</function>`, `</tool_call>` ends the call.
            let closed = tag == CLOSE;
            parts.push(AnswerPart::Arguments("}".to_owned()));
            self.held.drop(tag.len());
            (self.stage, self.called) = (if closed { Stage::Text } else { Stage::After }, true);
            return true;
        }
        if [PARAMETER, END_FUNCTION, CLOSE].iter().any(|tag| tag.starts_with(behind)) {
            return false;
        }
        // Skips text that does not belong here, up to the next tag.
        let next = behind
            .char_indices()
            .skip(1)
            .find(|(_, letter)| *letter == '<')
            .map_or(behind.len(), |(at, _)| at);
        looked_at(next);
        self.held.drop(next);
        true
    }

    fn value(&mut self, tool: Option<usize>, kind: Kind, first: bool, parts: &mut Vec<AnswerPart>) -> bool {
        if first {
            if self.held.rest().is_empty() {
                return false;
            }
            self.held.skip("\n");
            self.held.drop_seen();
            self.stage = Stage::Value { tool, kind, first: false };
            self.searched = Searched::default();
        }
        let argument = |parts: &mut Vec<AnswerPart>, text: String| {
            if !text.is_empty() {
                parts.push(AnswerPart::Arguments(text));
            }
        };
        if let Some(at) = self.end(kind) {
            let value = &self.held.rest()[..at];
            looked_at(value.len());
            let value = value.strip_suffix('\n').unwrap_or(value);
            argument(
                parts,
                match kind {
                    Kind::Text => escaped(value) + "\"",
                    Kind::Mixed(types) | Kind::Json(types) => json(value, types),
                },
            );
            self.held.rewind();
            self.held.drop(at + END_PARAMETER.len());
            self.stage = Stage::Between { tool, some: true };
            return true;
        }
        if kind == Kind::Text {
            let rest = self.held.rest();
            let known = rest.len() - overlap(rest, END_LINE).max(overlap(rest, END_PARAMETER));
            self.held.advance(known);
            argument(parts, escaped(&self.held.take_seen()));
            self.searched = Searched::default();
        }
        false
    }

    /// The position of the tag that ends the value. In a string within a JSON list or object, the tag is text.
    fn end(&mut self, kind: Kind) -> Option<usize> {
        let nested = matches!(kind, Kind::Json(_)) && self.held.skip_space().starts_with(['[', '{']);
        let Searched { mut bytes, mut quoted, mut escaped } = self.searched;
        let mut found = None;
        let value = self.held.rest().as_bytes();
        while let Some(byte) = value.get(bytes) {
            if std::mem::take(&mut escaped) {
                bytes += 1;
                continue;
            }
            match byte {
                b'\\' if quoted => escaped = true,
                b'"' if nested => quoted = !quoted,
                b'<' if !quoted => {
                    let rest = &value[bytes..];
                    if rest.starts_with(END_PARAMETER.as_bytes()) {
                        found = Some(bytes);
                        break;
                    }
                    if END_PARAMETER.as_bytes().starts_with(rest) {
                        break;
                    }
                }
                _ => {}
            }
            bytes += 1;
        }
        looked_at(bytes - self.searched.bytes + 1);
        self.searched = Searched { bytes, quoted, escaped };
        found
    }

    fn after(&mut self) -> bool {
        let behind = self.held.skip_space();
        if behind.starts_with(CLOSE) {
            self.held.drop(CLOSE.len());
        } else if CLOSE.starts_with(behind) {
            return false;
        }
        self.held.rewind();
        self.stage = Stage::Text;
        true
    }
}

impl CallReader for QwenXml {
    fn push(&mut self, new: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let mut rest = new;
        while !rest.is_empty() {
            let (piece, next) = rest.split_at(rest.floor_char_boundary(PIECE));
            self.held.push(piece);
            while self.step(&mut parts) {}
            rest = next;
        }
        parts
    }

    fn finish(&mut self) -> Vec<AnswerPart> {
        let held = self.held.take();
        match self.stage {
            Stage::Text if self.called && held.trim().is_empty() => Vec::new(),
            Stage::Text if held.is_empty() => Vec::new(),
            Stage::Text => vec![AnswerPart::Text(held)],
            Stage::Head(marker) => vec![AnswerPart::Text(format!("{}{marker}{held}", self.space))],
            // An unfinished call stays unfinished.
            Stage::Value { kind: Kind::Text, .. } if !held.is_empty() => {
                vec![AnswerPart::Arguments(escaped(&held))]
            }
            Stage::Value { .. } | Stage::Between { .. } | Stage::After => Vec::new(),
        }
    }
}

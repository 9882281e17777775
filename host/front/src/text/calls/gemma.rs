//! Gemma 3: calls in Python's notation, in blocks of Markdown, after text.
//!
//! ~~~text
//! I look it up.
//! ```tool_code
//! get_weather(place="Oslo")
//! get_weather(place="Rome", days=3)
//! ```
//! ~~~
//!
//! The model has no tokens for calls. Its prompt asks for this form, which Google's guides use
//! (`ai.google.dev/gemma/docs/meme-generator`). Calls may also stand in a list, in brackets and with commas. A call is passed on
//! when its closing bracket has come. A block without calls is text, and so is what follows the calls in a block.

use super::pythonic::{Begin, Brackets, begin, call};
use super::{AnswerPart, CallReader, text};
use crate::text::held::Held;
use crate::text::work::looked_at;

/// Begins a block of calls.
pub(super) const OPEN: &str = "```tool_code";
const CLOSE: &str = "```";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Text,
    /// In a block, before a call or the end of the block.
    Between,
    Call,
}

/// The reader of this format, see the module.
#[derive(Debug)]
pub(super) struct Gemma {
    stage: Stage,
    held: Held,
    /// What stands before the next call in the block. It is text of the answer, unless a call follows.
    lead: String,
    /// Whether the block had a call.
    has_call: bool,
    /// Whether there was a call. White space after a call is no text.
    called: bool,
    names: Vec<String>,
    /// The brackets of the call in `held`, before the cursor.
    seen: Brackets,
}

impl Gemma {
    pub(super) fn new(names: Vec<String>) -> Self {
        let (held, lead) = (Held::default(), String::new());
        Self {
            stage: Stage::Text,
            held,
            lead,
            has_call: false,
            called: false,
            names,
            seen: Brackets::default(),
        }
    }

    /// Goes on to the next stage, or returns false where that needs more text.
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
                self.lead = marker.space + OPEN;
                self.has_call = false;
                self.stage = Stage::Between;
            }
            Stage::Between => {
                self.held.skip_space();
                if [",", "[", "]"].iter().any(|mark| self.held.skip(mark)) {
                    return true;
                }
                let ahead = self.held.ahead();
                if ahead.starts_with(CLOSE) && self.has_call {
                    self.held.drop(CLOSE.len());
                    self.called = true;
                    self.stage = Stage::Text;
                } else if ahead.starts_with(CLOSE) {
                    self.no_call(parts);
                } else if CLOSE.starts_with(ahead) {
                    return false;
                } else {
                    match begin(ahead, &self.names) {
                        Begin::Incomplete => return false,
                        Begin::Other => self.no_call(parts),
                        Begin::Call => {
                            let between = self.held.take_seen();
                            self.lead.push_str(&between);
                            self.stage = Stage::Call;
                        }
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
                        self.has_call = true;
                        self.stage = Stage::Between;
                    }
                    None => {
                        // What lies within the brackets is not read again, for each block that may begin there.
                        let shown = std::mem::take(&mut self.lead) + &self.held.take_seen();
                        text(parts, &shown);
                        self.called = false;
                        self.stage = Stage::Text;
                    }
                }
            }
        }
        true
    }

    /// Passes the beginning of the block on as text. The held text is read for further blocks.
    fn no_call(&mut self, parts: &mut Vec<AnswerPart>) {
        text(parts, &std::mem::take(&mut self.lead));
        self.held.rewind();
        self.called = false;
        self.stage = Stage::Text;
    }
}

impl CallReader for Gemma {
    fn push(&mut self, new: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        self.held.push(new);
        while self.step(&mut parts) {}
        parts
    }

    fn finish(&mut self) -> Vec<AnswerPart> {
        let ends = CLOSE.starts_with(self.held.ahead());
        let held = self.held.take();
        let dropped = match self.stage {
            Stage::Text => self.called && held.trim().is_empty(),
            // The block is not closed, or not yet.
            Stage::Between => self.has_call && ends,
            Stage::Call => false,
        };
        let mut parts = Vec::new();
        if !dropped {
            text(&mut parts, &(std::mem::take(&mut self.lead) + &held));
        }
        parts
    }
}

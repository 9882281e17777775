//! Hermes and Qwen: JSON objects between markers, after text.

use super::object::{Object, Step};
use super::{AnswerPart, CallReader, text};
use crate::text::held::Held;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Debug)]
enum Stage {
    Text,
    Call(Object),
    /// After a call's object.
    After,
}

/// The reader of this format, see the module.
#[derive(Debug)]
pub(super) struct Hermes {
    stage: Stage,
    /// Text that may be a marker or belong to one.
    held: Held,
    /// White space before the marker of a call.
    space: String,
    /// Whether there was a call. White space after a call is no text.
    called: bool,
}

impl Default for Hermes {
    fn default() -> Self {
        Self { stage: Stage::Text, held: Held::default(), space: String::new(), called: false }
    }
}

impl CallReader for Hermes {
    fn push(&mut self, new: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        self.held.push(new);
        loop {
            match &mut self.stage {
                Stage::Text => {
                    // White space before a call belongs to the marker, because templates write it themselves.
                    let (shown, marker) = self.held.take_until(&[OPEN]);
                    text(&mut parts, &shown);
                    let Some(marker) = marker else {
                        if !shown.is_empty() {
                            self.called = false;
                        }
                        return parts;
                    };
                    self.held.drop(OPEN.len());
                    self.space = marker.space;
                    self.stage = Stage::Call(Object::new());
                }
                Stage::Call(object) => match object.read(&mut self.held, &|_name| true, &mut parts) {
                    Step::More => return parts,
                    Step::Done => (self.stage, self.called) = (Stage::After, true),
                    Step::NoCall => {
                        // No call begins at this marker, but one may begin at the next.
                        text(&mut parts, &format!("{}{OPEN}", self.space));
                        self.stage = Stage::Text;
                    }
                },
                Stage::After => {
                    let behind = self.held.skip_space();
                    let is_close = behind.starts_with(CLOSE);
                    if !is_close && CLOSE.starts_with(behind) {
                        return parts;
                    }
                    if is_close {
                        self.held.drop(CLOSE.len());
                    } else {
                        self.held.rewind();
                    }
                    self.stage = Stage::Text;
                }
            }
        }
    }

    fn finish(&mut self) -> Vec<AnswerPart> {
        let held = self.held.take();
        let rest = match &self.stage {
            Stage::Text if self.called && held.trim().is_empty() => String::new(),
            Stage::Text => held,
            Stage::Call(object) if object.is_call() => String::new(),
            Stage::Call(_) => format!("{}{OPEN}{held}", self.space),
            Stage::After => String::new(),
        };
        if rest.is_empty() { Vec::new() } else { vec![AnswerPart::Text(rest)] }
    }
}

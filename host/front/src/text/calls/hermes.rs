//! Hermes and Qwen: JSON objects between markers, after text.

use super::object::{Object, Step};
use super::{CallReader, Part, overlap, text};

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
    held: String,
    /// White space before the marker of a call.
    space: String,
    /// Whether there was a call. White space after a call is no text.
    called: bool,
}

impl Default for Hermes {
    fn default() -> Self {
        Self { stage: Stage::Text, held: String::new(), space: String::new(), called: false }
    }
}

impl CallReader for Hermes {
    fn push(&mut self, new: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut new = new.to_owned();
        loop {
            match &mut self.stage {
                Stage::Text => {
                    self.held.push_str(&new);
                    if let Some(at) = self.held.find(OPEN) {
                        // White space before a call belongs to the marker, because templates write it themselves.
                        let before = self.held[..at].trim_end();
                        text(&mut parts, before);
                        self.space = self.held[before.len()..at].to_owned();
                        new = self.held[at + OPEN.len()..].to_owned();
                        self.held.clear();
                        self.stage = Stage::Call(Object::new());
                        continue;
                    }
                    let known = self.held.len() - overlap(&self.held, OPEN);
                    let known = self.held[..known].trim_end().len();
                    let rest = self.held.split_off(known);
                    let shown = std::mem::replace(&mut self.held, rest);
                    if !shown.is_empty() {
                        self.called = false;
                    }
                    text(&mut parts, &shown);
                    return parts;
                }
                Stage::Call(object) => match object.push(&new, &|_name| true, &mut parts) {
                    Step::More => return parts,
                    Step::Done(rest) => {
                        (self.stage, self.called) = (Stage::After, true);
                        new = rest;
                    }
                    Step::NoCall(raw) => {
                        // No call begins at this marker, but one may begin at the next.
                        text(&mut parts, &format!("{}{OPEN}", self.space));
                        self.stage = Stage::Text;
                        new = raw;
                    }
                },
                Stage::After => {
                    self.held.push_str(&new);
                    let behind = self.held.trim_start();
                    if let Some(rest) = behind.strip_prefix(CLOSE) {
                        new = rest.to_owned();
                    } else if CLOSE.starts_with(behind) {
                        return parts;
                    } else {
                        new = self.held.clone();
                    }
                    self.held.clear();
                    self.stage = Stage::Text;
                }
            }
        }
    }

    fn finish(&mut self) -> Vec<Part> {
        let held = std::mem::take(&mut self.held);
        let rest = match &mut self.stage {
            Stage::Text if self.called && held.trim().is_empty() => String::new(),
            Stage::Text => held,
            Stage::Call(object) if object.is_call() => String::new(),
            Stage::Call(object) => format!("{}{OPEN}{}", self.space, object.held()),
            Stage::After => String::new(),
        };
        if rest.is_empty() { Vec::new() } else { vec![Part::Text(rest)] }
    }
}

//! Llama 3: an answer that is one JSON object, or several separated by semicolons.

use super::object::{Object, Step};
use super::{AnswerPart, CallReader, text};
use crate::text::held::Held;

/// A special token of these models. If it is decoded, it is not part of the call.
const TAG: &str = "<|python_tag|>";

#[derive(Debug)]
enum Stage {
    /// Before a call, or after one.
    Between {
        /// Whether a semicolon may come.
        semicolon: bool,
        /// Whether the tag may come.
        tag: bool,
    },
    Call(Object),
    /// The rest is text.
    Text,
}

/// The reader of this format, see the module.
#[derive(Debug)]
pub(super) struct Llama {
    stage: Stage,
    held: Held,
    names: Vec<String>,
    called: bool,
}

impl Llama {
    pub(super) fn new(names: Vec<String>) -> Self {
        let stage = Stage::Between { semicolon: false, tag: true };
        Self { stage, held: Held::default(), names, called: false }
    }
}

impl CallReader for Llama {
    fn push(&mut self, new: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        self.held.push(new);
        loop {
            match &mut self.stage {
                Stage::Between { semicolon, tag } => {
                    self.held.skip_space();
                    if *semicolon && self.held.skip(";") {
                        *semicolon = false;
                    } else if *tag && self.held.skip(TAG) {
                        (*semicolon, *tag) = (false, false);
                    } else if TAG.starts_with(self.held.ahead()) {
                        return parts;
                    } else if self.held.ahead().starts_with('{') {
                        self.held.drop_seen();
                        self.stage = Stage::Call(Object::new());
                    } else {
                        self.held.rewind();
                        self.stage = Stage::Text;
                    }
                }
                Stage::Call(object) => {
                    let names = &self.names;
                    // Any answer in JSON looks like a call, so only names of offered tools are calls.
                    let is_tool = |name: &str| names.iter().any(|known| known == name);
                    match object.read(&mut self.held, &is_tool, &mut parts) {
                        Step::More => return parts,
                        Step::Done => {
                            self.stage = Stage::Between { semicolon: true, tag: true };
                            self.called = true;
                        }
                        Step::NoCall => self.stage = Stage::Text,
                    }
                }
                Stage::Text => {
                    text(&mut parts, &self.held.take());
                    return parts;
                }
            }
        }
    }

    fn finish(&mut self) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let held = self.held.take();
        if !(self.called && matches!(self.stage, Stage::Between { .. })) {
            text(&mut parts, &held);
        }
        parts
    }
}

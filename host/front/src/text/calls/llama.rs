//! Llama 3: an answer that is one JSON object, or several separated by semicolons.

use super::object::{Object, Step};
use super::{CallReader, Part};

/// A special token of these models. If it is decoded, it is not part of the call.
const TAG: &str = "<|python_tag|>";

#[derive(Debug)]
enum Stage {
    /// Before a call, or after one.
    Between,
    Call(Object),
    /// The rest is text.
    Text,
}

/// The reader of this format, see the module.
#[derive(Debug)]
pub(super) struct Llama {
    stage: Stage,
    held: String,
    names: Vec<String>,
    called: bool,
}

impl Llama {
    pub(super) fn new(names: Vec<String>) -> Self {
        Self { stage: Stage::Between, held: String::new(), names, called: false }
    }
}

impl CallReader for Llama {
    fn push(&mut self, new: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut new = new.to_owned();
        loop {
            match &mut self.stage {
                Stage::Between => {
                    self.held.push_str(&new);
                    let mut next = self.held.trim_start();
                    if self.called {
                        next = next.strip_prefix(';').map_or(next, str::trim_start);
                    }
                    let next = next.strip_prefix(TAG).map_or(next, str::trim_start);
                    if TAG.starts_with(next) {
                        return parts;
                    }
                    if next.starts_with('{') {
                        new = next.to_owned();
                        self.held.clear();
                        self.stage = Stage::Call(Object::new());
                    } else {
                        new = std::mem::take(&mut self.held);
                        self.stage = Stage::Text;
                    }
                }
                Stage::Call(object) => {
                    let names = &self.names;
                    // Any answer in JSON looks like a call, so only names of offered tools are calls.
                    let is_tool = |name: &str| names.iter().any(|known| known == name);
                    match object.push(&new, &is_tool, &mut parts) {
                        Step::More => return parts,
                        Step::Done(rest) => {
                            (self.stage, self.called) = (Stage::Between, true);
                            new = rest;
                        }
                        Step::NoCall(raw) => {
                            self.stage = Stage::Text;
                            new = raw;
                        }
                    }
                }
                Stage::Text => {
                    if !new.is_empty() {
                        parts.push(Part::Text(new));
                    }
                    return parts;
                }
            }
        }
    }

    fn finish(&mut self) -> Vec<Part> {
        let held = std::mem::take(&mut self.held);
        let rest = match &mut self.stage {
            Stage::Between if self.called => String::new(),
            Stage::Between | Stage::Text => held,
            Stage::Call(object) => object.held(),
        };
        if rest.is_empty() { Vec::new() } else { vec![Part::Text(rest)] }
    }
}

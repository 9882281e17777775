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
//! The arguments become a JSON object, `{"path": "a.txt", "lines": [1, 2]}`. Whether a value is text or JSON follows from the tool's
//! schema. Texts are passed on as they come. Models leave `<tool_call>` out at times: `<function=NAME>` of a known tool begins a call, too.

use serde_json::Value;

use super::{CallReader, Function, Part, overlap};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";
/// A value's own last line ends before its closing tag.
const END_LINE: &str = "\n</parameter>";
/// Longest name of a tool or an argument, in bytes.
const LONGEST_NAME: usize = 512;

#[derive(Debug)]
enum Stage {
    Text,
    /// Behind a marker, up to the name of the tool.
    Head(&'static str),
    /// Between the arguments of a call, of which there was one or none.
    Between {
        tool: Option<usize>,
        some: bool,
    },
    /// In the value of an argument.
    Value {
        tool: Option<usize>,
        kind: Kind,
        /// What follows is the value's first byte, or the end of the tag's line.
        first: bool,
    },
    /// Behind a call.
    After,
}

/// How the value of an argument is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// As the text that it is.
    Text,
    /// As JSON, where it is JSON of these types, else as text.
    Json(Types),
}

/// The types that a schema allows, all where it names none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Types {
    named: bool,
    string: bool,
    number: bool,
    boolean: bool,
    null: bool,
    array: bool,
    object: bool,
}

impl Types {
    fn add(&mut self, name: &str) {
        self.named = true;
        match name {
            "string" => self.string = true,
            "number" | "integer" => self.number = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "array" => self.array = true,
            "object" => self.object = true,
            _ => self.named = false,
        }
    }

    /// Adds what a schema allows. `definitions` are of the tool's parameters.
    fn add_schema(&mut self, schema: &Value, parameters: &Value, depth: usize) {
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|text| text.strip_prefix('#'));
        if let Some(target) = target.and_then(|pointer| parameters.pointer(pointer)).filter(|_| depth > 0) {
            return self.add_schema(target, parameters, depth - 1);
        }
        match schema.get("type") {
            Some(Value::String(name)) => self.add(name),
            Some(Value::Array(names)) => {
                names.iter().filter_map(Value::as_str).for_each(|name| self.add(name));
            }
            _ => {}
        }
        let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
        for value in values.chain(schema.get("const")).filter(|_| schema.get("type").is_none()) {
            self.add(type_of(value));
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            for schema in
                schema.get(key).and_then(Value::as_array).into_iter().flatten().filter(|_| depth > 0)
            {
                self.add_schema(schema, parameters, depth - 1);
            }
        }
    }

    fn allow(self, value: &Value) -> bool {
        !self.named
            || match value {
                Value::Null => self.null,
                Value::Bool(_) => self.boolean,
                Value::Number(_) => self.number,
                Value::String(_) => self.string,
                Value::Array(_) => self.array,
                Value::Object(_) => self.object,
            }
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Whether a call writes the value of this argument as plain text. Schemas in schemas are followed a few levels deep.
pub(super) fn is_text(parameters: &Value, name: &str) -> bool {
    kind(parameters, name) == Kind::Text
}

fn kind(parameters: &Value, name: &str) -> Kind {
    let Some(schema) = parameters.get("properties").and_then(|all| all.get(name)) else { return Kind::Text };
    let mut types = Types::default();
    types.add_schema(schema, parameters, 4);
    let only_text = Types { named: true, string: true, ..Types::default() };
    if types == only_text { Kind::Text } else { Kind::Json(types) }
}

/// A value that is no plain text, as JSON.
fn json(text: &str, types: Types) -> String {
    let text = text.trim();
    let python = match text {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    match serde_json::from_str::<Value>(python) {
        Ok(value) if types.allow(&value) => python.to_owned(),
        _ => Value::from(text).to_string(),
    }
}

/// A text inside of JSON's quotes.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// See the module.
#[derive(Debug)]
pub(super) struct QwenXml {
    stage: Stage,
    /// What was read and not passed on.
    held: String,
    /// White space before the marker of a call.
    space: String,
    /// There was a call: white space after it is no text.
    called: bool,
    functions: Vec<Function>,
}

impl QwenXml {
    pub(super) fn new(functions: Vec<Function>) -> Self {
        let (held, space) = (String::new(), String::new());
        Self { stage: Stage::Text, held, space, called: false, functions }
    }

    fn tool(&self, name: &str) -> Option<usize> {
        self.functions.iter().position(|function| function.name == name)
    }

    /// Reads on in what is held. Returns whether there may be more to read.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.stage {
            Stage::Text => self.text(parts),
            Stage::Head(marker) => self.head(marker, parts),
            Stage::Between { tool, some } => self.between(tool, some, parts),
            Stage::Value { tool, kind, first } => self.value(tool, kind, first, parts),
            Stage::After => self.after(),
        }
    }

    fn text(&mut self, parts: &mut Vec<Part>) -> bool {
        let markers = [OPEN, FUNCTION].map(|marker| self.held.find(marker).map(|at| (at, marker)));
        if let Some((at, marker)) = markers.into_iter().flatten().min() {
            // White space before a call belongs to the markers: templates write it themselves.
            let before = self.held[..at].trim_end();
            text(parts, before);
            self.space = self.held[before.len()..at].to_owned();
            self.held.drain(..at + if marker == OPEN { OPEN.len() } else { 0 });
            self.stage = Stage::Head(if marker == OPEN { OPEN } else { "" });
            return true;
        }
        let known = self.held.len() - overlap(&self.held, OPEN).max(overlap(&self.held, FUNCTION));
        let known = self.held[..known].trim_end().len();
        let rest = self.held.split_off(known);
        let shown = std::mem::replace(&mut self.held, rest);
        if !shown.is_empty() {
            self.called = false;
        }
        text(parts, &shown);
        false
    }

    fn head(&mut self, marker: &'static str, parts: &mut Vec<Part>) -> bool {
        let behind = self.held.trim_start();
        let Some(rest) = behind.strip_prefix(FUNCTION) else {
            if FUNCTION.starts_with(behind) {
                return false;
            }
            return self.no_call(marker, parts);
        };
        let Some(end) = rest.find(['>', '<', '\n']) else {
            return rest.len() > LONGEST_NAME && self.no_call(marker, parts);
        };
        let name = &rest[..end];
        let tool = self.tool(name);
        // Behind the marker any name is a call's; alone, only that of a tool.
        if !rest[end..].starts_with('>') || name.is_empty() || (tool.is_none() && marker.is_empty()) {
            return self.no_call(marker, parts);
        }
        parts.push(Part::Call(name.to_owned()));
        parts.push(Part::Arguments("{".to_owned()));
        self.held = rest[end + 1..].to_owned();
        self.stage = Stage::Between { tool, some: false };
        true
    }

    /// No call begins at this marker, but one may begin at the next.
    fn no_call(&mut self, marker: &'static str, parts: &mut Vec<Part>) -> bool {
        let shown =
            if marker.is_empty() { self.held.drain(..FUNCTION.len()).collect() } else { marker.to_owned() };
        text(parts, &format!("{}{shown}", self.space));
        self.called = false;
        self.stage = Stage::Text;
        true
    }

    fn between(&mut self, tool: Option<usize>, some: bool, parts: &mut Vec<Part>) -> bool {
        let behind = self.held.trim_start();
        if let Some(rest) = behind.strip_prefix(PARAMETER) {
            let Some(end) = rest.find('>') else {
                // A name that never ends is no argument.
                if rest.len() > LONGEST_NAME {
                    self.held = rest.to_owned();
                    return true;
                }
                return false;
            };
            let name = &rest[..end];
            let kind = tool.map_or(Kind::Text, |tool| kind(&self.functions[tool].parameters, name));
            let quote = if kind == Kind::Text { "\"" } else { "" };
            let comma = if some { ", " } else { "" };
            parts.push(Part::Arguments(format!("{comma}{}: {quote}", Value::from(name))));
            self.held = rest[end + 1..].to_owned();
            self.stage = Stage::Value { tool, kind, first: true };
            return true;
        }
        if let Some(rest) = behind.strip_prefix(END_FUNCTION).or_else(|| behind.strip_prefix(CLOSE)) {
            // Where the model has left the end of the function out, this is the end of all.
            let closed = behind.starts_with(CLOSE);
            parts.push(Part::Arguments("}".to_owned()));
            self.held = rest.to_owned();
            (self.stage, self.called) = (if closed { Stage::Text } else { Stage::After }, true);
            return true;
        }
        if [PARAMETER, END_FUNCTION, CLOSE].iter().any(|tag| tag.starts_with(behind)) {
            return false;
        }
        // Nothing that belongs here: up to the next tag.
        let next = behind
            .char_indices()
            .skip(1)
            .find(|(_, letter)| *letter == '<')
            .map_or(behind.len(), |(at, _)| at);
        self.held = behind[next..].to_owned();
        true
    }

    fn value(&mut self, tool: Option<usize>, kind: Kind, first: bool, parts: &mut Vec<Part>) -> bool {
        if first {
            if self.held.is_empty() {
                return false;
            }
            if self.held.starts_with('\n') {
                self.held.remove(0);
            }
            self.stage = Stage::Value { tool, kind, first: false };
        }
        let argument = |parts: &mut Vec<Part>, text: String| {
            if !text.is_empty() {
                parts.push(Part::Arguments(text));
            }
        };
        if let Some(at) = self.held.find(END_PARAMETER) {
            let value = &self.held[..at];
            let value = value.strip_suffix('\n').unwrap_or(value);
            argument(
                parts,
                match kind {
                    Kind::Text => escaped(value) + "\"",
                    Kind::Json(types) => json(value, types),
                },
            );
            self.held.drain(..at + END_PARAMETER.len());
            self.stage = Stage::Between { tool, some: true };
            return true;
        }
        if kind == Kind::Text {
            let held = overlap(&self.held, END_LINE).max(overlap(&self.held, END_PARAMETER));
            let rest = self.held.split_off(self.held.len() - held);
            argument(parts, escaped(&std::mem::replace(&mut self.held, rest)));
        }
        false
    }

    fn after(&mut self) -> bool {
        let behind = self.held.trim_start();
        if let Some(rest) = behind.strip_prefix(CLOSE) {
            self.held = rest.to_owned();
        } else if CLOSE.starts_with(behind) {
            return false;
        }
        self.stage = Stage::Text;
        true
    }
}

fn text(parts: &mut Vec<Part>, text: &str) {
    if !text.is_empty() {
        parts.push(Part::Text(text.to_owned()));
    }
}

impl CallReader for QwenXml {
    fn push(&mut self, new: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        self.held.push_str(new);
        while self.step(&mut parts) {}
        parts
    }

    fn finish(&mut self) -> Vec<Part> {
        let held = std::mem::take(&mut self.held);
        match self.stage {
            Stage::Text if self.called && held.trim().is_empty() => Vec::new(),
            Stage::Text if held.is_empty() => Vec::new(),
            Stage::Text => vec![Part::Text(held)],
            Stage::Head(marker) => vec![Part::Text(format!("{}{marker}{held}", self.space))],
            // What was begun stays unfinished.
            Stage::Value { kind: Kind::Text, .. } if !held.is_empty() => {
                vec![Part::Arguments(escaped(&held))]
            }
            Stage::Value { .. } | Stage::Between { .. } | Stage::After => Vec::new(),
        }
    }
}

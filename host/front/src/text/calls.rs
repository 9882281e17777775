//! Calls of tools in an answer's text, in the formats of the model families.
//!
//! ```text
//! Hermes, Qwen    text <tool_call> {"name": "f", "arguments": {…}} </tool_call> <tool_call> …
//! Llama 3         {"name": "f", "parameters": {…}} ; {…}
//! pythonic        [f(a=1, b='x'), g()]
//! Qwen3-Coder     text <tool_call> <function=f> <parameter=a> 1 </parameter> … </function> </tool_call> …
//! Gemma           text, a block of Markdown that is called tool_code, with a line f(a=1, b='x') for each call, text …
//! FunctionGemma   text <start_function_call>call:f{a:1,b:<escape>x<escape>}<end_function_call> …
//! ```
//!
//! A reader gets the text in pieces, cut anywhere, and returns the same parts however the text was cut. Arguments that are JSON
//! already keep the model's own bytes, so that the next turn's prompt begins with what the model wrote. Text that looks like a
//! call and is none is returned as text.

mod arguments;
mod function_gemma;
mod gemma;
mod grammar;
mod hermes;
mod llama;
mod object;
mod pythonic;
mod qwen_xml;

use std::collections::HashMap;
use std::sync::Arc;

pub use grammar::{CallRule, Function, calls};

/// The format in which a family of models writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// JSON objects between `<tool_call>` and `</tool_call>`.
    Hermes,
    /// A JSON object with `parameters`, as the whole answer.
    Llama,
    /// A list of calls in Python's notation, as the whole answer.
    Pythonic,
    /// Tags for a tool and for each of its arguments, between `<tool_call>` and `</tool_call>`.
    Qwen3Coder,
    /// Calls in Python's notation, in a block of Markdown that is called `tool_code`.
    Gemma,
    /// `call:f{a:1}` between `<start_function_call>` and `<end_function_call>`, with texts between two `<escape>`.
    FunctionGemma,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text that belongs to no call.
    Text(String),
    /// A call of this tool begins.
    Call(String),
    /// More of the last call's arguments. Together they are a JSON object.
    Arguments(String),
}

/// Reads one answer.
pub trait CallReader: Send {
    /// The parts that became certain with this text.
    fn push(&mut self, text: &str) -> Vec<AnswerPart>;

    /// Returns the parts that were held back. Call it once, at the end. An unfinished call stays unfinished.
    fn finish(&mut self) -> Vec<AnswerPart>;
}

impl CallFormat {
    /// All formats.
    pub const ALL: [Self; 6] =
        [Self::Hermes, Self::Llama, Self::Pythonic, Self::Qwen3Coder, Self::Gemma, Self::FunctionGemma];

    /// The format with this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name.replace('_', "-").as_str() {
            "hermes" | "qwen" | "qwen25" | "qwen3" => Some(Self::Hermes),
            "llama3" | "llama3-json" | "llama4-json" => Some(Self::Llama),
            "pythonic" | "llama4-pythonic" => Some(Self::Pythonic),
            "qwen3-coder" | "qwen3-xml" => Some(Self::Qwen3Coder),
            "gemma" | "gemma3" => Some(Self::Gemma),
            "function-gemma" | "functiongemma" => Some(Self::FunctionGemma),
            _ => None,
        }
    }

    /// The format that a chat template asks its model for, if the template shows it.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if has("<function=") {
            // Other templates write arguments as JSON after `<function=`.
            has("<parameter=").then_some(Self::Qwen3Coder)
        } else if has("<start_function_call>") {
            Some(Self::FunctionGemma)
        } else if has("<tool_call>") {
            Some(Self::Hermes)
        } else if has(gemma::OPEN) {
            Some(Self::Gemma)
        } else if has("[func_name1(") || has("<|python_start|>") {
            Some(Self::Pythonic)
        } else if has("<|python_tag|>") || has("\"parameters\": dictionary") {
            Some(Self::Llama)
        } else {
            None
        }
    }

    /// What reads the answers to a request that offers these tools.
    #[must_use]
    pub fn readers(self, functions: &[Function]) -> Readers {
        let tool = |function: &Function| {
            let kinds = match self {
                Self::Qwen3Coder => arguments::kinds(&function.parameters),
                Self::Hermes | Self::Llama | Self::Pythonic | Self::Gemma | Self::FunctionGemma => {
                    HashMap::new()
                }
            };
            Tool { name: function.name.clone(), kinds }
        };
        Readers { format: self, tools: functions.iter().map(tool).collect() }
    }
}

/// A tool as readers know it. They keep no schema, because its values take many times the memory of its text.
#[derive(Debug)]
struct Tool {
    name: String,
    /// How the values of its arguments are written, where they are not plain text.
    kinds: HashMap<String, arguments::Kind>,
}

/// Makes readers for the answers to one request. Clones share the tools.
#[derive(Clone, Debug)]
pub struct Readers {
    format: CallFormat,
    tools: Arc<[Tool]>,
}

impl Readers {
    /// A reader for one answer.
    #[must_use]
    pub fn reader(&self) -> Box<dyn CallReader> {
        let names = || self.tools.iter().map(|tool| tool.name.clone()).collect();
        match self.format {
            CallFormat::Hermes => Box::new(hermes::Hermes::default()),
            CallFormat::Llama => Box::new(llama::Llama::new(names())),
            CallFormat::Pythonic => Box::new(pythonic::Pythonic::new(names())),
            CallFormat::Qwen3Coder => Box::new(qwen_xml::QwenXml::new(Arc::clone(&self.tools))),
            CallFormat::Gemma => Box::new(gemma::Gemma::new(names())),
            CallFormat::FunctionGemma => Box::new(function_gemma::FunctionGemma::default()),
        }
    }

    /// Bytes of names that readers of so many answers keep.
    #[must_use]
    pub fn memory(&self, answers: usize) -> usize {
        // A table has up to twice as many places as entries.
        const ENTRY: usize = 2 * size_of::<(String, arguments::Kind)>();
        let shared = self.tools.iter().map(|tool| {
            let kinds: usize = tool.kinds.keys().map(|name| ENTRY + name.len()).sum();
            size_of::<Tool>() + tool.name.len() + kinds
        });
        let of_each: usize = match self.format {
            CallFormat::Hermes | CallFormat::Qwen3Coder | CallFormat::FunctionGemma => 0,
            CallFormat::Llama | CallFormat::Pythonic | CallFormat::Gemma => {
                self.tools.iter().map(|tool| size_of::<String>() + tool.name.len()).sum()
            }
        };
        shared.sum::<usize>() + answers * of_each
    }
}

/// Adds text, if there is some.
fn text(parts: &mut Vec<AnswerPart>, text: &str) {
    if !text.is_empty() {
        parts.push(AnswerPart::Text(text.to_owned()));
    }
}

/// Length of the longest suffix of `text` that is a proper prefix of `marker`. Markers are ASCII.
fn overlap(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|length| text.ends_with(&marker[..*length])).unwrap_or(0)
}

#[cfg(test)]
mod tests;

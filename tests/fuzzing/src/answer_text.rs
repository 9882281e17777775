//! What a model writes: thoughts, calls of tools and stop strings in an answer's text.
//!
//! A prompt can make a model write anything, so this is a client's text too. The server reads it in pieces that end where tokens
//! end. Whatever they are, the parts of the answer are the same.

use std::sync::{Arc, LazyLock};

use host_front::text::calls::{CallFormat, Function, Part};
use host_front::text::reasoning::Thoughts;
use host_front::text::stop::StopMatcher;

use crate::reader::Decisions;

const FORMATS: [CallFormat; 4] =
    [CallFormat::Hermes, CallFormat::Llama, CallFormat::Pythonic, CallFormat::Qwen3Coder];

/// What an answer may begin behind.
const PROMPTS: [&str; 3] = ["<assistant>", "<assistant><think>\n", "<assistant><think>\n\n</think>\n\n"];

/// Schemas with each kind of argument.
static TOOLS: LazyLock<Arc<[Function]>> = LazyLock::new(|| {
    let parameters = serde_json::json!({"properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": "array"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {},
        "kind": {"$ref": "#/$defs/kind"}, "word": {"enum": ["1", "b"]}
    }, "$defs": {"kind": {"type": ["boolean", "string"]}}});
    ["f", "get_weather"].map(|name| Function { name: name.into(), parameters: parameters.clone() }).into()
});

/// An answer: its text, and its calls with their arguments.
#[derive(Debug, Default, PartialEq, Eq)]
struct Answer {
    text: String,
    calls: Vec<(String, String)>,
}

/// An input is a format, a prompt, how to cut, then stop strings and the answer, each behind a zero byte. True when a call was read.
///
/// # Panics
/// When a reader does, or when it reads another answer from other pieces of the same text.
#[must_use]
pub fn answer_text(bytes: &[u8]) -> bool {
    let mut decisions = Decisions(bytes);
    let format = FORMATS[usize::from(decisions.below(4))];
    let prompt = PROMPTS[usize::from(decisions.below(3))];
    let step = usize::from(decisions.below(8)) + 1;
    let rest = String::from_utf8_lossy(decisions.0).into_owned();
    let mut texts: Vec<String> = rest.split('\0').map(str::to_owned).collect();
    let answer = texts.pop().unwrap_or_default();
    let whole = [answer.as_str()];
    let pieces = pieces(&answer, step);

    assert_eq!(thoughts(prompt, &pieces), thoughts(prompt, &whole), "{prompt:?} {answer:?}");
    assert_eq!(stopped(&texts, &pieces), stopped(&texts, &whole), "{texts:?} in {answer:?}");
    let read = calls(format, &whole);
    assert_eq!(calls(format, &pieces), read, "{format:?} {answer:?}");
    !read.calls.is_empty()
}

/// A text in pieces of so many characters.
fn pieces(text: &str, step: usize) -> Vec<&str> {
    let mut cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).step_by(step).collect();
    cuts.push(text.len());
    cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect()
}

fn calls(format: CallFormat, pieces: &[&str]) -> Answer {
    let mut reader = format.reader(&TOOLS);
    let mut parts: Vec<Part> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    parts.extend(reader.finish());
    let mut answer = Answer::default();
    for part in parts {
        match part {
            Part::Text(more) => answer.text.push_str(&more),
            Part::Call(name) => answer.calls.push((name, String::new())),
            Part::Arguments(more) => answer.calls.last_mut().expect("a call has begun").1.push_str(&more),
        }
    }
    answer
}

fn thoughts(prompt: &str, pieces: &[&str]) -> (String, String) {
    let mut reader = Thoughts::after(prompt);
    let mut splits: Vec<_> = pieces.iter().map(|piece| reader.push(piece)).collect();
    splits.push(reader.finish());
    splits.into_iter().fold(Default::default(), |(thoughts, text): (String, String), split| {
        (thoughts + &split.thoughts, text + &split.text)
    })
}

/// What is shown, and the stop string that ended it.
fn stopped(stops: &[String], pieces: &[&str]) -> (String, Option<String>) {
    let mut matcher = StopMatcher::new(stops.to_vec());
    let mut shown: String = pieces.iter().map(|piece| matcher.push(piece)).collect();
    shown.push_str(&matcher.finish());
    (shown, matcher.matched().map(str::to_owned))
}

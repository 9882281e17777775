//! Fuzzes the readers of an answer's text: thoughts, calls of tools, and stop strings.
//!
//! A client's prompt can make a model write anything, so the text is untrusted. The server reads the text in pieces that end
//! where tokens end. The parts of the answer must not depend on the pieces.

use std::sync::{Arc, LazyLock};

use host_front::text::calls::{AnswerPart, CallFormat, Function};
use host_front::text::reasoning::Thoughts;
use host_front::text::stop::StopMatcher;

use crate::reader::Decisions;

/// Ends of prompts that an answer may follow.
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

/// Reads one answer in pieces and at once. An input has a format, a prompt, the length of pieces, then stop strings and the
/// answer with zero bytes between them. True when a call was read.
///
/// # Panics
/// When a reader panics, or when pieces of a text give another answer than the whole text.
#[must_use]
pub fn answer_text(bytes: &[u8]) -> bool {
    let mut decisions = Decisions(bytes);
    let format = CallFormat::ALL[usize::from(decisions.below(6))];
    let prompt = PROMPTS[usize::from(decisions.below(3))];
    let step = usize::from(decisions.below(8)) + 1;
    let rest = String::from_utf8_lossy(decisions.0).into_owned();
    let mut texts: Vec<String> = rest.split('\0').map(str::to_owned).collect();
    let answer = texts.pop().unwrap_or_default();
    let whole = [answer.as_str()];
    let pieces = pieces(&answer, step);

    assert_eq!(thoughts(prompt, &pieces), thoughts(prompt, &whole), "{prompt:?} {answer:?}");
    assert_eq!(stopped(&texts, &pieces, 0), stopped(&texts, &whole, 0), "{texts:?} in {answer:?}");
    // As many first characters as a piece has may contain stop strings.
    let passed = answer.char_indices().nth(step).map_or(answer.len(), |(at, _)| at);
    let halves = [&answer[..passed], &answer[passed..]];
    let singles = self::pieces(&answer, 1);
    let behind = stopped(&texts, &halves, 1);
    assert_eq!(
        stopped(&texts, &singles, step.min(singles.len())),
        behind,
        "{texts:?} in {answer:?} behind {step}"
    );
    let read = calls(format, &whole);
    assert_eq!(calls(format, &pieces), read, "{format:?} {answer:?}");
    !read.calls.is_empty()
}

/// Cuts a text into pieces of `step` characters.
fn pieces(text: &str, step: usize) -> Vec<&str> {
    let mut cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).step_by(step).collect();
    cuts.push(text.len());
    cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect()
}

fn calls(format: CallFormat, pieces: &[&str]) -> Answer {
    let mut reader = format.readers(&TOOLS).reader();
    let mut parts: Vec<AnswerPart> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    parts.extend(reader.finish());
    let mut answer = Answer::default();
    for part in parts {
        match part {
            AnswerPart::Text(more) => answer.text.push_str(&more),
            AnswerPart::Call(name) => answer.calls.push((name, String::new())),
            AnswerPart::Arguments(more) => {
                answer.calls.last_mut().expect("a call has begun").1.push_str(&more)
            }
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

/// The text that is shown, and the stop string that ended it. No stop string ends within the first `passed` pieces.
fn stopped(stops: &[String], pieces: &[&str], passed: usize) -> (String, Option<String>) {
    let mut matcher = StopMatcher::new(stops.to_vec());
    let (passed, pushed) = pieces.split_at(passed);
    let mut shown: String = passed.iter().map(|piece| matcher.pass(piece)).collect();
    shown.extend(pushed.iter().map(|piece| matcher.push(piece)));
    shown.push_str(&matcher.finish());
    (shown, matcher.matched().map(str::to_owned))
}

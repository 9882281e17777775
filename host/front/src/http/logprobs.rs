//! Log probabilities in the shapes of the endpoints.
//!
//! As JSON values the log probabilities of a token take some twenty kilobytes, so they are written token by token, and no more than
//! one token's values exist at a time.

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};
use serde_json::{Map, Value, json};

use super::answer::Shown;
use crate::text::Tokenizer;

/// The number that other servers write for a log probability of minus infinity, because JSON has no infinity.
const LEAST: f32 = -9999.0;

fn number(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LEAST }
}

/// A token's text, or `bytes:\xe2\x82` when it is no text by itself.
fn name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let hex: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{hex}")
        }
    }
}

/// A list of JSON with an entry for each token, written one at a time.
pub(super) struct Each<'a, F> {
    /// The tokens of the prompt, if they are told of, and those of the answer.
    shown: [&'a [Shown]; 2],
    entry: F,
}

impl<F: Fn(&Shown) -> Value> Serialize for Each<'_, F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.shown.iter().map(|part| part.len()).sum()))?;
        let mut all = self.shown.iter().copied().flatten();
        all.try_for_each(|shown| list.serialize_element(&(self.entry)(shown)))?;
        list.end()
    }
}

/// The completions shape: parallel lists.
pub(super) struct OfCompletion<'a> {
    pub tokenizer: &'a dyn Tokenizer,
    /// The tokens of the prompt, if the answer begins with them.
    pub prompt: &'a [Shown],
    pub shown: &'a [Shown],
    /// Characters of the prompt before the answer's text.
    pub behind: usize,
}

impl Serialize for OfCompletion<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = |token: u32| name(&self.tokenizer.token_bytes(token));
        let top = |entry: &Shown| {
            let mut top: Map<String, Value> =
                entry.token.top.iter().map(|top| (text(top.token), json!(number(top.logprob)))).collect();
            // Nothing is before the first token of a prompt.
            let Some(logprob) = entry.token.logprob else { return Value::Null };
            // The token itself is always among them, so there may be one more than requested.
            top.entry(text(entry.token.token)).or_insert(json!(number(logprob)));
            Value::Object(top)
        };
        let shown = [self.prompt, self.shown];
        let mut object = serializer.serialize_map(Some(4))?;
        let entry = |shown: &Shown| Value::from(text(shown.token.token));
        object.serialize_entry("tokens", &Each { shown, entry })?;
        let entry = |shown: &Shown| json!(shown.token.logprob.map(number));
        object.serialize_entry("token_logprobs", &Each { shown, entry })?;
        object.serialize_entry("top_logprobs", &Each { shown, entry: top })?;
        object.serialize_entry("text_offset", &Offsets(self))?;
        object.end()
    }
}

/// Where each token's text begins, in characters.
struct Offsets<'a>(&'a OfCompletion<'a>);

impl Serialize for Offsets<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let OfCompletion { prompt, shown, behind, .. } = self.0;
        let of_prompt = prompt.iter().map(|shown| shown.offset);
        serializer.collect_seq(of_prompt.chain(shown.iter().map(|shown| behind + shown.offset)))
    }
}

/// A list with an object for each token, as chats have it.
pub(super) fn list<'a>(
    tokenizer: &'a dyn Tokenizer,
    shown: &'a [Shown],
) -> Each<'a, impl Fn(&Shown) -> Value + use<'a>> {
    let entry = |token: u32, logprob: Option<f32>| {
        let bytes = tokenizer.token_bytes(token);
        json!({"token": name(&bytes), "logprob": logprob.map(number), "bytes": bytes})
    };
    let entry = move |shown: &Shown| {
        let mut item = entry(shown.token.token, shown.token.logprob);
        item["top_logprobs"] =
            shown.token.top.iter().map(|top| entry(top.token, Some(top.logprob))).collect();
        item
    };
    Each { shown: [&[], shown], entry }
}

/// The chat shape: `{"content": [...]}`.
pub(super) struct OfChat<'a> {
    pub tokenizer: &'a dyn Tokenizer,
    pub shown: &'a [Shown],
}

impl Serialize for OfChat<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(Some(1))?;
        object.serialize_entry("content", &list(self.tokenizer, self.shown))?;
        object.end()
    }
}

/// SGLang's `output_token_logprobs` and `input_token_logprobs`: `[logprob, id, text]` for each token. `unscored`: the first token has
/// `null`, as SGLang's prompts have from wherever they are told.
pub(super) fn triples<'a>(
    tokenizer: &'a dyn Tokenizer,
    shown: &'a [Shown],
    unscored: bool,
) -> Each<'a, impl Fn(&Shown) -> Value + use<'a>> {
    let first = shown.first().filter(|_first| unscored);
    let entry = move |entry: &Shown| {
        let Shown { token, .. } = entry;
        let logprob = token
            .logprob
            .map(number)
            .filter(|_logprob| !first.is_some_and(|first| std::ptr::eq(first, entry)));
        let bytes = tokenizer.token_bytes(token.token);
        json!([logprob, token.token, String::from_utf8_lossy(&bytes)])
    };
    Each { shown: [&[], shown], entry }
}

/// SGLang's `output_top_logprobs` and `input_top_logprobs`: a list of `[logprob, id, null]` for each token.
pub(super) fn top_triples(shown: &[Shown], unscored: bool) -> Each<'_, impl Fn(&Shown) -> Value> {
    let first = shown.first().filter(|_first| unscored);
    let entry = move |entry: &Shown| match first.is_some_and(|first| std::ptr::eq(first, entry)) {
        true => Value::Null,
        false => entry.token.top.iter().map(|top| json!([number(top.logprob), top.token, null])).collect(),
    };
    Each { shown: [&[], shown], entry }
}

/// An object of which one field is written from elsewhere: `object` has a placeholder in its place.
pub(super) struct With<'a, T> {
    pub object: &'a Map<String, Value>,
    pub name: &'static str,
    pub value: T,
}

impl<T: Serialize> Serialize for With<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(Some(self.object.len()))?;
        for (name, value) in self.object {
            match name == self.name {
                true => object.serialize_entry(name, &self.value)?,
                false => object.serialize_entry(name, value)?,
            }
        }
        object.end()
    }
}

#[cfg(test)]
mod tests {
    use host_wire::proto::{Token, TopToken};

    use super::super::answer::Delta;
    use super::super::respond::written;
    use super::*;
    use crate::text::ByteTokenizer;

    #[test]
    fn what_is_written_is_no_longer_than_what_its_tokens_count() {
        let tokenizer = ByteTokenizer::new(300);
        for token in [0, 65, 255, 299] {
            let top = vec![TopToken { token, logprob: -12.345_678 }; 20];
            let token = Token { token, logprob: Some(-0.000_123_456), top };
            let delta = Delta { shown: vec![Shown::at_the_beginning(token); 100], ..Delta::default() };
            let (tokenizer, shown) = (&tokenizer, &delta.shown[..]);
            let lengths = [
                written(&OfChat { tokenizer, shown }).len(),
                written(&OfCompletion { tokenizer, prompt: &[], shown, behind: 0 }).len(),
                written(&triples(tokenizer, shown, false)).len() + written(&top_triples(shown, false)).len(),
            ];
            let counted = delta.memory(tokenizer);
            assert!(lengths.iter().all(|length| *length <= counted), "{lengths:?}, {counted} counted");
        }
    }

    #[test]
    fn half_a_character_is_named_by_its_bytes() {
        assert_eq!(name("é".as_bytes()), "é");
        assert_eq!(name(&[0xe2, 0x82]), r"bytes:\xe2\x82");
    }
}

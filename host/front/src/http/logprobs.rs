//! Log probabilities in OpenAI's two shapes.

use serde_json::{Map, Value, json};

use super::answer::Shown;
use crate::text::Tokenizer;

/// What other servers write for "impossible", because JSON has no infinity.
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

/// The completions shape: parallel lists.
pub(super) fn of_completion(tokenizer: &dyn Tokenizer, shown: &[Shown]) -> Value {
    let text = |token: u32| name(&tokenizer.token_bytes(token));
    let top = |entry: &Shown| {
        let mut top: Map<String, Value> =
            entry.token.top.iter().map(|top| (text(top.token), json!(number(top.logprob)))).collect();
        // The sampled token is always among them, so there may be one more than requested.
        if let Some(logprob) = entry.token.logprob {
            top.entry(text(entry.token.token)).or_insert(json!(number(logprob)));
        }
        top
    };
    json!({
        "tokens": shown.iter().map(|entry| text(entry.token.token)).collect::<Vec<_>>(),
        "token_logprobs": shown.iter().map(|entry| entry.token.logprob.map(number)).collect::<Vec<_>>(),
        "top_logprobs": shown.iter().map(top).collect::<Vec<_>>(),
        "text_offset": shown.iter().map(|entry| entry.offset).collect::<Vec<_>>(),
    })
}

/// The chat shape: one object per token.
pub(super) fn of_chat(tokenizer: &dyn Tokenizer, shown: &[Shown]) -> Value {
    let entry = |token: u32, logprob: Option<f32>| {
        let bytes = tokenizer.token_bytes(token);
        json!({"token": name(&bytes), "logprob": logprob.map(number), "bytes": bytes})
    };
    let content: Vec<Value> = shown
        .iter()
        .map(|shown| {
            let mut item = entry(shown.token.token, shown.token.logprob);
            let top: Vec<Value> =
                shown.token.top.iter().map(|top| entry(top.token, Some(top.logprob))).collect();
            item["top_logprobs"] = Value::Array(top);
            item
        })
        .collect();
    json!({"content": content})
}

#[cfg(test)]
mod tests {
    #[test]
    fn half_a_character_is_named_by_its_bytes() {
        assert_eq!(super::name("é".as_bytes()), "é");
        assert_eq!(super::name(&[0xe2, 0x82]), r"bytes:\xe2\x82");
    }
}

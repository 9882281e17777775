//! Fields that control how tokens are drawn. `host_executor::sampling` describes their effects.

use host_wire::proto::{Sampling, TokenBias, TokenSequence};
use host_wire::random::random_u64;
use serde_json::Value;

use super::App;
use super::error::ApiError;
use super::fields::Fields;

/// Most entries of `logit_bias` and of `allowed_token_ids`, as vLLM has them.
pub(super) const MOST_TOKENS: usize = 1024;
/// Most bad words, and the most bytes of one.
pub(super) const MOST_WORDS: usize = 1000;
pub(super) const MOST_WORD_BYTES: usize = 256;
/// Most bytes of all bad words.
const MOST_BYTES_OF_WORDS: usize = 64 << 10;
/// A bias is cut to this, up and down.
pub(super) const MOST_BIAS: f64 = 100.0;
pub(super) const MOST_REPETITION: f64 = 100.0;

/// A seed for a request without one. It has 52 bits, so that a client that reads numbers as doubles can send it back.
///
/// # Errors
/// When the system has no randomness.
pub(super) fn drawn_seed() -> Result<u64, ApiError> {
    let random = random_u64();
    let bits = random.map_err(|error| ApiError::internal(format!("no randomness for a seed: {error}")))?;
    Ok(bits >> 12)
}

/// The seed that stands for none, as in vLLM.
const NO_SEED: i64 = -1;

/// Takes the settings. `seed` is the name of the seed's field, and `ends` are all tokens that may end the answer.
#[expect(clippy::cast_possible_truncation, reason = "f32 is what sampling computes in")]
pub(super) fn take(app: &App, fields: &mut Fields, seed: &str, ends: Vec<u32>) -> Result<Sampling, ApiError> {
    let temperature = fields.number("temperature", 0.0, 2.0, true)?.unwrap_or(1.0);
    let top_p = fields.number("top_p", 0.0, 1.0, false)?.unwrap_or(1.0);
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0);
    let min_p = fields.number("min_p", 0.0, 1.0, true)?.unwrap_or(0.0);
    let presence = fields.number("presence_penalty", -2.0, 2.0, true)?.unwrap_or(0.0);
    let frequency = fields.number("frequency_penalty", -2.0, 2.0, true)?.unwrap_or(0.0);
    let repetition = fields.number("repetition_penalty", 0.0, MOST_REPETITION, false)?.unwrap_or(1.0);
    // `min_new_tokens` is SGLang's name of the field.
    let least = fields.integer("min_tokens", 0..=i64::from(u32::MAX))?;
    let least = least.or(fields.integer("min_new_tokens", 0..=i64::from(u32::MAX))?).unwrap_or(0);
    let min_tokens = u32::try_from(least).unwrap_or(0);
    let seed = match fields.integer(seed, i64::MIN..=i64::MAX)? {
        None | Some(NO_SEED) => drawn_seed()?,
        Some(seed) => seed.cast_unsigned(),
    };
    Ok(Sampling {
        temperature: temperature as f32,
        // A tiny positive number must stay in (0, 1].
        top_p: (top_p as f32).max(f32::MIN_POSITIVE),
        // In other servers -1 stands for "all".
        top_k: u32::try_from(top_k).unwrap_or(0),
        seed,
        logprobs: None,
        min_p: min_p as f32,
        presence_penalty: presence as f32,
        frequency_penalty: frequency as f32,
        // 1 has no effect, and is sent as 0, which leaves the field out of the message.
        repetition_penalty: if repetition == 1.0 { 0.0 } else { (repetition as f32).max(f32::MIN_POSITIVE) },
        min_tokens,
        end_tokens: if min_tokens > 0 { ends } else { Vec::new() },
        logit_bias: biases(app, fields)?,
        allowed_tokens: fields.token_list(
            "allowed_token_ids",
            MOST_TOKENS,
            app.text.tokenizer.vocabulary(),
        )?,
        bad_words: bad_words(app, fields)?,
    })
}

/// `{"TOKEN ID": BIAS}`, in the order of the ids.
#[expect(clippy::cast_possible_truncation, reason = "f32 is what sampling computes in")]
fn biases(app: &App, fields: &mut Fields) -> Result<Vec<TokenBias>, ApiError> {
    let given = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(given)) if given.len() <= MOST_TOKENS => given,
        Some(other) => {
            let expected = format!("an object of up to {MOST_TOKENS} token ids and numbers");
            return Err(fields.wrong("logit_bias", expected, &other));
        }
    };
    let vocabulary = app.text.tokenizer.vocabulary();
    let mut biases = Vec::with_capacity(given.len());
    for (id, bias) in &given {
        let token = id.parse::<u32>().ok().filter(|token| *token < vocabulary);
        let Some(token) = token else {
            let expected = format!("an object with token ids from 0 to {}", vocabulary.saturating_sub(1));
            return Err(fields.wrong("logit_bias", expected, &Value::from(id.as_str())));
        };
        let Some(bias) = bias.as_f64() else {
            return Err(fields.wrong("logit_bias", "an object with numbers", bias));
        };
        let bias = bias.clamp(-MOST_BIAS, MOST_BIAS) as f32;
        if bias != 0.0 {
            biases.push(TokenBias { token, bias });
        }
    }
    biases.sort_by_key(|bias| bias.token);
    Ok(biases)
}

/// The tokens of each word at the beginning of a text, and of the word behind a space where those are others, as vLLM reads bad
/// words.
fn bad_words(app: &App, fields: &mut Fields) -> Result<Vec<TokenSequence>, ApiError> {
    let given = match fields.take("bad_words") {
        None => return Ok(Vec::new()),
        Some(Value::Array(given)) if given.len() <= MOST_WORDS => given,
        Some(other) => {
            return Err(fields.wrong("bad_words", format!("a list of up to {MOST_WORDS} strings"), &other));
        }
    };
    let bytes: usize = given.iter().filter_map(Value::as_str).map(str::len).sum();
    if bytes > MOST_BYTES_OF_WORDS {
        let message = format!(
            "bad_words have {bytes} bytes together, and {MOST_BYTES_OF_WORDS} is the limit; give fewer"
        );
        return Err(ApiError::field("bad_words", message));
    }
    let mut words = Vec::with_capacity(2 * given.len());
    for word in given {
        let text = word.as_str().map(str::trim_start);
        let Some(text) = text.filter(|text| !text.is_empty() && text.len() <= MOST_WORD_BYTES) else {
            return Err(fields.wrong("bad_words", format!("strings of 1 to {MOST_WORD_BYTES} bytes"), &word));
        };
        let first = app.text.tokenizer.encode(text, false)?;
        let spaced = app.text.tokenizer.encode(&format!(" {text}"), false)?;
        if spaced.first() != first.first() && spaced.len() == first.len() {
            words.push(TokenSequence { tokens: spaced });
        }
        words.push(TokenSequence { tokens: first });
    }
    Ok(words)
}

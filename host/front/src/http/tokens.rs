//! `POST /tokenize` and `POST /detokenize`, as vLLM and SGLang have them.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::ask::{MOST_ANSWERS, check_model};
use super::conversation::Conversation;
use super::error::ApiError;
use super::fields::{Fields, empty};
use super::{App, Shared, json as json_response, prompt};
use crate::identity::Caller;
use crate::text::Specials;

/// Most tokens that are turned into text at once.
pub(super) const MOST_TOKENS: usize = 1 << 20;

pub(super) async fn tokenize(
    State(app): Shared,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    on_text(&app, &caller, request, tokens_of).await
}

pub(super) async fn detokenize(
    State(app): Shared,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    on_text(&app, &caller, request, text_of).await
}

/// Reads a body and answers with what is made of it, on the threads for text.
async fn on_text(
    app: &Arc<App>,
    caller: &Caller,
    request: Request,
    work: fn(&App, &[u8]) -> Result<Value, ApiError>,
) -> Result<Response, ApiError> {
    let (body, sent) = app.body(&caller.client, request).await?;
    let text = app.text_work.take(&caller.client, body.len())?;
    drop(sent);
    let of_work = Arc::clone(app);
    let done = app.text_work.run(text, move || work(&of_work, &body)).await?;
    Ok(json_response(&done))
}

/// Whether a body would be answered by either.
pub(super) fn is_accepted(app: &App, body: &[u8]) -> bool {
    tokens_of(app, body).is_ok() || text_of(app, body).is_ok()
}

fn tokens_of(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    fields.refuse_unless("tools", empty)?;
    fields.refuse_unless("continue_final_message", empty)?;
    let names = fields.boolean("return_token_strs")?.unwrap_or(false);
    let special = fields.boolean("add_special_tokens")?;
    let longest = app.router.registry().max_tokens();
    let strings = |tokens: &[u32]| -> Option<Vec<String>> {
        let name =
            |token: &u32| String::from_utf8_lossy(&app.text.tokenizer.token_bytes(*token)).into_owned();
        names.then(|| tokens.iter().map(name).collect())
    };
    let one = |tokens: Vec<u32>| json!({"count": tokens.len(), "max_model_len": longest, "token_strs": strings(&tokens), "tokens": tokens});
    match fields.take("prompt") {
        None => {
            // The template writes the special tokens.
            let tokens = Conversation::take(&mut fields)?.tokens(app, special.unwrap_or(false))?;
            fields.refuse_rest(|_| None)?;
            Ok(one(tokens))
        }
        Some(Value::String(text)) => {
            fields.refuse_rest(|_| None)?;
            Ok(one(prompt::encode(app, &text, special.unwrap_or(true))?))
        }
        Some(Value::Array(texts)) if texts.len() <= MOST_ANSWERS => {
            let mut all = Vec::with_capacity(texts.len());
            for text in &texts {
                let Value::String(text) = text else {
                    return Err(fields.wrong("prompt", "a string or a list of strings", text));
                };
                all.push(prompt::encode(app, text, special.unwrap_or(true))?);
            }
            fields.refuse_rest(|_| None)?;
            let counts: Vec<usize> = all.iter().map(Vec::len).collect();
            Ok(json!({"count": counts, "max_model_len": longest, "tokens": all}))
        }
        Some(other) => {
            Err(fields.wrong("prompt", format!("a string or a list of up to {MOST_ANSWERS} strings"), &other))
        }
    }
}

/// vLLM's answer has special tokens, in `prompt`, and SGLang's has none, in `text`, unless the request says so for both.
fn text_of(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    let skips = fields.boolean("skip_special_tokens")?;
    if !matches!(fields.get("tokens"), Some(Value::Array(_))) {
        return Err(ApiError::field("tokens", "tokens must be a list of token ids"));
    }
    let tokens = fields.token_list("tokens", MOST_TOKENS, app.text.tokenizer.vocabulary())?;
    fields.refuse_rest(|_| None)?;
    let text =
        |hides: bool| prompt::decode(app, &tokens, if hides { Specials::Hidden } else { Specials::Shown });
    Ok(json!({"prompt": text(skips.unwrap_or(false)), "text": text(skips.unwrap_or(true))}))
}

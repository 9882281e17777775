//! `POST /tokenize` and `POST /detokenize`, in the forms of vLLM and SGLang.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::ask::{MOST_ANSWERS, check_model, in_time};
use super::conversation::Conversation;
use super::error::ApiError;
use super::fields::{Fields, empty};
use super::record::Record;
use super::tools::{Spelling, Tools};
use super::{App, Shared, json_text, prompt};
use crate::identity::Caller;
use crate::text::{Specials, Tokenizer};

/// Most tokens that one request turns into text.
pub(super) const MOST_TOKENS: usize = 1 << 20;

pub(super) async fn tokenize(
    State(app): Shared,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    on_text(&app, "/tokenize", &caller, request, tokens_of).await
}

pub(super) async fn detokenize(
    State(app): Shared,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    on_text(&app, "/detokenize", &caller, request, text_of).await
}

/// Reads a body, and answers with the result of `work`, which runs on the threads for text. It gets the longest text that a template
/// may make in its turn. Counts the outcome however the request ends. `endpoint` is the path without `/v1`.
async fn on_text(
    app: &Arc<App>,
    endpoint: &'static str,
    caller: &Caller,
    request: Request,
    work: fn(&App, &[u8], usize) -> Result<String, ApiError>,
) -> Result<Response, ApiError> {
    let mut record = Record::new(Arc::clone(&app.metrics), endpoint, app.log_requests);
    let answered = async {
        let (body, sent) = app.body(&caller.client, request).await?;
        // Takes a place, as generation does: so waiting requests are counted one by one, however short they are.
        let place = app.router.admit(caller)?;
        let text = app.text_work.take(&caller.client, body.len())?;
        drop(sent);
        let of_work = Arc::clone(app);
        let work = move |most_text: usize| work(&of_work, &body, most_text);
        let (done, text) = app.text_work.run(text, work).await?;
        drop((text, place));
        Ok(json_text(done))
    };
    let answered = in_time(app, record.arrived(), None, answered).await;
    match &answered {
        Ok(_) => record.ok(),
        Err(error) => record.failed(error),
    }
    answered
}

/// Whether one of the two endpoints would answer a body.
pub(super) fn is_accepted(app: &App, body: &[u8]) -> bool {
    tokens_of(app, body, usize::MAX).is_ok() || text_of(app, body, usize::MAX).is_ok()
}

/// An answer of `/tokenize` for one prompt. It is serialized directly, because each token of a [`Value`] would take tens of
/// bytes.
#[derive(Serialize)]
struct Tokens<'a> {
    count: usize,
    max_model_len: Option<u32>,
    token_strs: Option<Names<'a>>,
    tokens: &'a [u32],
}

/// An answer of `/tokenize` for several prompts.
#[derive(Serialize)]
struct AllTokens<'a> {
    count: Vec<usize>,
    max_model_len: Option<u32>,
    token_strs: Option<Vec<Names<'a>>>,
    tokens: &'a [Vec<u32>],
}

/// The texts that tokens stand for, as a list.
struct Names<'a> {
    tokenizer: &'a dyn Tokenizer,
    tokens: &'a [u32],
}

impl Serialize for Names<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let name = |token: &u32| String::from_utf8_lossy(&self.tokenizer.token_bytes(*token)).into_owned();
        serializer.collect_seq(self.tokens.iter().map(name))
    }
}

/// An answer of `/detokenize`.
#[derive(Serialize)]
struct Texts<'a> {
    prompt: &'a str,
    text: &'a str,
}

fn written(answer: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(answer)
        .map_err(|error| ApiError::internal(format!("an answer is no JSON: {error}")))
}

fn tokens_of(app: &App, body: &[u8], most_text: usize) -> Result<String, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    fields.refuse_unless("continue_final_message", empty)?;
    let names = fields.boolean("return_token_strs")?.unwrap_or(false);
    let special = fields.boolean("add_special_tokens")?;
    let max_model_len = app.router.registry().max_tokens();
    let one = |tokens: &[u32]| {
        let token_strs = names.then_some(Names { tokenizer: &*app.text.tokenizer, tokens });
        written(&Tokens { count: tokens.len(), max_model_len, token_strs, tokens })
    };
    let given = fields.take("prompt");
    if given.is_some() && fields.get("tools").is_some_and(|tools| !empty(tools)) {
        let message = "tools reach the model through its chat template: send messages in the place of prompt";
        return Err(ApiError::field("tools", message));
    }
    let tools = Tools::take(app, &mut fields, Spelling::Nested)?;
    match given {
        None => {
            // The template writes the special tokens.
            let mut conversation = Conversation::take(&mut fields)?;
            conversation.offer(tools.as_ref());
            let tokens = conversation.tokens(app, special.unwrap_or(false), most_text)?;
            fields.refuse_rest(|_| None)?;
            one(&tokens)
        }
        Some(Value::String(text)) => {
            fields.refuse_rest(|_| None)?;
            one(&prompt::encode(app, &text, special.unwrap_or(true))?)
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
            let tokenizer = &*app.text.tokenizer;
            let token_strs = names.then(|| all.iter().map(|tokens| Names { tokenizer, tokens }).collect());
            let count = all.iter().map(Vec::len).collect();
            written(&AllTokens { count, max_model_len, token_strs, tokens: &all })
        }
        Some(other) => {
            Err(fields.wrong("prompt", format!("a string or a list of up to {MOST_ANSWERS} strings"), &other))
        }
    }
}

/// The texts of tokens. vLLM's field `prompt` has special tokens and SGLang's field `text` has none, unless the request sets this
/// for both. Where both are the same, the text is made once.
fn text_of(app: &App, body: &[u8], _most_text: usize) -> Result<String, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    let skips = fields.boolean("skip_special_tokens")?;
    if !matches!(fields.get("tokens"), Some(Value::Array(_))) {
        return Err(ApiError::field("tokens", "tokens must be a list of token ids"));
    }
    let tokens = fields.token_list("tokens", MOST_TOKENS, app.text.tokenizer.vocabulary())?;
    fields.refuse_rest(|_| None)?;
    let most = app.max_body;
    let text = |hides: bool| {
        let specials = if hides { Specials::Hidden } else { Specials::Shown };
        prompt::decode_within(app, &tokens, specials, most).ok_or_else(|| {
            let message = format!(
                "the text of these tokens has more than {most} bytes, which is the limit (--max-body-bytes); send fewer at once"
            );
            ApiError::field("tokens", message)
        })
    };
    let shown = text(skips.unwrap_or(false))?;
    let has_special = || tokens.iter().any(|token| app.text.tokenizer.is_special(*token));
    let hidden = if skips.is_none() && has_special() { Some(text(true)?) } else { None };
    written(&Texts { prompt: &shown, text: hidden.as_deref().unwrap_or(&shown) })
}

//! Endpoints that describe the server to clients and gateways: `/v1/models`, `/server_info`, `/model_info`, `/version`.

use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::error::ApiError;
use super::guard::is_operator;
use super::{App, Shared, json as json_response};
use crate::identity::Caller;
use crate::text::CallFormat;

/// This program's version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

fn model_object(app: &App, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.about.created,
        "owned_by": "host",
        "root": app.model,
        "parent": null,
        "max_model_len": app.router.registry().max_tokens(),
    })
}

/// `/v1/models`: the served model, once for each of its names.
pub(super) async fn models(State(app): Shared) -> Response {
    let data: Vec<Value> = app.names().map(|name| model_object(&app, name)).collect();
    json_response(&json!({"object": "list", "data": data}))
}

/// One model by name.
pub(super) async fn model(
    State(app): Shared,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(name) = name.map_err(|rejection| ApiError::field("model", rejection.body_text()))?;
    app.check_name(&name)?;
    Ok(json_response(&model_object(&app, &name)))
}

/// `/version`, as vLLM answers it.
pub(super) async fn version() -> Response {
    json_response(&json!({"version": VERSION}))
}

/// The paths of model and tokenizer, for operators only. Other callers get the served name instead.
fn paths(app: &App, caller: Option<&Caller>) -> (String, String) {
    let shown = |path: Option<&String>| match path {
        Some(path) if is_operator(caller) => path.clone(),
        _ => app.model.clone(),
    };
    let model = shown(app.about.model_path.as_ref());
    let tokenizer = app.about.tokenizer_path.as_ref();
    let tokenizer = tokenizer.map_or_else(|| model.clone(), |path| shown(Some(path)));
    (model, tokenizer)
}

/// SGLang's name of the parser for calls of this format, if it has one.
fn tool_call_parser(format: CallFormat) -> Option<&'static str> {
    match format {
        CallFormat::Hermes => Some("hermes"),
        CallFormat::Llama => Some("llama3"),
        CallFormat::Pythonic => Some("pythonic"),
        CallFormat::Qwen3Coder => Some("qwen3_coder"),
        CallFormat::Gemma | CallFormat::FunctionGemma => None,
    }
}

/// `/model_info` and `/get_model_info`, in SGLang's form. SGLang's benchmark loads the tokenizer that the answer names.
pub(super) async fn model_info(State(app): Shared, caller: Option<Extension<Caller>>) -> Response {
    let (model_path, tokenizer_path) = paths(&app, caller.as_deref());
    json_response(&json!({
        "model_path": model_path,
        "tokenizer_path": tokenizer_path,
        "served_model_name": app.model,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": "default",
        // Its parser of this name reads thoughts between the same marks.
        "reasoning_parser": app.text.dialect.thinks.then_some("qwen3"),
        "tool_call_parser": app.text.calls().and_then(tool_call_parser),
        "has_image_understanding": false,
        "has_audio_understanding": false,
    }))
}

/// `/server_info` and `/get_server_info`, with the fields of SGLang's that gateways and benchmarks read. The whole cluster
/// answers as one server.
pub(super) async fn server_info(State(app): Shared, caller: Option<Extension<Caller>>) -> Response {
    let (model_path, tokenizer_path) = paths(&app, caller.as_deref());
    let longest = app.router.registry().max_tokens();
    json_response(&json!({
        "model_path": model_path,
        "tokenizer_path": tokenizer_path,
        "served_model_name": app.model,
        "version": VERSION,
        "context_length": longest,
        "max_total_num_tokens": longest,
        "max_req_input_len": longest.map(|tokens| tokens.saturating_sub(1)),
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "is_embedding": false,
        "disaggregation_mode": "null",
        "internal_states": [{}],
    }))
}

/// The answer of endpoints for embeddings, which this server does not have.
pub(super) async fn no_embeddings() -> ApiError {
    ApiError::not_found(
        "this server generates text and computes no embeddings: use a server with an embedding model".into(),
    )
}

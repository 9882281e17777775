//! The paths of the API and their handlers. `docs/api.md` describes each path.

use std::sync::Arc;

use axum::routing::{MethodRouter, get, post};

use super::{App, chat, completions, drain, flush, generate, health, info, openapi, responses, tokens};

/// A path and its handler.
type Served = (&'static str, MethodRouter<Arc<App>>);

/// Paths on every listener.
pub(super) fn of_all() -> Vec<Served> {
    vec![
        ("/health", get(health::health)),
        ("/health/live", get(health::live)),
        ("/health/ready", get(health::ready)),
    ]
}

/// Paths for clients, which send requests.
pub(super) fn of_clients() -> Vec<Served> {
    vec![
        ("/v1/chat/completions", post(chat::handle)),
        ("/v1/completions", post(completions::handle)),
        ("/v1/responses", post(responses::handle)),
        ("/generate", post(generate::handle)),
        ("/v1/models", get(info::models)),
        ("/v1/models/{*model}", get(info::model)),
        ("/tokenize", post(tokens::tokenize)),
        ("/v1/tokenize", post(tokens::tokenize)),
        ("/detokenize", post(tokens::detokenize)),
        ("/v1/detokenize", post(tokens::detokenize)),
        ("/server_info", get(info::server_info)),
        ("/get_server_info", get(info::server_info)),
        ("/model_info", get(info::model_info)),
        ("/get_model_info", get(info::model_info)),
        ("/version", get(info::version)),
        ("/openapi.json", get(openapi::handle)),
        ("/v1/embeddings", post(info::no_embeddings)),
    ]
}

/// Paths for operators, which watch and change the server.
pub(super) fn of_operators() -> Vec<Served> {
    vec![
        ("/metrics", get(health::metrics)),
        ("/flush_cache", post(flush::handle)),
        ("/drain", post(drain::handle)),
    ]
}

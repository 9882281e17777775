//! `GET /openapi.json`: the API as an OpenAPI document.
//!
//! The schemas of bodies use the limits with which bodies are read. `reference` compares every field with the code that reads it,
//! and every path with the paths that are served.

mod answers;
mod fields;
mod operations;
mod requests;
mod schema;

use std::sync::{Arc, OnceLock};

use axum::extract::{Extension, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::{App, Shared, typed};

/// The version of the format.
const FORMAT: &str = "3.1.0";

/// The document of one listener, which is made once.
#[derive(Clone, Debug, Default)]
pub(super) struct Document {
    /// Whether requests need a key.
    pub has_keys: bool,
    made: Arc<OnceLock<String>>,
}

impl Document {
    pub fn new(has_keys: bool) -> Self {
        Self { has_keys, ..Self::default() }
    }
}

/// Facts about the model that the schemas depend on.
struct About {
    models: Vec<String>,
    vocabulary: u32,
    /// Least number of characters of a text that has a token.
    least_text: usize,
}

impl About {
    fn of(app: &App) -> Self {
        let tokenizer = &app.text.tokenizer;
        let is_nothing = tokenizer.encode("", true).is_ok_and(|tokens| tokens.is_empty());
        Self {
            models: app.names().cloned().collect(),
            vocabulary: tokenizer.vocabulary(),
            least_text: usize::from(is_nothing),
        }
    }
}

/// Answers with the document.
pub(super) async fn handle(State(app): Shared, Extension(own): Extension<Document>) -> Response {
    let made = own.made.get_or_init(|| document(&app, own.has_keys).to_string());
    typed("application/json", made.clone())
}

/// The document of a server.
pub(super) fn document(app: &App, has_keys: bool) -> Value {
    let about = About::of(app);
    let schemas = requests::all(&about).into_iter().chain(answers::all());
    let schemas: Map<String, Value> = schemas.map(|(name, schema)| (name.to_owned(), schema)).collect();
    let mut document = json!({
        "openapi": FORMAT,
        "info": {
            "title": "host",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Serves large language models. null is the same as leaving a field out. A field that is not listed is \
                            refused, unless its value asks for nothing.",
        },
        "paths": operations::paths(has_keys),
        "components": {
            "schemas": schemas,
            "headers": {
                "RequestId": {"description": "The id of the request", "required": true, "schema": {"type": "string"}},
                "RetryAfter": {"description": "Seconds after which another try makes sense", "required": true, "schema": {"type": "integer", "minimum": 0}},
            },
        },
    });
    if has_keys {
        document["components"]["securitySchemes"] = json!({
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        });
    }
    document
}

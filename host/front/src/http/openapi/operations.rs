//! The operations of the API: paths, bodies and answers.

use serde_json::{Map, Value, json};

use super::requests;
use super::schema::reference;

/// One operation: a path with a method.
struct Operation {
    path: &'static str,
    method: &'static str,
    summary: &'static str,
    /// The schema of its body, if it reads one.
    body: Option<&'static str>,
    /// The status of success, and the kind of answer.
    success: (&'static str, Success),
    /// Statuses of failures, beside those of every request.
    failures: &'static [&'static str],
}

/// The kind of a successful answer.
#[derive(Clone, Copy)]
enum Success {
    /// JSON of this schema.
    Json(&'static str),
    /// JSON of the first schema, or events of the second.
    Streamed(&'static str, &'static str),
    /// One object, or a list of them, or events with them.
    Generated,
    /// Counters.
    Metrics,
    /// This document.
    Document,
}

/// Failures of every request: the checks in front of the handlers return them.
const OF_ALL: [&str; 3] = ["401", "403", "421"];
/// Failures of requests with a body.
const OF_BODIES: [&str; 7] = ["400", "404", "408", "413", "415", "429", "500"];
/// Failures of operators' paths. Where these have an address of their own, other listeners answer 404.
const OF_OPERATORS: [&str; 3] = ["404", "415", "500"];

fn get(path: &'static str, schema: &'static str, summary: &'static str) -> Operation {
    let success = ("200", Success::Json(schema));
    Operation { path, method: "get", summary, body: None, success, failures: &["429", "500", "503"] }
}

fn post(path: &'static str, body: &'static str, success: Success, summary: &'static str) -> Operation {
    let failures = &["503"];
    Operation { path, method: "post", summary, body: Some(body), success: ("200", success), failures }
}

fn all() -> Vec<Operation> {
    let chat = Success::Streamed("ChatCompletion", "ChatCompletionChunk");
    let text = Success::Streamed("Completion", "CompletionChunk");
    let response = Success::Streamed("Response", "ResponseEvent");
    let (tokens, detokenized) = (Success::Json("Tokens"), Success::Json("Text"));
    let of_operators = |path, method, success, summary, failures| Operation {
        path,
        method,
        summary,
        body: None,
        success,
        failures,
    };
    vec![
        post("/v1/chat/completions", "ChatCompletionRequest", chat, "A conversation's next turn"),
        post("/v1/completions", "CompletionRequest", text, "Texts that go on"),
        post("/v1/responses", "ResponseRequest", response, "A conversation's next turn, as agents send it"),
        post("/generate", "GenerateRequest", Success::Generated, "The same with more figures"),
        get("/v1/models", "Models", "The model"),
        Operation {
            failures: &["400", "404", "500", "503"],
            ..get("/v1/models/{model}", "Model", "The model by one of its names")
        },
        post("/tokenize", "TokenizeRequest", tokens, "The tokens of a text or of a conversation"),
        post("/v1/tokenize", "TokenizeRequest", tokens, "The same"),
        post("/detokenize", "DetokenizeRequest", detokenized, "The text of tokens"),
        post("/v1/detokenize", "DetokenizeRequest", detokenized, "The same"),
        get("/server_info", "ServerInfo", "Context length and version"),
        get("/get_server_info", "ServerInfo", "The same"),
        get("/model_info", "ModelInfo", "The model's and the tokenizer's place"),
        get("/get_model_info", "ModelInfo", "The same"),
        get("/version", "Version", "The version of the server"),
        Operation { success: ("200", Success::Document), ..get("/openapi.json", "", "This document") },
        of_operators(
            "/v1/embeddings",
            "post",
            ("404", Success::Json("Error")),
            "Refused: there are none",
            &["415", "429", "500", "503"],
        ),
        get("/health", "Health", "Whether a request could be served. To operators every worker"),
        get("/health/live", "State", "Whether the router runs"),
        get("/health/ready", "State", "Whether requests are taken and could be served"),
        of_operators("/metrics", "get", ("200", Success::Metrics), "Counters", &["404", "429", "500", "503"]),
        of_operators(
            "/flush_cache",
            "post",
            ("200", Success::Json("Flushed")),
            "Every worker empties its radix caches",
            &["502", "503"],
        ),
        of_operators(
            "/drain",
            "post",
            ("202", Success::Json("Draining")),
            "A worker takes no more requests, and ends",
            &["400", "502", "503"],
        ),
    ]
}

/// The `paths` of the document. `has_keys`: requests need a key.
pub(super) fn paths(has_keys: bool) -> Value {
    let mut paths = Map::new();
    for operation in all() {
        let method = operation.method;
        let path = operation.path.to_owned();
        paths.insert(path, json!({method: described(&operation, has_keys)}));
    }
    Value::Object(paths)
}

fn described(operation: &Operation, has_keys: bool) -> Value {
    let (status, success) = operation.success;
    let mut responses = Map::new();
    responses.insert(status.to_owned(), answer(status, content(success)));
    let is_health = operation.path.starts_with("/health");
    let bodies = operation.body.map_or(&[][..], |_| &OF_BODIES);
    let of_operators =
        if ["/flush_cache", "/drain"].contains(&operation.path) { &OF_OPERATORS[..] } else { &[] };
    for status in OF_ALL.iter().chain(bodies).chain(of_operators).chain(operation.failures) {
        let content = match *status {
            "503" if is_health => content(success),
            "502" if operation.path == "/flush_cache" => content(success),
            _ => json!({"application/json": {"schema": reference("Error")}}),
        };
        let mut answer = answer(status, content);
        if *status == "503" && is_health {
            // A probe tries again at its own interval, so there is no `retry-after`.
            answer["headers"] = json!({"x-request-id": {"$ref": "#/components/headers/RequestId"}});
        }
        responses.insert((*status).to_owned(), answer);
    }
    let mut described = json!({
        "operationId": operation_id(operation),
        "summary": operation.summary,
        "responses": responses,
        // A request that needs no key may have one.
        "security": match (has_keys, is_health) {
            (true, true) => json!([{}, {"bearer": []}, {"key": []}]),
            (true, false) => json!([{"bearer": []}, {"key": []}]),
            (false, _) => json!([]),
        },
    });
    if let Some(body) = operation.body {
        described["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": reference(body)}}});
    }
    let parameters = parameters(operation, success);
    if !parameters.is_empty() {
        described["parameters"] = Value::Array(parameters);
    }
    described
}

fn parameters(operation: &Operation, success: Success) -> Vec<Value> {
    let text = json!({"type": "string"});
    let parameter = |name: &str, place: &str, schema: Value, about: &str| json!({"name": name, "in": place, "required": place != "header", "schema": schema, "description": about});
    match (operation.path, success) {
        ("/v1/models/{model}", _) => {
            vec![parameter("model", "path", text, "Its name, which may have slashes")]
        }
        ("/drain", _) => vec![parameter("worker", "query", text, "A worker's name, or its instance")],
        (_, Success::Streamed(..) | Success::Generated) => vec![
            parameter("x-session-id", "header", text, "Requests of a session stay together"),
            parameter("x-request-timeout", "header", requests::seconds(), "As the field timeout"),
        ],
        _ => Vec::new(),
    }
}

fn operation_id(operation: &Operation) -> String {
    let words = operation.path.split(['/', '_', '{', '}', '.']).filter(|word| !word.is_empty());
    [operation.method].into_iter().chain(words).collect::<Vec<_>>().join("_")
}

/// Schema of server-sent events with JSON. Before version 3.2 of the format, the schema of such a stream is the schema of its
/// events. `is_named`: events are named by their type, and no `[DONE]` comes at the end.
fn events(of: &str, is_named: bool) -> Value {
    let json = json!({
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [reference(of), reference("Error")]},
    });
    let data = if is_named { json } else { json!({"anyOf": [{"const": "[DONE]"}, json]}) };
    json!({"schema": {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }})
}

fn content(success: Success) -> Value {
    match success {
        Success::Json(schema) => json!({"application/json": {"schema": reference(schema)}}),
        Success::Streamed(schema, event) => {
            json!({"application/json": {"schema": reference(schema)}, "text/event-stream": events(event, event == "ResponseEvent")})
        }
        Success::Generated => {
            let one = reference("Generated");
            let schema = json!({"anyOf": [one, {"type": "array", "items": one}]});
            json!({"application/json": {"schema": schema}, "text/event-stream": events("Generated", false)})
        }
        Success::Metrics => {
            let text = json!({"schema": {"type": "string"}});
            json!({"text/plain": text, "application/openmetrics-text": text})
        }
        Success::Document => {
            json!({"application/json": {"schema": {"type": "object", "required": ["openapi", "info", "paths"]}}})
        }
    }
}

/// An answer of a status.
fn answer(status: &str, content: Value) -> Value {
    let about = match status {
        "200" | "202" => "As asked for",
        "400" => "The body or a field is wrong, or prompt and answer fit no worker",
        "401" => "There is no key, or it is not one of the server's",
        "403" => "For operators alone, or sent by a web page of another origin",
        "404" => "There is nothing of this name here",
        "408" => "The time is up",
        "413" => "The body is too large",
        "415" => "The body is no JSON",
        "421" => "The server is not addressed by one of its names",
        "429" => "More than the client's share",
        "502" => "A worker does not do what was asked",
        "503" => "All places are taken, or no worker can serve now",
        _ => "The answer broke off, or something is wrong with the server",
    };
    let mut headers = json!({"x-request-id": {"$ref": "#/components/headers/RequestId"}});
    if ["429", "503"].contains(&status) {
        headers["retry-after"] = json!({"$ref": "#/components/headers/RetryAfter"});
    }
    json!({"description": about, "headers": headers, "content": content})
}

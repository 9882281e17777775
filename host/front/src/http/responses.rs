//! `POST /v1/responses`: OpenAI's endpoint for agents. Nothing is stored: a request has the whole conversation in its `input`.

mod input;
mod output;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use host_wire::clock;
use serde::Serialize;
use serde_json::{Map, Value, json};

use self::output::Output;
use super::answer::{Delta, End};
use super::apart::write_apart;
use super::ask::{Ask, check_model};
use super::conversation::{self, Turn};
use super::error::ApiError;
use super::fields::{Fields, empty};
use super::logprobs::With;
use super::record::Usage;
use super::respond::{Event, Item, Prepared, Shape, serve, written};
use super::spoken::Spoken;
use super::tools::{Spelling, Tools, is_foreign_call};
use super::{App, RequestId, Shared, structured};
use crate::text::Tokenizer;

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/v1/responses", id, request, prepare).await
}

/// Whether a request with this body would be carried out.
pub(super) fn is_accepted(app: &App, id: &RequestId, body: &[u8]) -> bool {
    prepare(app, id, body, usize::MAX).is_ok_and(|prepared| prepared.compiles(app))
}

fn prepare(
    app: &App,
    id: &RequestId,
    body: &[u8],
    most_text: usize,
) -> Result<Prepared<Responses>, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    let mut told = told(&fields)?;
    let tools = Tools::take(app, &mut fields, Spelling::Flat)?;
    if tools.is_none() {
        // Tools that are not part of the prompt are not repeated.
        told.retain(|(name, _)| *name != "tools");
        told.push(("tools", "[]".to_owned()));
    }
    let told: Vec<String> = told.iter().map(|(name, json)| format!("{name:?}:{json}")).collect();
    let told = told.join(",");
    refuse_stored(&mut fields)?;
    // In this endpoint, the structure of the answer is in text.format, or in vLLM's fields.
    fields.refuse_unless("response_format", empty)?;
    fields.refuse_unless("n", |n| n.as_f64() == Some(1.0))?;
    let format = text_format(&mut fields)?;
    let mut ask = Ask::take(app, &mut fields, "seed")?;
    if let Some(format) = format {
        if ask.grammar.is_some() {
            let message = "text.format and another field both limit the answer: give one";
            return Err(ApiError::field("text.format", message));
        }
        ask.follow(format.source.clone(), [format]);
    }
    ask.take_stream(&mut fields)?;
    // Usage is in the last event, and nowhere else.
    (ask.include_usage, ask.usage_in_all) = (false, false);
    ask.take_serving(&mut fields)?;
    ask.answer_field = "max_output_tokens";
    let most = fields.integer("max_output_tokens", 1..=i64::from(u32::MAX))?;
    ask.limit(most.and_then(|most| u32::try_from(most).ok()))?;
    let wants_logprobs = included(&mut fields)?;
    let top = fields.integer("top_logprobs", 0..=20)?.and_then(|top| u32::try_from(top).ok());
    let top = top.filter(|top| wants_logprobs || *top > 0);
    ask.sampling.logprobs = top.or(wants_logprobs.then_some(0));
    let mut conversation = input::take(&mut fields)?;
    conversation.extra = conversation::variables(&mut fields)?;
    effort(&mut fields, &mut conversation.extra)?;
    fields.refuse_rest(|_| None)?;
    let turn = Turn::new(app, conversation, tools.as_ref(), &mut ask, most_text)?;
    let namespaces = tools.map(|tools| tools.namespaces).unwrap_or_default();
    let shape = Responses {
        told: Told {
            id: format!("resp_{}", id.0),
            created: clock::unix_seconds(),
            model: app.model.clone(),
            told,
        },
        begun: false,
        spoken: turn.spoken(),
        readers: turn.memory(1),
        output: Output::new(id.0.clone(), ask.sampling.logprobs.is_some(), namespaces),
        reason: "stop",
        bytes: 0,
    };
    Ok(Prepared { items: vec![Item { prompt: turn.prompt, ask }], shape })
}

/// Longest value, in bytes of JSON, that the answer repeats and that is not part of the prompt.
const MOST_TOLD: usize = 16 << 10;

/// Fields of the request that the answer repeats as they were given, with defaults for absent ones. They are kept as JSON, because
/// values take many times the memory.
///
/// # Errors
/// When a field is too long to be kept until the request ends.
fn told(fields: &Fields) -> Result<Vec<(&'static str, String)>, ApiError> {
    let (bounded, others) = (bounded(), others());
    let given = |name: &str| fields.get(name).filter(|value| !value.is_null());
    if let Some((name, _)) = others.iter().find(|(name, _)| given(name).is_some_and(is_long)) {
        let message = format!("{name} is longer than {MOST_TOLD} bytes, which is the limit");
        return Err(ApiError::field(name, message));
    }
    let all = bounded.into_iter().chain(others);
    Ok(all.map(|(name, default)| (name, given(name).unwrap_or(&default).to_string())).collect())
}

/// Repeated fields that may be long, with their defaults. Their bytes count while the request lasts.
fn bounded() -> [(&'static str, Value); 3] {
    [("instructions", Value::Null), ("tools", json!([])), ("text", json!({"format": {"type": "text"}}))]
}

/// All other repeated fields, with their defaults.
fn others() -> [(&'static str, Value); 10] {
    [
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("temperature", json!(1.0)),
        ("tool_choice", json!("auto")),
        ("top_logprobs", json!(0)),
        ("top_p", json!(1.0)),
        ("truncation", json!("disabled")),
        ("user", Value::Null),
    ]
}

/// The names of the fields that the answer repeats.
pub(super) fn told_names() -> impl Iterator<Item = &'static str> {
    bounded().into_iter().chain(others()).map(|(name, _)| name)
}

fn is_long(value: &Value) -> bool {
    value.to_string().len() > MOST_TOLD
}

/// Refuses fields that need answers or prompts stored by the server.
fn refuse_stored(fields: &mut Fields) -> Result<(), ApiError> {
    let whole = "this server keeps no responses: send the whole conversation as input";
    let kept = [
        ("previous_response_id", whole),
        ("conversation", whole),
        ("background", "this server keeps no responses: wait for the answer, or stream it"),
        ("prompt", "this server keeps no prompts: send the text as instructions and input"),
    ];
    for (name, reason) in kept {
        if fields.take(name).is_some_and(|value| !empty(&value)) {
            return Err(ApiError::unsupported(name, format!("{name} is not supported here: {reason}")));
        }
    }
    // The field limits calls of tools that a server runs itself, so it is checked only.
    fields.integer("max_tool_calls", 0..=i64::MAX)?;
    fields.refuse_unless("truncation", |value| value == "disabled")
}

/// Takes `text`: the format of the answer.
fn text_format(fields: &mut Fields) -> Result<Option<structured::Named>, ApiError> {
    let mut text = fields.object("text", "text.")?;
    let format = text.take("format");
    text.refuse_rest(|_| None)?;
    structured::format("text.format", format)
}

/// Takes `include`. Returns whether it asks for log probabilities.
fn included(fields: &mut Fields) -> Result<bool, ApiError> {
    const LOGPROBS: &str = "message.output_text.logprobs";
    // Nothing is encrypted: clients send thoughts back as they came.
    const ENCRYPTED: &str = "reasoning.encrypted_content";
    let mut wants = false;
    match fields.take("include") {
        None => {}
        Some(Value::Array(names)) => {
            for name in &names {
                match name.as_str() {
                    Some(LOGPROBS) => wants = true,
                    Some(ENCRYPTED) => {}
                    // There are no such calls.
                    Some(name) if is_foreign_call(name) => {}
                    _ => {
                        return Err(fields.wrong(
                            "include",
                            format!("a list of {LOGPROBS:?} and {ENCRYPTED:?}"),
                            name,
                        ));
                    }
                }
            }
        }
        Some(other) => return Err(fields.wrong("include", "a list of names", &other)),
    }
    Ok(wants)
}

/// Takes `reasoning`.
fn effort(fields: &mut Fields, extra: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut reasoning = fields.object("reasoning", "reasoning.")?;
    let effort = reasoning.string("effort")?;
    // Fields about summaries are checked only: thoughts are sent unchanged.
    reasoning.string("summary")?;
    reasoning.string("generate_summary")?;
    reasoning.refuse_rest(|_| None)?;
    if let Some(effort) = effort {
        conversation::think(extra, effort);
    }
    Ok(())
}

/// The fields of a response beside its output.
struct Told {
    id: String,
    created: u64,
    model: String,
    /// Fields of the request that the response repeats: JSON without braces.
    told: String,
}

struct Responses {
    told: Told,
    /// Whether the first events were sent.
    begun: bool,
    spoken: Spoken,
    /// Bytes that `spoken` keeps of the request.
    readers: usize,
    output: Output,
    /// How the answer ended.
    reason: &'static str,
    /// Bytes of the deltas that are kept: the last event repeats them.
    bytes: usize,
}

impl Told {
    /// The fields of a response that are this server's own. The output has a placeholder.
    fn response(&self, status: &str) -> Map<String, Value> {
        let response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": null,
            "model": self.model,
            "output": [],
            "previous_response_id": null,
            "store": false,
            "usage": null,
        });
        match response {
            Value::Object(fields) => fields,
            _ => Map::new(),
        }
    }

    /// A response as JSON, with its output and the fields of the request.
    fn written(&self, response: &Map<String, Value>, output: impl Serialize) -> String {
        let mut json = written(&With { object: response, name: "output", value: output });
        // It is an object with fields.
        json.pop();
        json.push(',');
        json.push_str(&self.told);
        json.push('}');
        json
    }
}

impl Responses {
    fn begin(&mut self) -> Vec<Event> {
        if std::mem::replace(&mut self.begun, true) {
            return Vec::new();
        }
        let nothing: &[Value] = &[];
        let response = self.told.written(&self.told.response("in_progress"), nothing);
        ["response.created", "response.in_progress"].map(|kind| self.event(kind, &response)).into()
    }

    /// An event with the response.
    fn event(&mut self, kind: &'static str, response: &str) -> Event {
        let number = self.output.next_number();
        let json = format!("{{\"response\":{response},\"type\":\"{kind}\",\"sequence_number\":{number}}}");
        Event::Written { kind: Some(kind), json }
    }

    /// A response as JSON, with the output so far.
    fn written(&self, tokenizer: &dyn Tokenizer, response: &Map<String, Value>) -> String {
        write_apart(self.bytes, || self.told.written(response, self.output.items(tokenizer)))
    }

    fn take(&mut self, tokenizer: &dyn Tokenizer, delta: Delta) -> Vec<Event> {
        self.bytes += delta.kept();
        let thinks = self.spoken.is_thinking();
        let said = self.spoken.push(&delta.text);
        self.output.push(tokenizer, said, delta.shown, if thinks { delta.tokens.len() } else { 0 })
    }

    fn finish(&mut self, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Event> {
        self.reason = end.reason;
        let said = self.spoken.finish();
        let (output, cut) = (&mut self.output, end.reason == "length");
        write_apart(self.bytes, || {
            let mut events = output.push(tokenizer, said, Vec::new(), 0);
            events.extend(output.finish(tokenizer, cut));
            events
        })
    }

    /// The whole response without its output, when the answer has ended.
    fn ended(&self, usage: &Usage) -> Map<String, Value> {
        let cut = self.reason == "length";
        let mut response = self.told.response(if cut { "incomplete" } else { "completed" });
        if cut {
            response.insert("incomplete_details".into(), json!({"reason": "max_output_tokens"}));
        }
        let usage = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.output.reasoning_tokens()},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        });
        response.insert("usage".into(), usage);
        response
    }
}

impl Shape for Responses {
    const NAMED: bool = true;

    fn on_delta(&mut self, _number: usize, tokenizer: &dyn Tokenizer, delta: Delta) -> Vec<Event> {
        let mut events = self.begin();
        events.extend(self.take(tokenizer, delta));
        events
    }

    fn end(&mut self, _number: usize, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Event> {
        let mut events = self.begin();
        events.extend(self.finish(tokenizer, end));
        events
    }

    fn memory(&self) -> usize {
        self.told.told.len() + self.readers
    }

    fn keeps(&self) -> usize {
        self.bytes
    }

    fn close(&mut self, tokenizer: &dyn Tokenizer, usage: &Usage) -> Vec<Event> {
        let response = self.written(tokenizer, &self.ended(usage));
        let kind = if self.reason == "length" { "response.incomplete" } else { "response.completed" };
        vec![self.event(kind, &response)]
    }

    fn failed(&mut self, tokenizer: &dyn Tokenizer, error: &ApiError) -> Vec<Event> {
        let mut events = self.begin();
        let mut response = self.told.response("failed");
        let error = json!({"code": error.code().unwrap_or("server_error"), "message": error.message()});
        response.insert("error".into(), error);
        // Without log probabilities: they may be what the client has no share for.
        let response = self.told.written(&response, self.output.texts(tokenizer));
        events.push(self.event("response.failed", &response));
        events
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Vec<(Vec<Delta>, End)>, usage: &Usage) -> String {
        self.output.be_quiet();
        for (deltas, end) in all {
            for delta in deltas {
                self.take(tokenizer, delta);
            }
            self.finish(tokenizer, &end);
        }
        self.told.written(&self.ended(usage), self.output.items(tokenizer))
    }
}

//! `POST /v1/chat/completions`.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use host_wire::clock;
use serde_json::{Map, Value, json};

use super::answer::{Delta, End, Shown, joined, stop_reason};
use super::ask::{Ask, check_model};
use super::conversation::{Conversation, Turn};
use super::error::ApiError;
use super::fields::Fields;
use super::logprobs::{OfChat, With};
use super::record::Usage;
use super::respond::{Event, Item, Prepared, Shape, serve, written};
use super::spoken::{Said, Spoken};
use super::tools::{Choice, Spelling, Tools};
use super::{App, RequestId, Shared};
use crate::text::Tokenizer;

/// Bytes of held thoughts in an event at most.
const MOST_IN_EVENT: usize = 32 << 10;

pub(super) async fn handle(
    State(app): Shared,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(&app, "/v1/chat/completions", id, request, prepare).await
}

/// Whether a request with this body would be carried out.
pub(super) fn is_accepted(app: &App, id: &RequestId, body: &[u8]) -> bool {
    prepare(app, id, body, usize::MAX).is_ok_and(|prepared| prepared.compiles(app))
}

fn prepare(app: &App, id: &RequestId, body: &[u8], most_text: usize) -> Result<Prepared<Chat>, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(app, &mut fields)?;
    let tools = Tools::take(app, &mut fields, Spelling::Nested)?;
    Ask::refuse_unsupported(&mut fields)?;
    let mut ask = Ask::take(app, &mut fields, "seed")?;
    ask.take_stream(&mut fields)?;
    ask.take_serving(&mut fields)?;
    let old = fields.integer("max_tokens", 1..=i64::from(u32::MAX))?;
    let new = fields.integer("max_completion_tokens", 1..=i64::from(u32::MAX))?;
    if new.is_some() {
        ask.answer_field = "max_completion_tokens";
    }
    ask.limit(new.or(old).and_then(|max| u32::try_from(max).ok()))?;
    let logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=20)?.and_then(|count| u32::try_from(count).ok());
    ask.sampling.logprobs = match (logprobs, top) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs to be true"));
        }
    };
    let mut choice = |name| fields.boolean(name).map(|choice| choice.unwrap_or(true));
    let shown = choice("include_reasoning")?;
    let separate = choice("separate_reasoning")?;
    let streamed = choice("stream_reasoning")?;
    if app.text.dialect.thinks {
        let logprobs = ask.sampling.logprobs.is_some();
        for (field, is_wrong, message) in [
            (
                "include_reasoning",
                !shown && logprobs,
                "without include_reasoning, logprobs would still have the tokens of the thoughts",
            ),
            (
                "separate_reasoning",
                !shown && !separate,
                "without include_reasoning there are no thoughts that could be part of the text",
            ),
            (
                "stream_reasoning",
                !streamed && logprobs,
                "without stream_reasoning, the logprobs of all thoughts would come at once",
            ),
        ] {
            if is_wrong {
                return Err(ApiError::unsupported(field, format!("{message}: leave one of them out")));
            }
        }
    }
    let thinks = app.text.dialect.thinks && shown && separate;
    let conversation = Conversation::take(&mut fields)?;
    // The template adds the special tokens, so the request may not ask for more.
    fields.refuse_unless("add_special_tokens", |value| value == &Value::Bool(false))?;
    fields.refuse_rest(|_| None)?;
    let turn = Turn::new(app, conversation, tools.as_ref(), &mut ask, most_text)?;
    let spoken = || if separate { turn.spoken() } else { turn.spoken().with_thoughts_in_text() };
    let held = || (!streamed).then(String::new);
    let answer = || Answer { begun: false, spoken: spoken(), held: held(), waiting: Vec::new() };
    let shape = Chat {
        id: format!("chatcmpl-{}", id.0),
        created: clock::unix_seconds(),
        model: app.model.clone(),
        logprobs,
        include_usage: ask.include_usage,
        usage_in_all: ask.usage_in_all,
        cache_details: ask.cache_details,
        thinks,
        // With OpenAI, too, an answer that calls a named tool ends with the reason of a text answer.
        named: tools.is_some_and(|tools| matches!(tools.choice, Choice::Named(_))),
        answers: (0..ask.n).map(|_| answer()).collect(),
        readers: turn.memory(ask.n as usize),
        waiting: 0,
    };
    Ok(Prepared { items: vec![Item { prompt: turn.prompt, ask }], shape })
}

struct Chat {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    include_usage: bool,
    usage_in_all: bool,
    cache_details: bool,
    /// Thoughts are part of the answer.
    thinks: bool,
    /// The request named the tool to call.
    named: bool,
    /// As many as the request wants.
    answers: Vec<Answer>,
    /// Bytes that the readers of answers keep of the request.
    readers: usize,
    /// Bytes of all tokens and thoughts that wait in answers.
    waiting: usize,
}

/// One of the answers to a request.
struct Answer {
    /// Whether the event with the role was sent.
    begun: bool,
    spoken: Spoken,
    /// Thoughts that wait until they are complete, if they are not streamed.
    held: Option<String>,
    /// Tokens whose log probabilities wait for an event.
    waiting: Vec<Shown>,
}

impl Answer {
    /// Bytes of thoughts that wait.
    fn held_bytes(&self) -> usize {
        self.held.as_ref().map_or(0, String::len)
    }

    /// Holds thoughts back until they are complete, if they are not streamed. Then they come first.
    fn hold(&mut self, said: Vec<Said>, last: bool) -> Vec<Said> {
        let Some(held) = &mut self.held else { return said };
        let (thoughts, others): (Vec<Said>, Vec<Said>) =
            said.into_iter().partition(|said| matches!(said, Said::Thoughts(_)));
        for said in thoughts {
            if let Said::Thoughts(more) = said {
                held.push_str(&more);
            }
        }
        if !last && self.spoken.is_thinking() {
            return others;
        }
        let complete = std::mem::take(held);
        let (mut pieces, mut rest) = (Vec::new(), complete.as_str());
        while !rest.is_empty() {
            let (piece, more) = rest.split_at(rest.floor_char_boundary(MOST_IN_EVENT));
            pieces.push(Said::Thoughts(piece.to_owned()));
            rest = more;
        }
        pieces.extend(others);
        pieces
    }
}

impl Chat {
    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn event(&self, choice: Value) -> Value {
        let mut event = self.object("chat.completion.chunk", json!([choice]));
        if self.include_usage {
            event["usage"] = Value::Null;
        }
        event
    }

    /// An event with a part of an answer, and the log probabilities of the tokens that it shows, if they are wanted.
    fn delta(&self, number: usize, delta: &Value, logprobs: Option<OfChat<'_>>) -> Event {
        let choice = json!({"index": number, "delta": delta, "logprobs": null, "finish_reason": null});
        let Some(logprobs) = logprobs else { return self.event(choice).into() };
        let mut event = map(self.event(Value::Null));
        if self.usage_in_all {
            // It comes later.
            event.remove("usage");
        }
        let choice = With { object: &map(choice), name: "logprobs", value: logprobs };
        Event::written(None, &With { object: &event, name: "choices", value: [choice] })
    }

    fn begin(&mut self, number: usize) -> Vec<Event> {
        let Some(answer) = self.answers.get_mut(number) else { return Vec::new() };
        if std::mem::replace(&mut answer.begun, true) {
            return Vec::new();
        }
        vec![self.delta(number, &json!({"role": "assistant", "content": ""}), None)]
    }

    /// One event for each delta; the first has the log probabilities of all tokens that wait.
    fn deltas(
        &mut self,
        number: usize,
        tokenizer: &dyn Tokenizer,
        mut said: Vec<Said>,
        last: bool,
    ) -> Vec<Event> {
        let Some(answer) = self.answers.get_mut(number) else { return Vec::new() };
        if self.thinks {
            let before = answer.held_bytes();
            said = answer.hold(said, last);
            self.waiting = self.waiting + answer.held_bytes() - before;
        }
        let is_shown = |said: &&Said| self.thinks || !matches!(said, Said::Thoughts(_));
        let mut deltas: Vec<Value> = said.iter().filter(is_shown).map(Said::delta).collect();
        if deltas.is_empty() && !answer.waiting.is_empty() && (last || answer.spoken.is_plain()) {
            deltas.push(json!({"content": ""}));
        }
        let shown = if deltas.is_empty() { Vec::new() } else { std::mem::take(&mut answer.waiting) };
        self.waiting -= shown.iter().map(|shown| shown.written(tokenizer)).sum::<usize>();
        let mut logprobs = self.logprobs.then_some(OfChat { tokenizer, shown: &shown });
        deltas.iter().map(|delta| self.delta(number, delta, logprobs.take())).collect()
    }

    fn reason(&self, number: usize, end: &End) -> &'static str {
        let calls = self.answers.get(number).is_some_and(|answer| answer.spoken.calls() > 0);
        if end.reason == "stop" && calls && !self.named { "tool_calls" } else { end.reason }
    }
}

impl Shape for Chat {
    fn on_delta(&mut self, number: usize, tokenizer: &dyn Tokenizer, delta: Delta) -> Vec<Event> {
        let mut events = self.begin(number);
        let Some(answer) = self.answers.get_mut(number) else { return events };
        self.waiting += delta.shown.iter().map(|shown| shown.written(tokenizer)).sum::<usize>();
        answer.waiting.extend(delta.shown);
        let said = answer.spoken.push(&delta.text);
        events.extend(self.deltas(number, tokenizer, said, false));
        events
    }

    fn end(&mut self, number: usize, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Event> {
        let mut events = self.begin(number);
        let Some(answer) = self.answers.get_mut(number) else { return events };
        let rest = answer.spoken.finish();
        events.extend(self.deltas(number, tokenizer, rest, true));
        let mut last = self.event(json!({
            "index": number,
            "delta": {},
            "logprobs": null,
            "finish_reason": self.reason(number, end),
            "stop_reason": stop_reason(end),
        }));
        if self.cache_details {
            last["sglext"] = end.cache_details();
        }
        events.push(last.into());
        events
    }

    fn memory(&self) -> usize {
        self.readers
    }

    fn keeps(&self) -> usize {
        self.waiting
    }

    fn close(&mut self, _tokenizer: &dyn Tokenizer, usage: &Usage) -> Vec<Event> {
        if !self.include_usage {
            return Vec::new();
        }
        let mut last = self.object("chat.completion.chunk", json!([]));
        last["usage"] = usage.json();
        vec![last.into()]
    }

    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Vec<(Vec<Delta>, End)>, usage: &Usage) -> String {
        let mut choices = Vec::new();
        for (number, (deltas, end)) in all.iter().enumerate() {
            let Some(answer) = self.answers.get_mut(number) else { break };
            let delta = joined(deltas);
            let message = answer.spoken.whole(&delta.text).message(self.thinks);
            let choice = json!({
                "index": number,
                "message": message,
                "logprobs": null,
                "finish_reason": self.reason(number, end),
                "stop_reason": stop_reason(end),
            });
            choices.push((map(choice), delta.shown));
        }
        let choices = choices.iter().map(|(object, shown)| {
            let logprobs = self.logprobs.then_some(OfChat { tokenizer, shown });
            With { object, name: "logprobs", value: logprobs }
        });
        let choices: Vec<_> = choices.collect();
        let mut answer = self.object("chat.completion", Value::Null);
        answer["usage"] = usage.json();
        if let Some((_, end)) = all.first().filter(|_| self.cache_details) {
            answer["sglext"] = end.cache_details();
        }
        written(&With { object: &map(answer), name: "choices", value: choices })
    }
}

/// The fields of an object.
fn map(object: Value) -> Map<String, Value> {
    match object {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

//! Sends the answers to a request, whole or as events, in the shape of its endpoint.

mod events;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use axum::extract::Request;
use axum::response::Response;
use futures_util::future::try_join_all;
use host_wire::shares::Client;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;

use super::answer::{Answer, Delta, End, Next};
use super::apart::write_apart;
use super::ask::{self, Ask, MOST_ANSWERS, MOST_PROMPT_TOKENS};
use super::error::ApiError;
use super::outflow::outflow;
use super::record::{Record, Usage};
use super::unread::Collected;
use super::{App, RequestId, structured};
use crate::identity::Caller;
use crate::router::{Job, Pages};
use crate::text::Tokenizer;

/// Writes answers in the form of an endpoint. Answers are numbered from 0, beginning with those to the first prompt.
pub(super) trait Shape: Send + 'static {
    /// Whether events are named by their `type` and the last of them ends the stream. Otherwise they have no names, and `[DONE]`
    /// ends the stream.
    const NAMED: bool = false;
    /// Whether each event of an answer repeats all events of the answer before it.
    const REPEATS: bool = false;

    /// Events for one delta of an answer; none if it shows nothing.
    fn on_delta(&mut self, number: usize, tokenizer: &dyn Tokenizer, delta: Delta) -> Vec<Event>;

    /// The last events of one answer.
    fn end(&mut self, number: usize, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Event>;

    /// The events behind those of all answers.
    fn close(&mut self, _tokenizer: &dyn Tokenizer, _usage: &Usage) -> Vec<Event> {
        Vec::new()
    }

    /// The last events of a stream that fails.
    fn failed(&mut self, _tokenizer: &dyn Tokenizer, error: &ApiError) -> Vec<Event> {
        vec![Event::Value(error.json())]
    }

    /// Bytes of the request's own fields that are kept until its answers end.
    fn memory(&self) -> usize {
        0
    }

    /// Bytes of a stream's deltas that are kept for later events.
    fn keeps(&self) -> usize {
        0
    }

    /// Bytes of a whole answer beyond those of its deltas.
    fn beside_pieces(&self) -> usize {
        0
    }

    /// All answers at once, each with its deltas, as JSON.
    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Vec<(Vec<Delta>, End)>, usage: &Usage) -> String;
}

/// An event of a stream.
pub(super) enum Event {
    /// A small one, to which fields may be added.
    Value(Value),
    /// One that was written from parts, because as a value it would take many times the memory.
    Written {
        /// Its `type`, if events have one.
        kind: Option<&'static str>,
        /// JSON.
        json: String,
    },
}

impl Event {
    /// An event that is written now.
    pub fn written(kind: Option<&'static str>, event: &impl Serialize) -> Self {
        Self::Written { kind, json: written(event) }
    }

    /// Sets its field `usage`. One that is written must not have it yet.
    fn add_usage(&mut self, usage: Value) {
        match self {
            Self::Value(event) => event["usage"] = usage,
            Self::Written { json, .. } => {
                // It is an object with fields.
                json.pop();
                *json += &format!(",\"usage\":{usage}}}");
            }
        }
    }
}

impl From<Value> for Event {
    fn from(event: Value) -> Self {
        Self::Value(event)
    }
}

/// JSON. Answers have texts, numbers and lists alone, so writing them cannot fail.
pub(super) fn written(answer: &impl Serialize) -> String {
    serde_json::to_string(answer).unwrap_or_default()
}

/// Bytes of a token of a prompt with its log probability, and of each likeliest token beside it, while they are collected.
const SCORED: usize = 64;
const LIKELIEST: usize = 16;
/// A prompt, and the settings of its answers.
pub(super) struct Item {
    pub prompt: Vec<u32>,
    pub ask: Ask,
}

/// A request whose body was read and checked.
pub(super) struct Prepared<S> {
    /// At least one.
    pub items: Vec<Item>,
    pub shape: S,
}

impl<S> Prepared<S> {
    /// The grammars of each prompt.
    fn named(&self) -> impl Iterator<Item = &Arc<Vec<structured::Named>>> {
        self.items.iter().map(|item| &item.ask.named)
    }

    /// Whether the request's grammars compile, for fuzzing. Blocks, so it must not run on a thread of a runtime.
    pub fn compiles(&self, app: &App) -> bool {
        let client = Client::at(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let compiling = structured::ask(app, &client, self.named());
        runtime
            .is_ok_and(|runtime| compiling.is_ok_and(|compiling| runtime.block_on(compiling.done()).is_ok()))
    }
}

/// Serves a request: reads the body, calls `prepare` with it and with the longest text that a template may make in its turn, and
/// answers. Counts the outcome however the request ends.
pub(super) async fn serve<S: Shape>(
    app: &Arc<App>,
    endpoint: &'static str,
    id: RequestId,
    request: Request,
    prepare: impl Fn(&App, &RequestId, &[u8], usize) -> Result<Prepared<S>, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let mut record = Record::new(Arc::clone(&app.metrics), endpoint, app.log_requests);
    let session = ask::session(request.headers());
    let Some(caller) = request.extensions().get::<Caller>().cloned() else {
        return Err(ApiError::internal("a request without a caller".to_owned()));
    };
    let arrived = record.arrived();
    let timeout = ask::timeout(request.headers());
    let given = timeout.as_ref().ok().copied().flatten();
    let started = ask::in_time(app, arrived, given, async {
        let timeout = timeout?;
        // The body is read before the request takes a place, so that a client that sends slowly does not keep other requests out.
        let (body, sent) = app.body(&caller.client, request).await?;
        let place = app.router.admit(&caller)?;
        let text = app.text_work.take(&caller.client, body.len())?;
        drop(sent);
        let (of_work, id, client) = (Arc::clone(app), id.clone(), caller.client.clone());
        let work = move |most_text: usize| {
            let prepared = prepare(&of_work, &id, &body, most_text)?;
            let compiling = structured::ask(&of_work, &client, prepared.named())?;
            Ok((prepared, compiling))
        };
        let ((mut prepared, compiling), text) = app.text_work.run(text, work).await?;
        let answers = prepared.items.iter().map(|item| item.ask.candidates()).sum::<usize>();
        if answers > MOST_ANSWERS {
            let message = format!(
                "the request asks for {answers} answers, and {MOST_ANSWERS} is the limit; send several requests"
            );
            return Err(ApiError::invalid(message));
        }
        let tokens =
            prepared.items.iter().map(|item| item.prompt.len() * item.ask.candidates()).sum::<usize>();
        if tokens > MOST_PROMPT_TOKENS {
            let message = format!(
                "the request's answers have {tokens} tokens of prompts, counted once for each answer, and {MOST_PROMPT_TOKENS} is \
                 the limit; send several requests"
            );
            return Err(ApiError::invalid(message));
        }
        // Each answer has the settings of its prompt, and keeps them until it ends. The answers to a prompt share its tokens.
        let mut settings = prepared.shape.memory();
        for Item { prompt, ask } in &prepared.items {
            settings += ask.check_for(ask.candidates())? + size_of_val(&prompt[..]);
            settings += ask.scores.map_or(0, |top| prompt.len() * (SCORED + LIKELIEST * top as usize));
        }
        // Grammars compile without a permit for work on text, because other requests need the permits. Meanwhile the body's bytes
        // count, and what the prompts and settings have beyond that.
        let more = app.text_work.keep(&caller.client, settings.saturating_sub(text.amount()))?;
        compiling.done().await?;
        drop((text, more));
        for item in &mut prepared.items {
            // They have compiled.
            item.ask.named = Arc::default();
        }
        let settings = app.text_work.keep(&caller.client, settings)?;
        // Each answer takes a place.
        let mut places = vec![place];
        for _ in 1..answers {
            places.push(app.router.admit(&caller)?);
        }
        Ok::<_, ApiError>((places, prepared, timeout, settings))
    });
    let (mut places, prepared, timeout, settings) = match started.await {
        Ok(started) => started,
        Err(error) => {
            record.failed(&error);
            return Err(error);
        }
    };
    let Prepared { items, shape } = prepared;
    let many = places.len() > 1;
    let mut answers: Vec<Answer> = Vec::with_capacity(places.len());
    let mut lanes = Vec::with_capacity(places.len());
    let first = items.first().map(|item| item.ask.clone());
    for (index, Item { prompt, mut ask }) in items.into_iter().enumerate() {
        ask.namespace.salt = caller.salt(ask.namespace.salt);
        // Answers to one prompt stay together: they share its pages.
        // So do a prompt's log probabilities and the answer.
        let stays = many || ask.scores.is_some();
        let own = || stays.then(|| ask::session_hash(&format!("{} {index}", id.0))).flatten();
        let session = ask.session.or(session).or_else(own).map(|session| caller.session(session));
        ask.timeout = ask.timeout.or(timeout);
        ask.priority = caller.priority(ask.priority);
        let leader = answers.len();
        let (prompt, pages) = (Arc::new(prompt), Pages::default());
        for candidate in 0..ask.candidates() {
            let Some(place) = places.pop() else { break };
            let mut ask = ask.candidate(candidate);
            let is_scored = ask.scores.is_some();
            if candidate > 0 {
                // The first candidate brings the log probabilities of the prompt for all.
                ask.scores = None;
            }
            let number = answers.len();
            let request_id = if number == 0 { id.0.clone() } else { format!("{}-{number}", id.0) };
            let job =
                Job { session, ..ask.job(request_id, Arc::clone(&prompt), pages.clone(), record.arrived()) };
            let generation = app.router.generate(place, job);
            let tokenizer = Arc::clone(&app.text.tokenizer);
            let metrics = Arc::clone(&app.metrics);
            let no_cache = ask.no_cache;
            let mut answer = Answer::new(generation, tokenizer, ask, &prompt, record.arrived(), metrics);
            if candidate > 0 && (is_scored || !no_cache) {
                answer = answer.after(&answers[leader]);
            }
            answers.push(answer);
            lanes.push(candidate == 0);
        }
    }
    let Some(ask) = first else { return Err(ApiError::invalid("there is no prompt")) };
    let tokenizer = Arc::clone(&app.text.tokenizer);
    match ask.stream {
        true => {
            let kept = app.unread.collect(&caller.client);
            let streamed = events::Streamed {
                answers,
                leads: lanes,
                shape,
                record,
                tokenizer,
                ask,
                kept,
                _settings: settings,
            };
            let ends = outflow(app.stall, app.unread.clone(), caller.client.clone());
            events::as_events(streamed, ends, app.router.waits(), app.stream_keep_alive).await
        }
        false => {
            let collected = app.unread.collect(&caller.client);
            let answer = at_once(answers, &lanes, shape, record, &*tokenizer, &ask, collected).await;
            drop(settings);
            answer
        }
    }
}

/// All deltas of one answer. They count as part of it until it is written.
async fn collect(
    answer: &mut Answer,
    tokenizer: &dyn Tokenizer,
    collected: &Mutex<Collected>,
) -> Result<(Vec<Delta>, End), ApiError> {
    let mut all = Vec::new();
    // Bytes of deltas of a try that failed. They are counted already, and the same deltas come again.
    let mut counted = 0;
    loop {
        match answer.next().await? {
            Next::Delta(delta) => {
                let bytes = write_apart(delta.kept(), || delta.memory(tokenizer));
                let known = counted.min(bytes);
                counted -= known;
                collected.lock().grow(bytes - known)?;
                all.push(delta);
            }
            Next::Restarted => {
                counted += all.iter().map(|delta| delta.memory(tokenizer)).sum::<usize>();
                all.clear();
            }
            Next::End(end) => return Ok((all, *end)),
        }
    }
}

async fn at_once(
    mut answers: Vec<Answer>,
    leads: &[bool],
    mut shape: impl Shape,
    mut record: Record,
    tokenizer: &dyn Tokenizer,
    ask: &Ask,
    collected: Collected,
) -> Result<Response, ApiError> {
    let collected = Mutex::new(collected);
    if let Err(error) = collected.lock().grow(shape.beside_pieces()) {
        record.failed(&error);
        return Err(error);
    }
    let all = answers.iter_mut().map(|answer| collect(answer, tokenizer, &collected));
    let all = match try_join_all(all).await {
        Ok(all) => all,
        Err(error) => {
            record.failed(&error);
            return Err(error);
        }
    };
    let mut usage = Usage::default();
    for ((_, end), leads) in all.iter().zip(leads) {
        record.answered(end, *leads);
        usage.add(end, *leads);
    }
    record.ok();
    let bytes = collected.lock().bytes();
    Ok(super::json_text(write_apart(bytes, || shape.whole(tokenizer, best(all, ask), &usage))))
}

/// Chooses for each prompt the answers with the highest log probability per token: as many as were requested, best first.
fn best(all: Vec<(Vec<Delta>, End)>, ask: &Ask) -> Vec<(Vec<Delta>, End)> {
    let candidates = ask.candidates();
    if candidates == ask.n as usize {
        return all;
    }
    let mut chosen = Vec::new();
    let mut all = all.into_iter().peekable();
    while all.peek().is_some() {
        let mut of_prompt: Vec<_> = all.by_ref().take(candidates).collect();
        of_prompt.sort_by(|(_, a), (_, b)| b.mean_logprob().total_cmp(&a.mean_logprob()));
        of_prompt.truncate(ask.n as usize);
        chosen.extend(of_prompt);
    }
    chosen
}

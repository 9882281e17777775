//! Sends answers as events, in the order in which their parts come.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::future::try_join_all;
use futures_util::stream::{self, SelectAll, Stream, StreamExt};
use host_wire::clock;
use host_wire::shares::Share;
use serde_json::Value;
use tokio::sync::mpsc;
use tracing::{Instrument, Span};

use super::super::answer::{Answer, Next};
use super::super::ask::Ask;
use super::super::error::ApiError;
use super::super::outflow::{NoOutflow, Outflow};
use super::super::record::{Record, Usage};
use super::super::unread::Collected;
use super::{Event, Shape};
use crate::router::Waits;
use crate::text::Tokenizer;

/// A request whose answers are sent as events.
pub(super) struct Streamed<S> {
    pub answers: Vec<Answer>,
    /// For each answer, whether it is the first to its prompt.
    pub leads: Vec<bool>,
    pub shape: S,
    pub record: Record,
    pub tokenizer: Arc<dyn Tokenizer>,
    /// The settings of the answers to the first prompt.
    pub ask: Ask,
    /// What of the answers is kept until they end, in the client's share.
    pub kept: Collected,
    /// The client's share for the settings of all answers.
    pub _settings: Share,
}

/// The state of a stream whose head was not sent yet.
enum Beginning {
    /// Workers were called.
    Admitted,
    /// There is something to send.
    First,
    /// The stream has failed, and nothing will be sent.
    Failed(Box<ApiError>),
}

/// Bytes that each stream may keep without a part of the client's share.
const UNCOUNTED: usize = 16 << 10;
/// Events are sent together until they have this many bytes.
const TOGETHER: usize = 64 << 10;

type Nexts = Pin<Box<dyn Stream<Item = (usize, Result<Next, ApiError>)> + Send>>;

/// A stream of events under way.
struct Events<S> {
    nexts: SelectAll<Nexts>,
    leads: Vec<bool>,
    shape: S,
    record: Record,
    tokenizer: Arc<dyn Tokenizer>,
    ask: Ask,
    kept: Collected,
    _settings: Share,
    usage: Usage,
    ready: VecDeque<Bytes>,
    /// Events of answers that may not appear yet. Clients count answers in the order in which they appear.
    held: Vec<Vec<Bytes>>,
    /// Bytes of these events.
    held_bytes: usize,
    /// Answers that have appeared.
    appeared: usize,
    /// Number of answers that have not ended.
    open: usize,
    done: bool,
}

/// Sends the head when there is something to send, or [`Waits::head`] after workers were called. A task of its own sends the
/// events. It ends with the answers, whether they are read or not. A client that waits gets a comment every `keep_alive`, if that
/// is set.
pub(super) async fn as_events<S: Shape>(
    streamed: Streamed<S>,
    (outflow, body): (Outflow, Body),
    waits: Waits,
    keep_alive: Option<Duration>,
) -> Result<Response, ApiError> {
    let (told, mut beginning) = mpsc::channel(2);
    tokio::spawn(flow(streamed, outflow, told, keep_alive).instrument(Span::current()));
    let head = async {
        match beginning.recv().await {
            Some(Beginning::Admitted) => {
                clock::timeout(waits.head, beginning.recv()).await.unwrap_or(Some(Beginning::Admitted))
            }
            known => known,
        }
    };
    let known = head.await;
    // A failure from here on is reported in the body. A failure since the timeout is still in the channel and is read below.
    beginning.close();
    match (known, beginning.try_recv()) {
        (Some(Beginning::Failed(error)), _) | (_, Ok(Beginning::Failed(error))) => return Err(*error),
        (Some(Beginning::Admitted | Beginning::First), _) => {}
        (None, _) => return Err(ApiError::internal("the answer ended before it began".to_owned())),
    }
    let mut response = super::super::typed("text/event-stream", body);
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

/// Sends all answers. When the client hangs up or stops reading, the answers are dropped, which cancels their requests on every
/// worker.
async fn flow<S: Shape>(
    mut streamed: Streamed<S>,
    outflow: Outflow,
    told: mpsc::Sender<Beginning>,
    keep_alive: Option<Duration>,
) {
    let admitted = tokio::select! {
        admitted = try_join_all(streamed.answers.iter_mut().map(Answer::admitted)) => admitted,
        () = outflow.gone() => return,
    };
    if let Err(failure) = admitted {
        let error = ApiError::from(failure);
        streamed.record.failed(&error);
        // A send error is ignored: the client has hung up and does not need the failure.
        drop(told.send(Beginning::Failed(Box::new(error))).await);
        return;
    }
    // The channel may be full or closed: the head does not depend on this message.
    drop(told.try_send(Beginning::Admitted));
    let mut events = Events::new(streamed);
    let mut told = Some(told);
    loop {
        let failed = {
            let mut fill = pin!(events.fill());
            loop {
                let comment_due = async {
                    match keep_alive {
                        Some(every) => clock::sleep(every).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    failed = &mut fill => break failed,
                    () = outflow.gone() => return,
                    () = comment_due => {
                        if outflow.send(Bytes::from_static(b": waiting\n\n")).await.is_err() {
                            return;
                        }
                    }
                }
            }
        };
        if let Some(error) = failed {
            events.record.failed(&error);
            let status = match told.take() {
                None => Err(error),
                Some(told) => {
                    told.send(Beginning::Failed(Box::new(error))).await.map_err(|unsent| match unsent.0 {
                        Beginning::Failed(error) => *error,
                        Beginning::Admitted | Beginning::First => {
                            ApiError::internal("the head was lost".to_owned())
                        }
                    })
                }
            };
            match status {
                Ok(()) => return,
                // The stream does not get its usual end, because the answer is not complete.
                Err(error) => {
                    // The end needs room, too. Events that wait are what there was no room for.
                    events.ready.clear();
                    let _room = events.kept.keep(0).is_ok();
                    let last = events.shape.failed(&*events.tokenizer, &error);
                    events.ready.extend(last.into_iter().map(bytes_of::<S>));
                }
            }
            events.done = true;
        }
        if events.ready.is_empty() {
            return;
        }
        if let Some(told) = told.take() {
            // A send error is ignored: the channel is closed after the head was sent.
            drop(told.try_send(Beginning::First));
        }
        while let Some(together) = events.together() {
            match outflow.send(together).await {
                // Fewer bytes wait, so this cannot fail.
                Ok(()) => drop(events.count()),
                Err(NoOutflow::Gone) => return,
                Err(NoOutflow::OverShare) => {
                    tracing::warn!("the client has its share of unread answers; the request is cancelled");
                    return;
                }
                Err(NoOutflow::Stalled) => {
                    tracing::warn!("the client does not read its answer; the request is cancelled");
                    return;
                }
            }
        }
        if events.done {
            return;
        }
    }
}

impl<S: Shape> Events<S> {
    fn new(streamed: Streamed<S>) -> Self {
        let Streamed { answers, leads, shape, record, tokenizer, ask, kept, _settings } = streamed;
        let open = answers.len();
        let usage = Usage { prompt_tokens: prompt_tokens(&answers, &leads), ..Usage::default() };
        let nexts = answers.into_iter().enumerate().map(|(number, answer)| {
            let steps = stream::unfold(Some(answer), move |answer| async move {
                let mut answer = answer?;
                let next = answer.next().await.map_err(ApiError::from);
                let goes_on = matches!(next, Ok(Next::Delta(_) | Next::Restarted));
                Some(((number, next), goes_on.then_some(answer)))
            });
            steps.boxed()
        });
        let nexts = nexts.collect();
        let held = (0..open).map(|_| Vec::new()).collect();
        Self {
            nexts,
            leads,
            shape,
            record,
            tokenizer,
            ask,
            kept,
            _settings,
            usage,
            ready: VecDeque::new(),
            held,
            held_bytes: 0,
            appeared: 0,
            open,
            done: false,
        }
    }

    /// Waits for something to send. Returns the error that ends the stream.
    async fn fill(&mut self) -> Option<ApiError> {
        while self.ready.is_empty() && !self.done {
            let Some((number, next)) = self.nexts.next().await else {
                return Some(ApiError::internal("an answer has no end".to_owned()));
            };
            if let Err(error) = self.take(number, next) {
                return Some(error);
            }
        }
        None
    }

    fn take(&mut self, number: usize, next: Result<Next, ApiError>) -> Result<(), ApiError> {
        match next? {
            Next::Delta(delta) => {
                self.usage.output_tokens += delta.tokens.len() as u64;
                let events = self.shape.on_delta(number, &*self.tokenizer, delta);
                self.send(number, events);
                self.count()?;
            }
            Next::Restarted => return Err(ApiError::internal("a streamed answer began again".to_owned())),
            Next::End(end) => {
                let leads = self.leads.get(number).copied().unwrap_or(false);
                self.record.answered(&end, leads);
                self.usage.cached_tokens += if leads { u64::from(end.cached_tokens()) } else { 0 };
                let events = self.shape.end(number, &*self.tokenizer, &end);
                self.send(number, events);
                self.count()?;
                self.open -= 1;
                if self.open == 0 {
                    self.close();
                    self.count()?;
                    self.record.ok();
                }
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        self.done = true;
        // An answer that showed nothing before its end kept the events of later answers waiting. All have ended, so these events
        // are sent now.
        for held in std::mem::take(&mut self.held) {
            self.ready.extend(held);
        }
        let last = self.shape.close(&*self.tokenizer, &self.usage);
        self.ready.extend(last.into_iter().map(bytes_of::<S>));
        if !S::NAMED {
            self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        }
    }

    /// Sends events of an answer, or keeps them until those before it have appeared.
    fn send(&mut self, number: usize, mut events: Vec<Event>) {
        if self.ask.usage_in_all {
            events.iter_mut().for_each(|event| event.add_usage(self.usage.json()));
        }
        let events = events.into_iter().map(bytes_of::<S>);
        if number < self.appeared {
            self.ready.extend(events);
            return;
        }
        for event in events {
            if S::REPEATS {
                self.held_bytes -= self.held[number].drain(..).map(|event| event.len()).sum::<usize>();
            }
            self.held_bytes += event.len();
            self.held[number].push(event);
        }
        while let Some(held) = self.held.get_mut(self.appeared).filter(|held| !held.is_empty()) {
            self.held_bytes -= held.iter().map(Bytes::len).sum::<usize>();
            self.ready.extend(held.drain(..));
            self.appeared += 1;
        }
    }

    /// The next events that are sent together.
    fn together(&mut self) -> Option<Bytes> {
        let first = self.ready.pop_front()?;
        let mut bytes = first.len();
        let mut events = vec![first];
        while let Some(next) = self.ready.pop_front_if(|next| bytes + next.len() <= TOGETHER) {
            bytes += next.len();
            events.push(next);
        }
        Some(match &events[..] {
            [only] => only.clone(),
            several => Bytes::from(several.concat()),
        })
    }

    /// Counts what is kept in the client's share.
    ///
    /// # Errors
    /// When the share has no room for it.
    fn count(&mut self) -> Result<(), ApiError> {
        let ready: usize = self.ready.iter().map(Bytes::len).sum();
        self.kept.keep((ready + self.held_bytes + self.shape.keeps()).saturating_sub(UNCOUNTED))
    }
}

fn prompt_tokens(answers: &[Answer], leads: &[bool]) -> u64 {
    answers
        .iter()
        .zip(leads)
        .filter(|(_, leads)| **leads)
        .map(|(answer, _)| u64::from(answer.prompt_tokens()))
        .sum()
}

/// An event as a stream has it.
fn bytes_of<S: Shape>(event: Event) -> Bytes {
    let framed = |kind: Option<&str>, json: &str| match kind.filter(|_| S::NAMED) {
        Some(name) => Bytes::from(format!("event: {name}\ndata: {json}\n\n")),
        None => Bytes::from(format!("data: {json}\n\n")),
    };
    match &event {
        Event::Value(value) => framed(value.get("type").and_then(Value::as_str), &value.to_string()),
        Event::Written { kind, json } => framed(*kind, json),
    }
}

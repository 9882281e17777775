//! Sends an answer, whole or as events, in the shape of its endpoint.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use host_wire::clock;
use serde_json::Value;
use tracing::{Instrument, Span};

use super::answer::{Answer, Count, End, Next, Piece};
use super::ask::{self, Ask};
use super::error::ApiError;
use super::outflow::{NoOutflow, Outflow, outflow};
use super::{App, RequestId};
use crate::identity::Caller;
use crate::router::Job;
use crate::text::Tokenizer;

/// How an endpoint writes answers.
pub(super) trait Shape: Send + 'static {
    /// Events for one piece; none if it shows nothing.
    fn piece(&mut self, tokenizer: &dyn Tokenizer, piece: Piece) -> Vec<Value>;

    /// The last events.
    fn end(&mut self, tokenizer: &dyn Tokenizer, end: &End) -> Vec<Value>;

    /// The whole answer at once.
    fn whole(&mut self, tokenizer: &dyn Tokenizer, all: Piece, end: &End) -> Value;
}

/// A request that was read and admitted.
pub(super) struct Prepared<S> {
    pub prompt: Vec<u32>,
    pub ask: Ask,
    pub shape: S,
}

/// Reads the body, runs a handler's reading part on it, and answers; counts the outcome whichever way it ends.
pub(super) async fn serve<S: Shape>(
    app: &Arc<App>,
    endpoint: &'static str,
    id: RequestId,
    request: Request,
    prepare: impl FnOnce(&App, &RequestId, &[u8]) -> Result<Prepared<S>, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let arrived = clock::now();
    let mut count = Count::new(Arc::clone(&app.metrics), endpoint);
    let session = ask::session(request.headers());
    let Some(caller) = request.extensions().get::<Caller>().cloned() else {
        return Err(ApiError::internal("a request without a caller".to_owned()));
    };
    let started = async {
        // Before it takes its place: a client that sends slowly keeps no other request out.
        let (body, sent) = app.body(&caller.client, request).await?;
        let place = app.router.admit(&caller)?;
        let text = app.text_work.take(&caller.client, body.len())?;
        drop(sent);
        let (of_work, id) = (Arc::clone(app), id.clone());
        let prepared = app.text_work.run(text, move || prepare(&of_work, &id, &body));
        Ok::<_, ApiError>((place, prepared.await?))
    };
    let (place, Prepared { prompt, mut ask, shape }) = match started.await {
        Ok(started) => started,
        Err(error) => {
            count.set(error.outcome());
            return Err(error);
        }
    };
    ask.namespace.salt = caller.salt(ask.namespace.salt);
    let session = ask.session.or(session).map(|session| caller.session(session));
    let job = Job { session, ..ask.job(id.0, prompt) };
    let prompt_tokens = job.prompt.len();
    let generation = app.router.generate(place, job);
    let streamed = ask.stream;
    let tokenizer = Arc::clone(&app.text.tokenizer);
    let answer = Answer::new(generation, tokenizer, ask, prompt_tokens, arrived, count);
    if streamed { as_events(answer, shape, app.stall).await } else { at_once(answer, shape).await }
}

async fn at_once(mut answer: Answer, mut shape: impl Shape) -> Result<Response, ApiError> {
    let mut all = Piece::default();
    loop {
        match answer.next().await {
            Ok(Next::Piece(piece)) => {
                all.text.push_str(&piece.text);
                all.shown.extend(piece.shown);
                all.tokens.extend(piece.tokens);
            }
            Ok(Next::Restarted) => all = Piece::default(),
            Ok(Next::End(end)) => return Ok(super::json(&shape.whole(answer.tokenizer(), all, &end))),
            Err(failure) => return Err(failed(&mut answer, failure.into())),
        }
    }
}

fn failed(answer: &mut Answer, error: ApiError) -> ApiError {
    answer.set_outcome(error.outcome());
    tracing::warn!(error = %error.json(), "request failed");
    error
}

/// A stream of events under way.
struct Events<S> {
    answer: Answer,
    shape: S,
    ready: VecDeque<Bytes>,
    done: bool,
}

impl<S: Shape> Events<S> {
    /// Waits for something to send. False at the end.
    async fn fill(&mut self) -> bool {
        while self.ready.is_empty() && !self.done {
            let next = self.answer.next().await;
            self.take(next.map_err(ApiError::from));
        }
        !self.ready.is_empty()
    }

    /// Sends all of the answer. When the client hangs up or reads nothing any more, the answer is dropped, and with it the
    /// request on every worker.
    async fn flow(mut self, outflow: Outflow) {
        loop {
            let more = tokio::select! {
                more = self.fill() => more,
                () = outflow.gone() => false,
            };
            if !more {
                return;
            }
            let ready: Vec<u8> = self.ready.drain(..).flatten().collect();
            match outflow.send(Bytes::from(ready)).await {
                Ok(()) => {}
                Err(NoOutflow::Gone) => return,
                Err(NoOutflow::Stalled) => {
                    tracing::warn!("the client does not read its answer; the request is cancelled");
                    return;
                }
            }
        }
    }

    fn take(&mut self, next: Result<Next, ApiError>) {
        let tokenizer = self.answer.tokenizer();
        let events = match next {
            Ok(Next::Piece(piece)) => self.shape.piece(tokenizer, piece),
            Ok(Next::End(end)) => {
                self.done = true;
                let events = self.shape.end(tokenizer, &end);
                self.ready.extend(events.iter().map(event));
                self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
                return;
            }
            Ok(Next::Restarted) => {
                let error = ApiError::internal("a streamed answer began again".into());
                return self.take(Err(error));
            }
            Err(error) => {
                // Without [DONE]: the answer is not complete.
                self.done = true;
                vec![failed(&mut self.answer, error).json()]
            }
        };
        self.ready.extend(events.iter().map(event));
    }
}

fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

/// Waits for the first token before it sends the head, so that what fails before is a proper status. The rest of the answer
/// has a task of its own, which ends with the answer, read or not.
async fn as_events<S: Shape>(mut answer: Answer, shape: S, stall: Duration) -> Result<Response, ApiError> {
    let first = match answer.next().await {
        Ok(first) => first,
        Err(failure) => return Err(failed(&mut answer, failure.into())),
    };
    let mut events = Events { answer, shape, ready: VecDeque::new(), done: false };
    events.take(Ok(first));
    let (outflow, body) = outflow(stall);
    tokio::spawn(events.flow(outflow).instrument(Span::current()));
    let mut response = super::typed("text/event-stream", body);
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

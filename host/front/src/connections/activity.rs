//! Whether a connection is used, or its client keeps it for nothing.
//!
//! A connection is *quiet* while no request on it waits for this server and its client takes nothing of the answers: it has asked
//! for nothing, or it does not read. HTTP/2 lets a client do that for ever with an open connection, so the frames that keep
//! a connection alive do not count.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use host_wire::clock::{self, Instant};
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;

/// Answers are handed to HTTP in pieces of this size, so that a client that reads a long one is seen to read.
const PIECE: usize = 16 << 10;

/// What happens on one connection.
#[derive(Debug)]
pub(super) struct Activity(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Requests that wait for this server.
    waiting: usize,
    /// When something was asked, answered or taken.
    last: Instant,
}

impl Activity {
    /// Of a connection that was accepted now.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { waiting: 0, last: clock::now() })))
    }

    /// How long the connection has been quiet, which is zero while a request waits for this server.
    pub(super) fn quiet(&self) -> Duration {
        let state = self.0.lock();
        if state.waiting > 0 { Duration::ZERO } else { clock::now() - state.last }
    }

    /// A request begins to wait for this server.
    pub(super) fn waits(self: &Arc<Self>) -> Waits {
        self.0.lock().waiting += 1;
        Waits(Arc::clone(self))
    }

    fn progress(&self) {
        self.0.lock().last = clock::now();
    }
}

/// A request that waits for this server, until dropped.
#[derive(Debug)]
pub(super) struct Waits(Arc<Activity>);

impl Drop for Waits {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.waiting -= 1;
        state.last = clock::now();
    }
}

/// The body of an answer, as its connection takes it. HTTP asks for the next piece when there is room for it at the client: a
/// request whose next piece was asked for and is not there waits for this server.
pub(super) struct Watched {
    body: Body,
    rest: Bytes,
    activity: Arc<Activity>,
    waits: Option<Waits>,
}

impl Watched {
    pub(super) fn new(body: Body, activity: Arc<Activity>) -> Self {
        Self { body, rest: Bytes::new(), activity, waits: None }
    }
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            let frame = Pin::new(&mut self.body).poll_frame(context);
            if frame.is_pending() && self.waits.is_none() {
                self.waits = Some(self.activity.waits());
            }
            let frame = ready!(frame);
            self.waits = None;
            match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.rest = data,
                Some(Ok(Err(other))) => return Poll::Ready(Some(Ok(other))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        self.activity.progress();
        let piece = self.rest.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, body) = (self.rest.len() as u64, self.body.size_hint());
        match body.exact() {
            Some(exact) => SizeHint::with_exact(exact + rest),
            None => {
                let mut hint = SizeHint::new();
                hint.set_lower(body.lower() + rest);
                hint
            }
        }
    }
}

//! Tells whether a connection, or one of its streams, is used or idle.
//!
//! A connection is *quiet* while no request on it waits for this server and its client takes nothing of the answers: the client
//! has sent no request, or does not read. In HTTP/2 a client can keep such a connection open for ever, so the frames that keep a
//! connection alive do not count.
//!
//! An HTTP/2 connection has many streams. One stream that is read, or waits, says nothing about the others, so each has a
//! deadline of its own: a stream that is quiet for too long is reset, and its resources are freed. HTTP/1 has one answer at a
//! time, whose deadline is that of the connection.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use host_wire::clock::{self, Instant};
use host_wire::shares::Share;
use hyper::body::{Frame, SizeHint};
use hyper::rt::Executor;
use parking_lot::Mutex;

/// Size of the pieces in which answers are handed to HTTP. Small pieces show that a client reads a long answer.
const PIECE: usize = 16 << 10;

tokio::task_local! {
    /// The activity of the stream that the current task serves.
    static STREAM: Arc<Activity>;
}

/// The activity of one connection, or of one stream of it.
#[derive(Debug)]
pub(super) struct Activity {
    state: Mutex<State>,
    /// For a stream, its connection: what happens on the stream is also noted there.
    connection: Option<Arc<Activity>>,
}

#[derive(Debug)]
struct State {
    /// Requests that wait for this server.
    waiting: usize,
    /// Pieces of answers that HTTP has taken and not yet sent.
    unsent: usize,
    /// Is woken when no piece is unsent.
    sent: Option<Waker>,
    /// Time of the last event: a request, an answer, or a piece that was taken or sent.
    last: Instant,
}

impl Activity {
    /// The activity of a connection that was accepted now.
    pub(super) fn new() -> Arc<Self> {
        Self::of(None)
    }

    fn of(connection: Option<Arc<Self>>) -> Arc<Self> {
        let state = State { waiting: 0, unsent: 0, sent: None, last: clock::now() };
        Arc::new(Self { state: Mutex::new(state), connection })
    }

    /// The activity of the stream that the current task serves, or of the connection where the task serves no stream (HTTP/1).
    pub(super) fn current(connection: &Arc<Self>) -> Arc<Self> {
        STREAM.try_with(Arc::clone).unwrap_or_else(|_http1| Arc::clone(connection))
    }

    /// How long the connection or stream has been quiet: zero while a request waits for this server.
    pub(super) fn quiet(&self) -> Duration {
        let state = self.state.lock();
        if state.waiting > 0 { Duration::ZERO } else { clock::now() - state.last }
    }

    /// Resolves when the connection or stream has been quiet for this long.
    pub(super) async fn is_quiet_for(&self, long: Duration) {
        loop {
            let left = long.saturating_sub(self.quiet());
            if left.is_zero() {
                return;
            }
            clock::sleep(left).await;
        }
    }

    /// Counts a request that begins to wait for this server, until the result is dropped.
    pub(super) fn waits(self: &Arc<Self>) -> Waits {
        self.note(&|state| state.waiting += 1);
        Waits(Arc::clone(self))
    }

    /// Changes the state of this stream and of its connection.
    fn note(&self, change: &dyn Fn(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        state.last = clock::now();
        let sent = if state.unsent == 0 { state.sent.take() } else { None };
        drop(state);
        if let Some(sent) = sent {
            sent.wake();
        }
        if let Some(connection) = &self.connection {
            connection.note(change);
        }
    }

    /// Ready when all pieces are sent.
    fn poll_sent(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.unsent == 0 {
            return Poll::Ready(());
        }
        state.sent = Some(context.waker().clone());
        Poll::Pending
    }
}

/// A request that waits for this server, until dropped.
#[derive(Debug)]
pub(super) struct Waits(Arc<Activity>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.note(&|state| state.waiting -= 1);
    }
}

/// Runs the streams of an HTTP/2 connection, each in a task of its own, and drops those that are quiet for too long. Dropping a
/// stream resets it and discards its unsent data.
#[derive(Clone, Debug)]
pub(super) struct Streams {
    connection: Arc<Activity>,
    patience: Duration,
}

impl Streams {
    pub(super) fn new(connection: Arc<Activity>, patience: Duration) -> Self {
        Self { connection, patience }
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let (activity, patience) = (Activity::of(Some(Arc::clone(&self.connection))), self.patience);
        tokio::spawn(async move {
            tokio::select! {
                () = STREAM.scope(Arc::clone(&activity), stream) => {}
                () = activity.is_quiet_for(patience) => {
                    tracing::debug!("an answer was not read for too long, and its stream is reset");
                }
            }
        });
    }
}

/// A piece of an answer that HTTP has taken. It is dropped when it was sent or discarded.
struct TakenPiece {
    bytes: Bytes,
    activity: Arc<Activity>,
}

impl TakenPiece {
    fn new(bytes: Bytes, activity: Arc<Activity>) -> Self {
        activity.note(&|state| state.unsent += 1);
        Self { bytes, activity }
    }
}

impl AsRef<[u8]> for TakenPiece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for TakenPiece {
    fn drop(&mut self) {
        self.activity.note(&|state| state.unsent -= 1);
    }
}

/// The body of an answer, as its connection takes it. HTTP asks for the next piece when it has room for one. If that piece is not
/// there yet, the request waits for this server. The body ends only when all of it is sent, so that the stream of a client that
/// leaves the last piece unread is quiet.
pub(super) struct Watched {
    body: Body,
    rest: Bytes,
    has_ended: bool,
    activity: Arc<Activity>,
    waits: Option<Waits>,
    _stream: Option<Share>,
}

impl Watched {
    /// `stream` is an HTTP/2 stream's part of its address's share. It is held until the body is sent or dropped.
    pub(super) fn new(body: Body, activity: Arc<Activity>, stream: Option<Share>) -> Self {
        let has_ended = body.is_end_stream();
        Self { body, rest: Bytes::new(), has_ended, activity, waits: None, _stream: stream }
    }
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() && !self.has_ended {
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
                None => self.has_ended = true,
            }
        }
        if self.has_ended {
            ready!(self.activity.poll_sent(context));
            return Poll::Ready(None);
        }
        let length = self.rest.len().min(PIECE);
        let piece = TakenPiece::new(self.rest.split_to(length), Arc::clone(&self.activity));
        if self.rest.is_empty() {
            self.has_ended = self.body.is_end_stream();
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended && self.activity.state.lock().unsent == 0
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

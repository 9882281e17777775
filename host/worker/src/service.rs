//! The service by which routers and peers call a worker.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use host_core::{Event, Instance, Role, Room};
use host_grammar::{Kind, Source};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use host_wire::audit::AUDIT;
use host_wire::proto::worker_server::Worker;
use host_wire::proto::{
    DeliverReply, DeliverRequest, DrainReply, DrainRequest, EndAnswerReply, EndAnswerRequest,
    FlushCacheReply, FlushCacheRequest, FollowCacheRequest, GenerateEvent, GenerateRequest, HandshakeReply,
    HandshakeRequest, WorkerInfo,
};
use host_wire::{Answer, convert, proto};

use super::cache_news;
use super::grammars::Under;
use super::handle::{Call, Handle};
use super::peers::{Peers, connect, fits};

/// Serves one worker.
#[derive(Clone)]
pub struct WorkerService {
    worker: Handle,
    /// The worker's description, with the address at which others reach it.
    info: WorkerInfo,
    peers: Peers,
    /// Permits for routers that follow the cache.
    followers: Arc<Semaphore>,
    /// Becomes true when an operator asks the worker to drain.
    drain: watch::Sender<bool>,
    /// Ends calls that have no end of their own.
    closing: watch::Receiver<bool>,
}

/// The most routers that may follow one worker's cache. Each of them may take a snapshot.
const MAX_FOLLOWERS: usize = 16;

impl WorkerService {
    /// A service for a worker that is reached at `info.address`. It makes `drain` true when an operator asks the worker to drain.
    /// When `closing` becomes true, calls that have no end of their own end.
    #[must_use]
    pub fn new(
        worker: Handle,
        info: WorkerInfo,
        peers: Peers,
        drain: watch::Sender<bool>,
        closing: watch::Receiver<bool>,
    ) -> Self {
        Self { worker, info, peers, followers: Arc::new(Semaphore::new(MAX_FOLLOWERS)), drain, closing }
    }
}

/// The grammar of a request whose prompt ends with `answered` tokens of the answer.
fn under(grammar: proto::Grammar, answered: u32) -> Result<Under, Status> {
    let kind = Kind::parse(&grammar.kind).ok_or_else(|| {
        Status::invalid_argument(format!("grammars of kind {:?} are not known", grammar.kind))
    })?;
    let source = Source { kind, text: grammar.text, compact: grammar.compact };
    Ok(Under { source, answered: answered as usize })
}

/// The answer to one request. Dropped before its end, it cancels the request.
pub struct AnswerStream {
    room: Room,
    worker: Handle,
    answers: mpsc::UnboundedReceiver<Answer>,
    ended: bool,
    #[expect(dead_code, reason = "held for its drop")]
    call: Call,
}

impl Stream for AnswerStream {
    type Item = Result<GenerateEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.answers.poll_recv(context).map(|answer| match answer {
            Some(answer) => {
                self.ended = matches!(answer, Answer::Finished { .. } | Answer::Failed(_));
                Some(Ok(convert::write_answer(&answer, self.worker.links().plugin_name())))
            }
            None => {
                self.ended = true;
                Some(Err(Status::unavailable("the worker stopped before the answer was complete")))
            }
        })
    }
}

impl Drop for AnswerStream {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let (worker, room) = (self.worker.clone(), self.room);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { worker.cancel(room).await });
        }
    }
}

#[tonic::async_trait]
impl Worker for WorkerService {
    type GenerateStream = AnswerStream;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<AnswerStream>, Status> {
        let call = self.worker.call();
        let mut request = request.into_inner();
        tracing::debug!(
            room = %Room(request.room),
            request = %request.request_id,
            prompt_tokens = request.prompt.len(),
            "request"
        );
        let answered = request.answered;
        let under = request.grammar.take().map(|grammar| under(grammar, answered)).transpose()?;
        let request = convert::read_request(request).map_err(|malformed| {
            Status::invalid_argument(format!("the request cannot be read: {malformed}"))
        })?;
        let room = request.room;
        let answers = self.worker.submit_under(request, under).await;
        Ok(Response::new(AnswerStream { room, worker: self.worker.clone(), answers, ended: false, call }))
    }

    async fn handshake(
        &self,
        request: Request<HandshakeRequest>,
    ) -> Result<Response<HandshakeReply>, Status> {
        let HandshakeRequest { from, floor, to } = request.into_inner();
        let from = from.ok_or_else(|| Status::invalid_argument("a handshake needs a worker"))?;
        if to != 0 && to != self.info.instance {
            // A connection for a caller that means another process would have to be closed again, and its end could be taken for that
            // of the connection that the caller makes next.
            let message = format!(
                "this is instance {} and not {}: the worker was restarted",
                self.worker.instance(),
                Instance(to)
            );
            return Ok(Response::new(HandshakeReply { message, ..HandshakeReply::default() }));
        }
        let peer = Instance(from.instance);
        let protocol = fits(&self.info, &from);
        let (worker, peers) = (self.worker.clone(), self.peers.clone());
        // A task of its own: a caller that gives up ends this call, and a link that was made meanwhile must be known, so that it is
        // cut off when its peer is lost.
        let connected = tokio::spawn(async move {
            let connected = match protocol {
                Err(refusal) => Err(refusal),
                Ok(protocol) => connect(&worker, &from).await.map(|session| (session, protocol)),
            };
            match &connected {
                Ok((session, protocol)) => {
                    tracing::info!(name = %from.name, instance = %peer, %protocol, "peer connected");
                    peers.add(peer, (*session, *protocol), &from.address);
                    worker.event(Event::PeerReady { peer, floor, session: *session }).await;
                }
                Err(refusal) => {
                    tracing::warn!(target: AUDIT, name = %from.name, refusal, "handshake refused")
                }
            }
            connected
        });
        let connected = connected.await.unwrap_or_else(|panic| Err(format!("the handshake failed: {panic}")));
        Ok(Response::new(HandshakeReply {
            accepted: connected.is_ok(),
            // The endpoints hold tokens of transfer plugins, so only a peer that fits gets them.
            worker: connected.is_ok().then(|| self.info.clone()),
            protocol: connected.as_ref().map_or(0, |(_session, protocol)| protocol.0),
            message: connected.err().unwrap_or_default(),
        }))
    }

    async fn deliver(&self, request: Request<DeliverRequest>) -> Result<Response<DeliverReply>, Status> {
        let DeliverRequest { from, to, floor, messages } = request.into_inner();
        if to != self.info.instance {
            return Ok(Response::new(DeliverReply { wrong_instance: true, not_connected: false }));
        }
        // A decode worker connects after its peer does, and so has no connection yet when the first call comes.
        let connects_first = self.info.role == Role::Prefill.as_str();
        if connects_first && self.worker.links().get(Instance(from)).is_none() {
            return Ok(Response::new(DeliverReply { wrong_instance: false, not_connected: true }));
        }
        for message in messages {
            match convert::read_message(message) {
                Ok(message) => {
                    let event = Event::Message { from: Instance(from), floor, message };
                    if !self.worker.try_event(event) {
                        return Err(Status::resource_exhausted("the scheduler's inbox is full"));
                    }
                }
                Err(malformed) => {
                    tracing::warn!(from = %Instance(from), %malformed, "a control message was dropped");
                }
            }
        }
        Ok(Response::new(DeliverReply { wrong_instance: false, not_connected: false }))
    }

    async fn flush_cache(&self, _: Request<FlushCacheRequest>) -> Result<Response<FlushCacheReply>, Status> {
        let flushed = self.worker.flush_cache().await;
        let flushed = flushed.ok_or_else(|| Status::unavailable("the worker is stopping"))?;
        let count = |pages: usize| u32::try_from(pages).unwrap_or(u32::MAX);
        Ok(Response::new(FlushCacheReply {
            cache: flushed.is_some(),
            pages_freed: flushed.map_or(0, |flushed| count(flushed.freed)),
            pages_in_use: flushed.map_or(0, |flushed| count(flushed.in_use)),
        }))
    }

    type FollowCacheStream = cache_news::NewsStream;

    async fn follow_cache(
        &self,
        request: Request<FollowCacheRequest>,
    ) -> Result<Response<cache_news::NewsStream>, Status> {
        let FollowCacheRequest { instance, after } = request.into_inner();
        if instance != self.info.instance {
            let message =
                format!("this is instance {} and not {}", self.worker.instance(), Instance(instance));
            return Err(Status::failed_precondition(message));
        }
        let log = self.worker.cache().ok_or_else(|| {
            Status::failed_precondition("this worker keeps no radix cache, so there is nothing to follow")
        })?;
        let place = Arc::clone(&self.followers).try_acquire_owned().map_err(|taken| {
            let message = format!("{MAX_FOLLOWERS} routers follow this worker, which is the limit ({taken})");
            Status::resource_exhausted(message)
        })?;
        Ok(Response::new(cache_news::follow(log.clone(), after, place, self.closing.clone())))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let instance = request.into_inner().instance;
        if instance != self.info.instance {
            let message =
                format!("this is instance {} and not {}", self.worker.instance(), Instance(instance));
            return Err(Status::failed_precondition(message));
        }
        self.drain.send_replace(true);
        Ok(Response::new(DrainReply {}))
    }

    async fn end_answer(
        &self,
        request: Request<EndAnswerRequest>,
    ) -> Result<Response<EndAnswerReply>, Status> {
        let EndAnswerRequest { instance, room } = request.into_inner();
        if instance != self.info.instance {
            let message =
                format!("this is instance {} and not {}", self.worker.instance(), Instance(instance));
            return Err(Status::failed_precondition(message));
        }
        self.worker.end_answer(Room(room)).await;
        Ok(Response::new(EndAnswerReply {}))
    }
}

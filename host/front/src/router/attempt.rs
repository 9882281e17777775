//! One try of a request: the legs of one room, watched together.

use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use host_core::request::FailureCode;
use host_core::{Instance, Room};
use host_wire::clock;
use host_wire::endpoint::is_unconnected;
use host_wire::proto::generate_event::Event as WireEvent;
use host_wire::proto::worker_client::WorkerClient;
use host_wire::proto::{Began, Finished, GenerateEvent, GenerateRequest, Peer, Scores, Token};
use tonic::Status;

use super::{Failure, ServedBy};
use crate::registry::{Chosen, Registry, Route};

type Events = Pin<Box<dyn Stream<Item = Result<GenerateEvent, Status>> + Send>>;
type Gone = Pin<Box<dyn Future<Output = String> + Send>>;

/// One worker's part of a try. Dropping it cancels the work on that worker.
struct Leg {
    instance: Instance,
    name: String,
    events: Events,
    gone: Gone,
}

/// The failure code of a worker that takes no more requests.
const SHUTTING_DOWN: &str = FailureCode::ShuttingDown.as_str();
/// The failure code of a decode worker whose handshake with its prefill worker failed.
const PEER_REFUSED: &str = FailureCode::PeerRefused.as_str();
/// The failure code of a worker that lacks what it needs to begin a request.
const UNABLE: &str = FailureCode::Unable.as_str();
/// Largest event that a worker may send.
const MAX_EVENT: usize = 1 << 20;

impl Leg {
    fn start(registry: &Registry, worker: &Chosen, request: GenerateRequest) -> Self {
        let mut client = WorkerClient::new(worker.channel.clone()).max_decoding_message_size(MAX_EVENT);
        // The call is part of the stream, so that events of one leg are read while the other leg's call still waits for its head.
        let call = async move { client.generate(request).await.map(tonic::Response::into_inner) };
        Self {
            instance: worker.instance,
            name: worker.name.clone(),
            events: stream::once(call).try_flatten().boxed(),
            gone: Box::pin(registry.gone(worker.instance)),
        }
    }

    async fn next(&mut self) -> Step {
        let failed = |failure, suspect, reported| {
            let leg = self.instance;
            Step::Failed { leg, failure, suspect, reported, apart: false }
        };
        tokio::select! {
            biased;
            event = self.events.next() => match event {
                Some(Ok(GenerateEvent { event: Some(event) })) => match event {
                    WireEvent::Began(began) => Step::Began(began),
                    WireEvent::Token(token) => Step::Token(token),
                    WireEvent::Scores(scores) => Step::Scores(scores),
                    WireEvent::Finished(finished) => Step::Finished(finished),
                    // This worker gets no requests until its next heartbeat, which says that it drains.
                    WireEvent::Failed(event) if event.code == SHUTTING_DOWN => {
                        failed(Failure::of_worker(&self.name, &event), true, false)
                    }
                    WireEvent::Failed(event) => {
                        let (leg, failure) = (self.instance, Failure::of_worker(&self.name, &event));
                        let unable = event.code == UNABLE;
                        let apart = unable || event.code == PEER_REFUSED;
                        // What a worker lacks is no fault of its partner.
                        Step::Failed { leg, failure, suspect: false, reported: !unable, apart }
                    }
                },
                Some(Ok(GenerateEvent { event: None })) => {
                    let text = format!("worker {:?} sent an event of an unknown kind", self.name);
                    failed(Failure::Internal(text), false, true)
                }
                Some(Err(status)) => {
                    let (failure, suspect) = Failure::of_call(&self.name, &status);
                    let (leg, apart) = (self.instance, is_unconnected(&status));
                    Step::Failed { leg, failure, suspect, reported: !suspect, apart }
                }
                None => {
                    let text = format!("worker {:?} ended its stream without a result", self.name);
                    failed(Failure::Unavailable(text), true, false)
                }
            },
            // The worker is known to be silent or replaced, so it is not suspected again.
            why = &mut self.gone => failed(Failure::Unavailable(why), false, false),
        }
    }
}

/// The next event of a try.
pub(super) enum Step {
    Began(Began),
    Token(Token),
    Scores(Scores),
    Finished(Finished),
    Failed {
        leg: Instance,
        failure: Failure,
        /// Whether the worker gets no requests until it is heard of again.
        suspect: bool,
        /// Whether the worker itself reports the failure. Its partner may be the cause.
        reported: bool,
        /// Whether nothing was begun: the two workers did not connect, the router did not connect to one of them, or one of them
        /// lacks what it needs.
        apart: bool,
    },
}

/// A try: both legs of one room, or the only one.
pub(super) struct Attempt {
    // The legs are dropped before the route: they end before their workers' load is subtracted.
    decode: Leg,
    /// Absent for an aggregated worker, and once prefill is done.
    prefill: Option<Leg>,
    first_token: bool,
    registry: Registry,
    route: Route,
}

impl Attempt {
    /// Calls all legs at once.
    pub fn start(registry: &Registry, route: Route, request: GenerateRequest) -> Self {
        let prefill = route.prefill.as_ref().map(|worker| Leg::start(registry, worker, request.clone()));
        let peer = route
            .prefill
            .as_ref()
            .map(|worker| Peer { instance: worker.instance.0, address: worker.address.clone() });
        let decode = Leg::start(registry, &route.decode, GenerateRequest { prefill: peer, ..request });
        Self { decode, prefill, first_token: false, registry: registry.clone(), route }
    }

    pub fn served_by(&self) -> ServedBy {
        ServedBy {
            prefill: self.route.prefill.as_ref().map(|worker| worker.name.clone()),
            decode: self.route.decode.name.clone(),
        }
    }

    /// Tokens of the prompt that the try's workers were expected to have cached.
    pub fn expected(&self) -> u64 {
        self.route.expected
    }

    pub fn room(&self) -> Room {
        self.route.room()
    }

    pub fn instances(&self) -> Vec<Instance> {
        self.route.instances().collect()
    }

    pub async fn next(&mut self) -> Step {
        loop {
            let step = match &mut self.prefill {
                None => self.decode.next().await,
                Some(prefill) => tokio::select! {
                    // Decode comes first: its events count, even if prefill is gone by now.
                    biased;
                    step = self.decode.next() => step,
                    step = prefill.next() => {
                        match step {
                            Step::Token(_) | Step::Began(_) | Step::Scores(_) => {}
                            Step::Finished(_) => self.prefill = None,
                            // Decode has the KV of the whole prompt once it answers, so prefill is not needed any more.
                            Step::Failed { leg, failure, suspect, .. } if self.first_token => {
                                tracing::info!(%leg, %failure, "prefill failed after it had done its part");
                                if suspect {
                                    self.registry.suspect(leg, &failure.to_string());
                                }
                                self.prefill = None;
                            }
                            failed @ Step::Failed { .. } => return failed,
                        }
                        continue;
                    }
                },
            };
            self.first_token |= matches!(step, Step::Token(_));
            return step;
        }
    }

    /// Lets prefill end its leg by itself, within this time: dropping its stream now would count as a cancelled request there.
    pub fn settle(self, within: Duration) {
        let Self { decode, prefill, route, registry, .. } = self;
        drop(decode);
        registry.answered(route.room());
        let Some(mut prefill) = prefill else { return };
        tokio::spawn(async move {
            let end = async { while let Step::Token(_) = prefill.next().await {} };
            if clock::timeout(within, end).await.is_err() {
                tracing::warn!(
                    worker = prefill.name,
                    "prefill did not end its leg after the answer was complete"
                );
            }
            drop(prefill);
            drop(route);
        });
    }
}

//! A FAKE worker: answers `Worker.Generate` from a script, computes nothing, moves no KV. Shared with the example
//! `front_on_fakes`.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use host_tests::wait::PATIENCE;
use host_wire::proto::generate_event::Event;
use host_wire::proto::worker_server::{Worker, WorkerServer};
use host_wire::proto::{
    CacheNews, DeliverReply, DeliverRequest, DrainReply, DrainRequest, EndAnswerReply, EndAnswerRequest,
    Failed, Finished, FlushCacheReply, FlushCacheRequest, FollowCacheRequest, GenerateEvent, GenerateRequest,
    HandshakeReply, HandshakeRequest, KvIdentity, Scores, Token, TopToken, TransferEndpoint, WorkerInfo,
};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// The next step of a fake worker.
#[derive(Clone, Debug)]
pub enum Step {
    /// Sends a token.
    Token(u32),
    /// Finishes the answer with this reason.
    Finish(&'static str),
    /// Ends with `Failed`.
    Fail { code: &'static str, retryable: bool },
    /// Ends the call with this status.
    Status(tonic::Code),
    /// Ends the stream without a result.
    Break,
    /// Waits for a permit.
    Gate(Arc<Semaphore>),
    /// Does nothing until the call is cancelled.
    Hang,
}

/// Decides the steps of each call.
pub type Script = Arc<dyn Fn(&GenerateRequest) -> Vec<Step> + Send + Sync>;

/// The steps of a prefill worker without failures.
pub fn prefills() -> Script {
    Arc::new(|_| vec![Step::Finish("prefill")])
}

/// Repeats the prompt until the length or a stop token is reached.
pub fn echoes() -> Script {
    Arc::new(|request| {
        let tokens = request.prompt.iter().cycle().take(request.max_new_tokens as usize);
        let mut steps = Vec::new();
        for &token in tokens {
            steps.push(Step::Token(token));
            if !request.ignore_stop && request.stop_tokens.contains(&token) {
                steps.push(Step::Finish("stop"));
                return steps;
            }
        }
        steps.push(Step::Finish("length"));
        steps
    })
}

/// Answers every call with this text, and stops.
pub fn says(text: &str) -> Script {
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    Arc::new(move |_| tokens.iter().map(|&token| Step::Token(token)).chain([Step::Finish("stop")]).collect())
}

/// Takes these steps on every call.
pub fn steps(steps: Vec<Step>) -> Script {
    Arc::new(move |_| steps.clone())
}

/// Watches a fake worker from outside.
#[derive(Clone)]
pub struct Watch {
    calls: Arc<Mutex<Vec<GenerateRequest>>>,
    /// (calls begun, calls cancelled by the router)
    counts: watch::Receiver<(usize, usize)>,
    /// Rooms whose answers the router has ended.
    ended: watch::Receiver<Vec<u64>>,
}

impl Watch {
    /// Waits until the router has ended this many answers.
    pub async fn ended(&self, answers: usize) {
        in_time("the end of an answer", self.ended.clone(), |ended| ended.len() >= answers).await;
    }

    /// The number of calls that the router has cancelled so far.
    pub fn cancelled_by_now(&self) -> usize {
        self.counts.borrow().1
    }

    /// All calls so far.
    pub fn calls(&self) -> Vec<GenerateRequest> {
        self.calls.lock().unwrap().clone()
    }

    /// Waits until this many calls have begun.
    pub async fn begun(&self, calls: usize) {
        in_time("a call", self.counts.clone(), |counts| counts.0 >= calls).await;
    }

    /// Waits until this many calls were cancelled by the router.
    pub async fn cancelled(&self, calls: usize) {
        in_time("a cancelled call", self.counts.clone(), |counts| counts.1 >= calls).await;
    }
}

/// Waits for something that has to happen.
async fn in_time<T: std::fmt::Debug>(
    what: &str,
    mut watched: watch::Receiver<T>,
    has_come: impl FnMut(&T) -> bool,
) {
    let come = tokio::time::timeout(PATIENCE, watched.wait_for(has_come)).await;
    let come = come.map(|seen| drop(seen.unwrap()));
    assert!(come.is_ok(), "waited {PATIENCE:?} in vain for {what}; seen last: {:?}", *watched.borrow());
}

/// A running fake worker, in a runtime of its own, so that dropping it breaks its connections as a killed process does.
pub struct FakeWorker {
    pub info: WorkerInfo,
    pub watch: Watch,
    runtime: Option<tokio::runtime::Runtime>,
}

impl FakeWorker {
    /// Serves `script` on a free port.
    pub fn start(name: &str, role: &str, instance: u64, script: Script) -> Self {
        // The port stays unused after the worker was killed.
        let listener = host_tests::ports::listener();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (count, counts) = watch::channel((0, 0));
        let ended = watch::Sender::new(Vec::new());
        let calls = Arc::new(Mutex::new(Vec::new()));
        let service = Service { script, calls: Arc::clone(&calls), count, ended: ended.clone() };
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            // The listeners of workers do the same: without it each token waits for an acknowledgement.
            let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener)
                .map(|accepted| accepted.and_then(|accepted| accepted.set_nodelay(true).map(|()| accepted)));
            tonic::transport::Server::builder()
                .add_service(WorkerServer::new(service))
                .serve_with_incoming(incoming)
                .await
                .unwrap();
        });
        let info = info(name, role, instance, address);
        Self { info, watch: Watch { calls, counts, ended: ended.subscribe() }, runtime: Some(runtime) }
    }

    /// Breaks all its connections and stops listening.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A plausible description.
pub fn info(name: &str, role: &str, instance: u64, address: SocketAddr) -> WorkerInfo {
    WorkerInfo {
        instance,
        name: name.into(),
        role: role.into(),
        address: format!("http://{address}"),
        identity: Some(KvIdentity {
            model: "fake".into(),
            weights: "00".into(),
            executor: "fake-1".into(),
            dtype: "f32".into(),
            layout: "page-head-layer-kv-token-dim".into(),
            page_tokens: 16,
            layers: 1,
            kv_heads: 1,
            head_dim: 8,
            ranks: 1,
            sliding_layers: 0,
            window: 0,
        }),
        max_tokens: 512,
        pages: 64,
        transfer: vec![TransferEndpoint { plugin: "shm".into(), ..Default::default() }],
        cache_events: false,
        grammars: true,
        scores: true,
        protocol: host_wire::protocol::NEWEST,
        protocol_oldest: host_wire::protocol::OLDEST,
        metrics: String::new(),
    }
}

struct Service {
    script: Script,
    calls: Arc<Mutex<Vec<GenerateRequest>>>,
    count: watch::Sender<(usize, usize)>,
    ended: watch::Sender<Vec<u64>>,
}

#[tonic::async_trait]
impl Worker for Service {
    type GenerateStream = ReceiverStream<Result<GenerateEvent, Status>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        self.calls.lock().unwrap().push(request.clone());
        let steps = (self.script)(&request);
        self.count.send_modify(|counts| counts.0 += 1);
        if let Some(Step::Status(code)) = steps.first() {
            return Err(Status::new(*code, "scripted"));
        }
        let scores = request.scores.is_some().then(|| prompt_scores(&request));
        // The channel holds one event, so that the worker notices a client that hangs up.
        let (sender, receiver) = mpsc::channel(1);
        let count = self.count.clone();
        let mut ended = self.ended.subscribe();
        tokio::spawn(async move {
            let mut sent = 0;
            let room = request.room;
            for scores in scores.into_iter().flatten() {
                if sender.send(Ok(GenerateEvent { event: Some(Event::Scores(scores)) })).await.is_err() {
                    return;
                }
            }
            for step in steps {
                let step = if ended.borrow().contains(&room) { Step::Finish("stop") } else { step };
                let event = match step {
                    Step::Token(token) => {
                        sent += 1;
                        Ok(Event::Token(scored(token, &request)))
                    }
                    Step::Finish(reason) => Ok(Event::Finished(Finished {
                        reason: reason.into(),
                        prompt_tokens: request.prompt.len() as u32,
                        output_tokens: sent,
                        transferred_bytes: 4096,
                        transfer_plugin: "shm".into(),
                        cached_tokens: 3,
                        offload_tokens: 1,
                    })),
                    Step::Fail { code, retryable } => {
                        Ok(Event::Failed(Failed { code: code.into(), message: "scripted".into(), retryable }))
                    }
                    Step::Status(code) => Err(Status::new(code, "scripted")),
                    Step::Break => return,
                    Step::Gate(gate) => {
                        gate.acquire().await.unwrap().forget();
                        continue;
                    }
                    Step::Hang => {
                        tokio::select! {
                            () = sender.closed() => {
                                count.send_modify(|counts| counts.1 += 1);
                                return;
                            }
                            _ = ended.wait_for(|ended| ended.contains(&room)) => Ok(Event::Finished(Finished::default())),
                        }
                    }
                };
                let event = event.map(|event| GenerateEvent { event: Some(event) });
                if sender.send(event).await.is_err() {
                    count.send_modify(|counts| counts.1 += 1);
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn handshake(&self, _: Request<HandshakeRequest>) -> Result<Response<HandshakeReply>, Status> {
        Err(Status::unimplemented("a fake worker shakes no hands"))
    }

    async fn deliver(&self, _: Request<DeliverRequest>) -> Result<Response<DeliverReply>, Status> {
        Err(Status::unimplemented("a fake worker takes no messages"))
    }

    async fn flush_cache(&self, _: Request<FlushCacheRequest>) -> Result<Response<FlushCacheReply>, Status> {
        Ok(Response::new(FlushCacheReply { cache: true, pages_freed: 7, pages_in_use: 2 }))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        Ok(Response::new(DrainReply {}))
    }

    async fn end_answer(
        &self,
        request: Request<EndAnswerRequest>,
    ) -> Result<Response<EndAnswerReply>, Status> {
        self.ended.send_modify(|ended| ended.push(request.into_inner().room));
        Ok(Response::new(EndAnswerReply {}))
    }

    type FollowCacheStream = ReceiverStream<Result<CacheNews, Status>>;

    async fn follow_cache(
        &self,
        _: Request<FollowCacheRequest>,
    ) -> Result<Response<Self::FollowCacheStream>, Status> {
        Err(Status::unimplemented("a fake worker has no cache"))
    }
}

/// The log probabilities of a prompt in two parts, which overlap as after a preemption: the token at position p has -p, and the
/// likeliest tokens are the ids after it.
fn prompt_scores(request: &GenerateRequest) -> [Scores; 2] {
    let count = request.scores.unwrap_or(0);
    let scored = |position: usize| {
        let token = request.prompt[position];
        let top = (1..=count).map(|rank| TopToken { token: (token + rank) % 256, logprob: -0.5 });
        Token { token, logprob: Some(-(position as f32)), top: top.collect() }
    };
    let part =
        |from: usize, end: usize| Scores { first: from as u32, tokens: (from..end).map(scored).collect() };
    let length = request.prompt.len();
    let middle = (length / 2).max(1);
    [part(1, middle), part(1, length)]
}

/// Log probabilities that a test can predict: the sampled token has -0.5, and the k likeliest tokens are this one and the ids
/// after it.
fn scored(token: u32, request: &GenerateRequest) -> Token {
    let count = request.sampling.as_ref().and_then(|sampling| sampling.logprobs);
    let top = (0..count.unwrap_or(0))
        .map(|rank| TopToken { token: (token + rank) % 256, logprob: -0.5 - rank as f32 })
        .collect();
    Token { token, logprob: count.map(|_| -0.5), top }
}

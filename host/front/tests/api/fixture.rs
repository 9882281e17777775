//! A front with its listeners, and scripted workers registered with it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use host_front::connections::Limits;
use host_front::front::{FrontConfig, HttpListeners, serve};
use host_front::router::Waits;
use host_front::text::{ChatTemplate, TextModel};
use host_tests::wait::answered_until;
use host_wire::proto::registry_client::RegistryClient;
use host_wire::proto::{HeartbeatRequest, LeaveRequest, Load, RegisterReply, RegisterRequest, WorkerInfo};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::client::{Reply, send};
use super::fake_worker::{FakeWorker, Script, echoes, prefills};

pub const TEMPLATE: &str =
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>";

/// Longer than a test waits for anything.
pub const LONG: Duration = Duration::from_secs(600);

/// A running front.
pub struct Front {
    pub http: SocketAddr,
    registry: RegistryClient<tonic::transport::Channel>,
    stop: Option<oneshot::Sender<()>>,
    ended: tokio::task::JoinHandle<anyhow::Result<()>>,
}

/// A configuration in which no wait ends during a test unless the test means it, and workers need no heartbeat. Failed tries are
/// repeated at once.
pub fn config() -> FrontConfig {
    let mut text = TextModel::bytes(300);
    text.template = Some(Arc::new(ChatTemplate::new(TEMPLATE.into(), String::new(), String::new()).unwrap()));
    let mut config = FrontConfig::new("fake".into(), text);
    config.worker_timeout = LONG;
    config.lost_after = LONG;
    config.retry.total = LONG;
    config.waits = Waits { head: LONG, end: LONG, reply: LONG };
    config.drain = LONG;
    config.body_timeout = LONG;
    config.connections = Limits { head: LONG, ..config.connections };
    // Scripted workers count their calls, so they must not get dummy requests.
    config.warm_up = false;
    config.retry.backoff = Duration::from_millis(1);
    config
}

/// Advances the front's clock by this time at once.
pub async fn passes(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

impl Front {
    pub async fn start(config: FrontConfig) -> Self {
        let http = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = http.local_addr().unwrap();
        Self::start_on(config, http, address).await
    }

    /// Starts a front on these listeners. `address`: that of the listener for clients.
    pub async fn start_on(
        config: FrontConfig,
        http: impl Into<HttpListeners> + Send + 'static,
        address: SocketAddr,
    ) -> Self {
        let control = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control_address = control.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(serve(config, http, control, async move {
            drop(stopped.await);
        }));
        let registry = RegistryClient::connect(format!("http://{control_address}")).await.unwrap();
        Self { http: address, registry, stop: Some(stop), ended }
    }

    /// Starts a front with one prefill worker, and one decode worker that runs `script`.
    pub async fn with_pair(script: Script) -> (Self, FakeWorker, FakeWorker) {
        let mut front = Self::start(config()).await;
        let prefill = front.worker("prefill-0", "prefill", prefills()).await;
        let decode = front.worker("decode-0", "decode", script).await;
        (front, prefill, decode)
    }

    /// Starts a front with a prefill worker and a decode worker that echoes.
    pub async fn echoing() -> (Self, FakeWorker, FakeWorker) {
        Self::with_pair(echoes()).await
    }

    /// Starts a worker and registers it.
    pub async fn worker(&mut self, name: &str, role: &str, script: Script) -> FakeWorker {
        self.worker_for(512, name, role, script).await
    }

    /// Like [`worker`](Self::worker), for a worker that holds this many tokens.
    pub async fn worker_for(&mut self, tokens: u32, name: &str, role: &str, script: Script) -> FakeWorker {
        let instance = name.bytes().fold(7, |hash: u64, byte| hash.wrapping_mul(31) + u64::from(byte));
        let mut worker = FakeWorker::start(name, role, instance, script);
        worker.info.max_tokens = tokens;
        let reply = self.register(worker.info.clone()).await;
        assert!(reply.accepted, "{}", reply.message);
        worker
    }

    pub async fn register(&mut self, info: WorkerInfo) -> RegisterReply {
        self.registry.register(RegisterRequest { worker: Some(info), load: None }).await.unwrap().into_inner()
    }

    pub async fn heartbeat(&mut self, instance: u64) -> bool {
        self.heartbeat_with(instance, Load::default()).await
    }

    pub async fn heartbeat_with(&mut self, instance: u64, load: Load) -> bool {
        let beat = HeartbeatRequest { instance, load: Some(load) };
        self.registry.heartbeat(beat).await.unwrap().into_inner().known
    }

    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        send(self.http, "POST", path, &[], body.to_string().as_bytes()).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        send(self.http, "GET", path, &[], b"").await
    }

    /// Waits until the front's metrics have this text.
    pub async fn until_metrics_say(&self, text: &str) {
        answered_until(text, async || {
            let metrics = self.get("/metrics").await.text().await;
            if metrics.contains(text) { Ok(()) } else { Err(metrics) }
        })
        .await;
    }

    /// Makes a worker leave the registry.
    pub async fn leave(&mut self, instance: u64) {
        self.registry.leave(LeaveRequest { instance }).await.unwrap();
    }

    /// Asks the front to stop.
    pub fn begin_to_stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    /// Waits until the front has ended, and returns how.
    pub async fn stopped(self) -> anyhow::Result<()> {
        self.ended.await.unwrap()
    }

    /// Asks the front to stop, and returns how it ended.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.begin_to_stop();
        self.stopped().await
    }
}

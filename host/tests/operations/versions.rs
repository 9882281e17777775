//! Workers and routers of other versions of the control protocol.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use host_tests::cluster::signal;
use host_tests::plugin_files;
use host_tests::wait::{answered_until, until};
use host_wire::endpoint::{Credentials, ListenAt, Listener, serve};
use host_wire::proto::registry_server::{Registry, RegistryServer};
use host_wire::proto::worker_client::WorkerClient;
use host_wire::proto::{
    HandshakeReply, HandshakeRequest, HeartbeatReply, HeartbeatRequest, LeaveReply, LeaveRequest,
    RegisterReply, RegisterRequest, WorkerInfo,
};
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::by_hand::Worker;

/// A router that answers registrations with a given reply, and counts the messages that it gets.
#[derive(Clone)]
struct Router {
    reply: RegisterReply,
    registered: watch::Sender<Vec<WorkerInfo>>,
    heartbeats: Arc<AtomicUsize>,
    /// Number of heartbeats of draining workers and of workers that left.
    goodbyes: Arc<AtomicUsize>,
}

impl Router {
    /// Starts a router that speaks the versions from `oldest` to `newest` and answers with version `told`. With 0 it answers
    /// without a version.
    async fn start(told: u32, oldest: u32, newest: u32) -> (Self, String) {
        let reply = RegisterReply {
            accepted: true,
            protocol: told,
            protocol_oldest: oldest,
            protocol_newest: newest,
            ..RegisterReply::default()
        };
        let router = Self {
            reply,
            registered: watch::Sender::default(),
            heartbeats: Arc::default(),
            goodbyes: Arc::default(),
        };
        let listener = Listener::bind(&ListenAt::loopback(), Credentials::None).await.unwrap();
        let address = listener.address().unwrap().to_string();
        let routes = Routes::new(RegistryServer::new(router.clone()));
        tokio::spawn(serve(listener, routes, std::future::pending()));
        (router, address)
    }

    /// Waits until there were `count` registrations.
    async fn registrations(&self, count: usize) -> Vec<WorkerInfo> {
        self.registered.subscribe().wait_for(|all| all.len() >= count).await.unwrap().clone()
    }

    /// Waits until workers of both roles have registered.
    async fn registrations_of(&self, roles: [&str; 2]) -> Vec<WorkerInfo> {
        let has = |all: &Vec<WorkerInfo>| roles.iter().all(|role| all.iter().any(|info| info.role == *role));
        self.registered.subscribe().wait_for(has).await.unwrap().clone()
    }

    /// Waits for a heartbeat.
    async fn until_it_beats(&self) {
        answered_until("a heartbeat", async || {
            tokio::task::yield_now().await;
            if self.heartbeats.load(Ordering::SeqCst) > 0 { Ok(()) } else { Err("none") }
        })
        .await;
    }
}

#[tonic::async_trait]
impl Registry for Router {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<RegisterReply>, Status> {
        let worker = request.into_inner().worker.unwrap();
        self.registered.send_modify(|all| all.push(worker));
        Ok(Response::new(self.reply.clone()))
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatReply>, Status> {
        self.heartbeats.fetch_add(1, Ordering::SeqCst);
        if request.into_inner().load.unwrap().draining {
            self.goodbyes.fetch_add(1, Ordering::SeqCst);
        }
        Ok(Response::new(HeartbeatReply { known: true, warming: false }))
    }

    async fn leave(&self, _: Request<LeaveRequest>) -> Result<Response<LeaveReply>, Status> {
        self.goodbyes.fetch_add(1, Ordering::SeqCst);
        Ok(Response::new(LeaveReply {}))
    }
}

async fn ends(mut worker: Worker) {
    signal(worker.0.id(), "TERM");
    let ended = tokio::task::spawn_blocking(move || {
        until("the worker to end", || worker.0.try_wait().unwrap().ok_or("it runs"))
    });
    assert!(ended.await.unwrap().success());
}

fn start(plugins: &Path, role: &str, router: &str) -> Worker {
    Worker::start(plugins, role, router, &[&format!("--name={role}")])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_is_told_of_draining_and_leaving_in_version_2_alone() {
    let plugins = plugin_files::directory(&["shm"]);
    // The third router answers without a version, as old routers did.
    for (told, oldest, newest, is_told) in [(1, 1, 1, false), (2, 2, 3, true), (0, 0, 0, true)] {
        let (router, address) = Router::start(told, oldest, newest).await;
        let worker = start(plugins.path(), "prefill", &address);
        router.until_it_beats().await;
        ends(worker).await;
        assert_eq!(router.goodbyes.load(Ordering::SeqCst) > 0, is_told, "version {told}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_refuses_a_router_that_answers_in_a_version_that_it_did_not_offer() {
    let plugins = plugin_files::directory(&["shm"]);
    let (router, address) = Router::start(7, 7, 9).await;
    let worker = start(plugins.path(), "prefill", &address);
    // The worker registers again and sends nothing else.
    let registrations = router.registrations(2).await;
    assert_eq!((registrations[0].protocol_oldest, registrations[0].protocol), (1, 3));
    ends(worker).await;
    assert_eq!(router.heartbeats.load(Ordering::SeqCst), 0);
    assert_eq!(router.goodbyes.load(Ordering::SeqCst), 1, "it may have the worker on its list");
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_shake_hands_in_the_newest_version_that_both_speak() {
    let plugins = plugin_files::directory(&["shm"]);
    let (router, address) = Router::start(2, 1, 2).await;
    let _workers = [start(plugins.path(), "prefill", &address), start(plugins.path(), "decode", &address)];
    let registered = router.registrations_of(["prefill", "decode"]).await;
    let info = |role: &str| registered.iter().find(|info| info.role == role).unwrap().clone();
    let (prefill, decode) = (info("prefill"), info("decode"));
    let shake = async |oldest, newest| -> HandshakeReply {
        let mut client = WorkerClient::connect(prefill.address.clone()).await.unwrap();
        let from = WorkerInfo { protocol_oldest: oldest, protocol: newest, ..decode.clone() };
        client.handshake(HandshakeRequest { from: Some(from), floor: 0, to: 0 }).await.unwrap().into_inner()
    };
    // A caller may know an earlier process at this address. It gets no connection.
    let mut client = WorkerClient::connect(prefill.address.clone()).await.unwrap();
    let earlier = HandshakeRequest { from: Some(decode.clone()), floor: 0, to: prefill.instance ^ 1 };
    let refused = client.handshake(earlier).await.unwrap().into_inner();
    assert!(
        !refused.accepted && refused.worker.is_none() && refused.message.contains("restarted"),
        "{refused:?}"
    );
    let metrics = async || {
        let url = format!("{}/metrics", prefill.metrics);
        tokio::task::spawn_blocking(move || {
            let mut answer = host_tests::cluster::agent().get(url).call().unwrap();
            answer.body_mut().read_to_string().unwrap()
        })
        .await
        .unwrap()
    };
    for (oldest, newest, agreed) in [(1, 1, 1), (2, 3, 3), (0, 0, 1), (1, 2, 2), (3, 4, 3)] {
        let reply = shake(oldest, newest).await;
        assert!(reply.accepted, "{oldest} to {newest}: {reply:?}");
        assert_eq!(reply.protocol, agreed, "{oldest} to {newest}");
        let metrics = metrics().await;
        assert!(metrics.contains(&format!("host_peers{{protocol=\"{agreed}\"}} 1")), "{metrics}");
    }
    let refused = shake(7, 9).await;
    assert!(!refused.accepted && refused.protocol == 0, "{refused:?}");
    assert!(refused.message.contains("7 to 9") && refused.message.contains("1 to 3"), "{refused:?}");
}

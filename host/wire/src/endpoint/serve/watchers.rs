//! Watchers that keep connections open, or answers unread.

use std::sync::Arc;

use axum::body::Bytes;
use axum::http::{Request, StatusCode};
use axum::routing::get;
use h2::client::SendRequest;
use host_tests::wait::{PATIENCE, answered_until};
use tokio::net::TcpSocket;
use tokio::task::JoinHandle;

use super::*;
use crate::clock;
use crate::endpoint::fixture::{Counting, beat, client};
use crate::endpoint::{Address, ListenAt, unread};

/// Bytes of an answer of `/metrics`.
const TEXT: usize = 40 << 10;
/// Addresses of two machines.
const ONE: [u8; 4] = [127, 0, 0, 1];
const OTHER: [u8; 4] = [127, 0, 0, 2];

/// The memory of an answer, counted by the clones of one `Arc`.
struct Text {
    bytes: Vec<u8>,
    _counted: Arc<()>,
}

impl AsRef<[u8]> for Text {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// `/metrics` and `/health`. Each answer of `/metrics` clones `texts`.
fn watching(texts: &Arc<()>) -> Router {
    let texts = Arc::clone(texts);
    Router::new()
        .route(
            "/metrics",
            get(move || async move { Bytes::from_owner(Text { bytes: vec![b'x'; TEXT], _counted: texts }) }),
        )
        .route("/health", get(|| async { "ok" }))
}

async fn open() -> Listener {
    Listener::bind(&ListenAt::loopback(), Credentials::None).await.unwrap()
}

/// A connection that answers pings and lets the server send this many bytes of each answer. The task ends with the connection.
struct Watcher {
    requests: SendRequest<Bytes>,
    connection: JoinHandle<()>,
}

impl Watcher {
    async fn connect(to: &Address, from: [u8; 4], window: u32) -> Result<Self, h2::Error> {
        let Address::Plain(host) = to else { panic!("{to}") };
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        let connection = socket.connect((ONE, host.port).into()).await.unwrap();
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(window);
        let (requests, connection) = builder.handshake(connection).await?;
        Ok(Self { requests, connection: tokio::spawn(async move { drop(connection.await) }) })
    }

    /// The status of an answer, and its body, which is not read yet.
    async fn ask(&mut self, path: &str) -> Result<(StatusCode, h2::RecvStream), h2::Error> {
        let request = Request::get(format!("http://127.0.0.1{path}")).body(()).unwrap();
        let answer = self.requests.send_request(request, true)?.0.await?;
        Ok((answer.status(), answer.into_body()))
    }

    /// Sends another request, and reads its answer.
    async fn is_answered(&mut self) -> Result<(), h2::Error> {
        let (status, mut body) = self.ask("/health").await?;
        assert_eq!(status, 200);
        while let Some(bytes) = body.data().await {
            bytes?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn what_a_watcher_leaves_unread_is_bounded() {
    let (texts, server) = (Arc::new(()), Counting::default());
    for (calls, most, streams) in
        [(None, unread::OF_ONE, MAX_WATCHED), (Some(server.routes()), unread::OF_ALL, MAX_CALLS)]
    {
        let listener = open().await;
        let address = listener.address().unwrap();
        tokio::spawn(serve_watched(listener, calls, watching(&texts), std::future::pending()));
        let mut reads_nothing = Watcher::connect(&address, ONE, 0).await.unwrap();
        let (mut kept, mut refused) = (Vec::new(), 0);
        // As many requests as one connection may send without reading.
        for _ in 0..streams.min(1000) {
            let (status, body) = reads_nothing.ask("/metrics").await.unwrap();
            if status == 200 {
                kept.push(body);
            } else {
                assert_eq!(status, 503);
                refused += 1;
            }
        }
        assert_eq!(reads_nothing.requests.current_max_send_streams(), streams as usize);
        let held = (Arc::strong_count(&texts) - 1) * TEXT;
        assert!(!kept.is_empty() && refused > 0 && held <= most, "{held} bytes, {refused} refused");
        // Another client that reads is served: it gets more bytes than a connection may leave unread.
        let mut reads = Watcher::connect(&address, OTHER, 1 << 20).await.unwrap();
        for _ in 0..2 * unread::OF_ONE / TEXT {
            let (status, mut body) = reads.ask("/metrics").await.unwrap();
            assert_eq!(status, 200);
            let mut heard = 0;
            while let Some(bytes) = body.data().await {
                let bytes = bytes.unwrap().len();
                heard += bytes;
                body.flow_control().release_capacity(bytes).unwrap();
            }
            assert_eq!(heard, TEXT);
        }
    }
}

#[tokio::test]
async fn an_answer_that_is_not_read_ends_with_its_connection() {
    let texts = Arc::new(());
    let listener = open().await;
    let address = listener.address().unwrap();
    let short = Duration::from_millis(500);
    let terms = Terms::Watching { age: short, grace: short };
    tokio::spawn(run(listener, bounded(watching(&texts)), terms, std::future::pending()));
    // On a busy machine the connection may end before it has sent its request.
    let (watcher, _unread) = answered_until("an answer", async || {
        let mut watcher = Watcher::connect(&address, ONE, 0).await?;
        let answer = watcher.ask("/metrics").await?;
        Ok::<_, h2::Error>((watcher, answer))
    })
    .await;
    clock::timeout(PATIENCE, watcher.connection).await.expect("the connection ends").unwrap();
    answered_until("the answer's memory to be free", async || {
        tokio::task::yield_now().await;
        match Arc::strong_count(&texts) {
            // The routes hold one clone.
            1 | 2 => Ok(()),
            more => Err(more),
        }
    })
    .await;
}

#[tokio::test]
async fn watchers_that_keep_connections_open_keep_no_other_out() {
    let listener = open().await.at_most(8);
    let address = listener.address().unwrap();
    tokio::spawn(serve_watched(listener, None, watching(&Arc::default()), std::future::pending()));
    let mut other = Watcher::connect(&address, OTHER, 1 << 16).await.unwrap();
    other.is_answered().await.unwrap();
    let mut kept = Vec::new();
    for number in 0..20 {
        let mut watcher = Watcher::connect(&address, ONE, 1 << 16).await.unwrap();
        if let Err(error) = watcher.is_answered().await {
            panic!("number {number} is kept out: {error}");
        }
        kept.push(watcher);
    }
    // A quarter of eight places: the oldest connections ended to make room.
    answered_until("the oldest to end", async || {
        tokio::task::yield_now().await;
        match kept.iter().filter(|watcher| !watcher.connection.is_finished()).count() {
            2 => Ok(()),
            others => Err(others),
        }
    })
    .await;
    other.is_answered().await.unwrap();
    kept.last_mut().unwrap().is_answered().await.unwrap();
}

#[tokio::test]
async fn where_calls_are_answered_an_address_has_its_share_of_connections_and_none_ends() {
    let (server, listener) = (Counting::default(), open().await.at_most(10));
    let address = listener.address().unwrap();
    let calls = Some(server.routes());
    tokio::spawn(serve_watched(listener, calls, watching(&Arc::default()), std::future::pending()));
    let mut member = client(&address, &Credentials::None);
    beat(&mut member).await.unwrap();
    let mut kept = Vec::new();
    for _ in 0..20 {
        // A connection beyond the share is closed at any point of this.
        let Ok(mut watcher) = Watcher::connect(&address, ONE, 1 << 16).await else { continue };
        if watcher.is_answered().await.is_ok() {
            kept.push(watcher);
        }
    }
    assert_eq!(kept.len(), 7, "eight with the one that calls");
    Watcher::connect(&address, OTHER, 1 << 16).await.unwrap().is_answered().await.unwrap();
    for watcher in &mut kept {
        watcher.is_answered().await.unwrap();
    }
    beat(&mut member).await.unwrap();
    assert_eq!(server.calls(), 2);
}

//! Serves other processes.

use std::future::Future;
use std::time::Duration;

use axum::Router;
use tonic::service::Routes;
use tonic::transport::Server;

use super::credentials::Credentials;
use super::listener::Listener;
use super::pages::{calls_alone, without_pages};
use super::unread::bounded;
use super::{MAX_CALLS, PING_EVERY, PING_WAIT};

/// Most requests at once of a connection that only watches. A probe and a scrape are one each.
const MAX_WATCHED: u32 = 16;
/// Age at which a connection that only watches is asked to end. Its client connects again.
const AGE: Duration = Duration::from_secs(60);
/// Time in which the client can then read answers under way. Afterwards the connection is closed, and unread answers are freed.
const AGE_GRACE: Duration = Duration::from_secs(10);

/// The uses of a listener's connections.
#[derive(Clone, Copy, Debug)]
enum Terms {
    /// gRPC only. The connections last.
    Calls,
    /// gRPC, and watching over HTTP/1 and HTTP/2. The connections last.
    CallsAndWatching,
    /// Watching only. The connections are passing.
    Watching {
        /// Age at which they are asked to end.
        age: Duration,
        /// Time after which they are then closed.
        grace: Duration,
    },
}

/// Answers calls on a listener until `stop` resolves. Then calls under way may end, however long they take.
///
/// Calls are gRPC over HTTP/2, and nothing else is answered. A listener without credentials refuses requests of web pages.
///
/// # Errors
/// When the server fails.
pub async fn serve(
    listener: Listener,
    calls: Routes,
    stop: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let calls = calls_alone(calls.into_axum_router());
    let calls = match listener.credentials() {
        Credentials::None => without_pages(calls, listener.address().ok().as_ref()),
        Credentials::SameUser | Credentials::Tls(_) => calls,
    };
    run(listener, calls, Terms::Calls, stop).await
}

/// Like [`serve`], for a listener without credentials at which a process is watched, with or without calls. Watching is answered
/// over HTTP/1, too.
///
/// Every process that reaches the listener may watch. So the answers that such a client leaves unread are limited, and further
/// ones are 503. Where no calls are answered, connections are few and end after a minute: a new one takes the place of the oldest
/// of its client. Where calls are answered, connections last, and each client has its share of them.
///
/// `watching` must make whole answers: they are held in memory until they are read.
///
/// # Errors
/// When the server fails.
pub async fn serve_watched(
    listener: Listener,
    calls: Option<Routes>,
    watching: Router,
    stop: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let terms = match calls {
        Some(_) => Terms::CallsAndWatching,
        None => Terms::Watching { age: AGE, grace: AGE_GRACE },
    };
    let calls = calls.map(|calls| calls_alone(calls.into_axum_router())).unwrap_or_default();
    let all = without_pages(calls.merge(bounded(watching)), listener.address().ok().as_ref());
    run(listener, all, terms, stop).await
}

async fn run(
    listener: Listener,
    routes: Router,
    terms: Terms,
    stop: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let server = Server::builder()
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_WAIT))
        .accept_http1(!matches!(terms, Terms::Calls));
    let (mut server, connections) = match terms {
        Terms::Calls | Terms::CallsAndWatching => {
            // Clients may hang up as soon as they have asked, so calls may be cancelled before they were looked at.
            let cancelled = Some(MAX_CALLS as usize);
            let server = server.max_concurrent_streams(Some(MAX_CALLS));
            (server.http2_max_pending_accept_reset_streams(cancelled), listener.incoming())
        }
        Terms::Watching { age, grace } => {
            let server = server.max_concurrent_streams(Some(MAX_WATCHED));
            (server.max_connection_age(age).max_connection_age_grace(grace), listener.passing())
        }
    };
    server.add_routes(routes.into()).serve_with_incoming_shutdown(connections, stop).await
}

#[cfg(test)]
mod watchers;

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tonic::transport::Endpoint;

    use super::*;
    use crate::clock;
    use crate::endpoint::fixture::{Counting, ask, beat, client};
    use crate::endpoint::{Address, ListenAt};
    use crate::proto::HeartbeatRequest;
    use crate::proto::registry_client::RegistryClient;

    /// The beginning of an HTTP/2 connection: the preface and empty settings.
    const BEGINNING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

    async fn open() -> Listener {
        Listener::bind(&ListenAt::loopback(), Credentials::None).await.unwrap()
    }

    #[tokio::test]
    async fn a_caller_that_vanished_is_hung_up_on() {
        let Address::Plain(host) = Counting::default().on(open().await) else { panic!("another address") };
        let before = clock::now();
        let mut caller = TcpStream::connect((host.name.as_str(), host.port)).await.unwrap();
        caller.write_all(BEGINNING).await.unwrap();
        // The server's first frame shows that the caller was accepted, which takes real time. From here on, time passes as soon as
        // nothing else can happen.
        caller.read_exact(&mut [0; 9]).await.unwrap();
        tokio::time::pause();
        let accepted = clock::now();
        // The caller reads everything and answers no ping.
        let mut heard = Vec::new();
        clock::timeout(10 * PING_WAIT, caller.read_to_end(&mut heard)).await.unwrap().unwrap();
        assert!(!heard.is_empty() && before.elapsed() >= PING_EVERY + PING_WAIT, "{:?}", before.elapsed());
        assert!(accepted.elapsed() < 2 * (PING_EVERY + PING_WAIT), "{:?}", accepted.elapsed());
    }

    #[tokio::test]
    async fn a_call_to_a_server_that_vanished_fails() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address::Plain(silent.local_addr().unwrap().into());
        let asked = tokio::spawn(async move { ask(&address, &Credentials::None).await });
        let accepted = silent.accept().await.unwrap();
        // Connecting takes real time. From here on, time passes as soon as nothing else can happen.
        tokio::time::pause();
        let before = clock::now();
        clock::timeout(10 * PING_WAIT, asked).await.unwrap().unwrap().unwrap_err();
        assert!(before.elapsed() >= PING_WAIT, "{:?}", before.elapsed());
        drop(accepted);
    }

    #[tokio::test]
    async fn a_connection_that_broke_is_made_again_by_the_next_call() {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let counting = Counting::default();
        // No other process gets the port meanwhile.
        let at = ListenAt::Tcp(host_tests::ports::unused());
        let first = Listener::bind(&at, Credentials::None).await.unwrap();
        let address = first.address().unwrap();
        let serving = tokio::spawn(serve(first, counting.routes(), async move { drop(stopped.await) }));
        let mut client = client(&address, &Credentials::None);
        beat(&mut client).await.unwrap();
        stop.send(()).unwrap();
        serving.await.unwrap().unwrap();
        beat(&mut client).await.unwrap_err();
        counting.on(Listener::bind(&at, Credentials::None).await.unwrap());
        host_tests::wait::answered_until("a new connection", async || beat(&mut client).await).await;
    }

    #[tokio::test]
    async fn calls_that_are_cancelled_at_once_do_not_break_the_connection() {
        let Address::Plain(host) = Counting::default().on(open().await) else { panic!("another address") };
        let connection = TcpStream::connect((host.name.as_str(), host.port)).await.unwrap();
        let (requests, driver) = h2::client::handshake(connection).await.unwrap();
        let driver = tokio::spawn(driver);
        let call = || {
            let request = axum::http::Request::post(format!("http://{host}/host.v1.Registry/Heartbeat"));
            request.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap()
        };
        let mut requests = requests.ready().await.unwrap();
        for _ in 0..90 {
            // The driver writes both frames together, when this task waits.
            let (_answer, mut sent) = requests.send_request(call(), false).unwrap();
            sent.send_reset(h2::Reason::CANCEL);
        }
        let mut requests = requests.ready().await.unwrap();
        let (answer, mut sent) = requests.send_request(call(), false).unwrap();
        sent.send_data(b"\0\0\0\0\0"[..].into(), true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 200);
        assert!(!driver.is_finished());
    }

    const CALL: &str = "POST /host.v1.Registry/Heartbeat";
    const GRPC: &str = "content-type: application/grpc";

    /// The answer to a request over HTTP/1 whose body is an empty message. Empty where HTTP/1 is not spoken.
    async fn over_http1(address: &Address, line: &str, headers: &[&str]) -> String {
        let Address::Plain(host) = address else { panic!("{address}") };
        let mut connection = TcpStream::connect((host.name.as_str(), host.port)).await.unwrap();
        let mut request = format!("{line} HTTP/1.1\r\nconnection: close\r\ncontent-length: 5\r\n");
        if headers.iter().all(|header| !header.starts_with("host:")) {
            request.push_str(&format!("host: {host}\r\n"));
        }
        headers.iter().for_each(|header| request.push_str(&format!("{header}\r\n")));
        request.push_str("\r\n\0\0\0\0\0");
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // The server may hang up before it has read the request.
        drop(connection.read_to_end(&mut answer).await);
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[tokio::test]
    async fn what_a_page_sends_without_asking_is_no_call() {
        let server = Counting::default();
        let address = server.on(open().await);
        for headers in [
            &["content-type: text/plain", "origin: http://evil.example"][..],
            &["content-type: text/plain"],
            &[GRPC],
        ] {
            let answer = over_http1(&address, CALL, headers).await;
            assert!(!answer.starts_with("HTTP/1.1 200"), "{headers:?}: {answer}");
        }
        assert_eq!(server.calls(), 0);
        ask(&address, &Credentials::None).await.unwrap();
        assert_eq!(server.calls(), 1);
    }

    #[tokio::test]
    async fn where_a_worker_is_watched_in_plain_text_a_page_calls_nothing() {
        let server = Counting::default();
        let listener = open().await;
        let address = listener.address().unwrap();
        let watching = Router::new().route("/metrics", axum::routing::get(|| async { "counts" }));
        tokio::spawn(serve_watched(listener, Some(server.routes()), watching, std::future::pending()));
        let evil = "origin: http://evil.example";
        for (line, headers, status, calls) in [
            (CALL, &["content-type: text/plain"][..], 415, 0),
            (CALL, &["content-type: text/plain", evil], 403, 0),
            (CALL, &[], 415, 0),
            (CALL, &[GRPC, evil], 403, 0),
            (CALL, &[GRPC, "origin: null"], 403, 0),
            (CALL, &[GRPC, "host: evil.example"], 421, 0),
            ("GET /host.v1.Registry/Heartbeat", &[GRPC], 405, 0),
            (CALL, &[GRPC], 200, 1),
            (CALL, &["content-type: application/grpc+proto", "host: localhost:1"], 200, 2),
            ("GET /metrics", &[], 200, 2),
            ("GET /metrics", &["host: localhost"], 200, 2),
            ("GET /metrics", &["host: evil.example"], 421, 2),
            ("GET /metrics", &[evil], 403, 2),
        ] {
            let answer = over_http1(&address, line, headers).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{line} {headers:?}: {answer}");
            assert_eq!(server.calls(), calls, "{line} {headers:?}");
        }
        ask(&address, &Credentials::None).await.unwrap();
        assert_eq!(server.calls(), 3);
    }

    #[tokio::test]
    async fn a_call_with_an_origin_or_to_another_name_is_refused() {
        let server = Counting::default();
        let address = server.on(open().await);
        let mut request = tonic::Request::new(HeartbeatRequest::default());
        request.metadata_mut().insert("origin", "http://evil.example".parse().unwrap());
        let refused = client(&address, &Credentials::None).heartbeat(request).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
        for (name, is_answered) in [("http://evil.example", false), ("http://localhost:1", true)] {
            let endpoint = Endpoint::from_shared(address.to_string()).unwrap().origin(name.parse().unwrap());
            let channel = endpoint.connect().await.unwrap();
            let answer = RegistryClient::new(channel).heartbeat(HeartbeatRequest::default()).await;
            assert_eq!(answer.is_ok(), is_answered, "{name}");
        }
        assert_eq!(server.calls(), 1);
    }
}

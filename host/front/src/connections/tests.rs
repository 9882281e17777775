mod tls;

use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, Bytes};
use axum::routing::get;
use futures_util::stream;
use host_tests::wait::{PATIENCE, answered_until};
use hyper_util::rt::TokioExecutor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};

use super::*;

/// Longer than a test takes on any machine. Tests let it pass on tokio's clock.
const HEAD: Duration = Duration::from_secs(300);
const ASK: &[u8] = b"GET /now HTTP/1.1\r\nhost: x\r\n\r\n";

async fn listening(routes: axum::Router, limits: Limits) -> (std::net::SocketAddr, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopping) = watch::channel(false);
    tokio::spawn(serve(listener, routes, limits, stopping));
    (address, stop)
}

fn limits(connections: usize) -> Limits {
    Limits { head: HEAD, connections }
}

fn now() -> axum::Router {
    axum::Router::new().route("/now", get(|| async { "answered" }))
}

/// Everything that arrives until the server closes.
async fn rest(connection: &mut TcpStream) -> String {
    let mut all = Vec::new();
    let mut piece = [0; 1024];
    while let Ok(count) = connection.read(&mut piece).await
        && count > 0
    {
        all.extend_from_slice(&piece[..count]);
    }
    String::from_utf8(all).unwrap()
}

/// Awaits something while the time for a head passes again and again, because the server may see a connection late. Awaits
/// `between` after each passing.
async fn in_time<T>(what: &str, awaited: impl Future<Output = T>, mut between: impl AsyncFnMut()) -> T {
    let mut awaited = std::pin::pin!(awaited);
    let mut passed = 0;
    answered_until(what, async || {
        tokio::time::pause();
        tokio::time::advance(HEAD).await;
        tokio::time::resume();
        passed += 1;
        between().await;
        // Waits in real time before the next advance, because the clock of the runtime counts a few years at most.
        let come = tokio::time::timeout(Duration::from_millis(5), &mut awaited).await;
        come.map_err(|_elapsed| format!("the time for a head has passed {passed} times"))
    })
    .await
}

/// Everything that arrives until the server closes, while the time for a head passes.
async fn rest_in_time(connection: &mut TcpStream) -> String {
    in_time("the server to close a connection", rest(connection), async || {}).await
}

async fn until_it_says(connection: &mut TcpStream, text: &str) {
    let mut all = Vec::new();
    while !String::from_utf8_lossy(&all).contains(text) {
        assert!(connection.read_buf(&mut all).await.unwrap() > 0, "closed before {text:?}");
    }
}

#[tokio::test]
async fn a_connection_without_a_whole_head_is_closed() {
    let (address, _stop) = listening(now(), limits(8)).await;
    // Heads that are not complete: nothing, the beginning of HTTP/1, enough to know that it is HTTP/1, and the beginning of
    // HTTP/2.
    let mut connections = Vec::new();
    for said in ["", "P", "GET /now HTTP/1.1\r\nhost: x\r\n", "PRI * HTTP/2.0\r\n"] {
        let mut connection = TcpStream::connect(address).await.unwrap();
        connection.write_all(said.as_bytes()).await.unwrap();
        connections.push((said, connection));
    }
    for (said, mut connection) in connections {
        assert_eq!(rest_in_time(&mut connection).await, "", "{said:?}");
    }
}

#[tokio::test]
async fn a_head_of_more_than_16_kib_is_refused_and_ends_its_connection() {
    let (address, _stop) = listening(now(), limits(8)).await;
    let head = |bytes: usize| {
        let (begin, end) = ("GET /now HTTP/1.1\r\nhost: x\r\nauthorization: ", "\r\n\r\n");
        format!("{begin}{}{end}", "k".repeat(bytes - begin.len() - end.len()))
    };
    assert_eq!(HEAD_BYTES, 16 << 10);
    for bytes in [8 << 10, HEAD_BYTES] {
        let mut connection = TcpStream::connect(address).await.unwrap();
        for _again in 0..2 {
            connection.write_all(head(bytes).as_bytes()).await.unwrap();
            until_it_says(&mut connection, "answered").await;
        }
    }
    // The last byte is never sent: if the server had not read all that was sent, its answer might be lost.
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection.write_all(&head(HEAD_BYTES + 1).as_bytes()[..HEAD_BYTES]).await.unwrap();
    let answer = rest(&mut connection).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer:?}");
}

#[tokio::test]
async fn a_connection_that_asks_no_more_is_closed() {
    let (address, _stop) = listening(now(), limits(8)).await;
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection.write_all(ASK).await.unwrap();
    until_it_says(&mut connection, "answered").await;
    connection.write_all(ASK).await.unwrap();
    until_it_says(&mut connection, "answered").await;
    assert_eq!(rest_in_time(&mut connection).await, "");
}

#[tokio::test]
async fn an_answer_under_way_may_last_longer_than_the_wait_for_a_head() {
    let (tokens, received) = mpsc::channel::<Bytes>(4);
    let received = Arc::new(Mutex::new(Some(received)));
    let stream = move || {
        let received = received.lock().unwrap().take().unwrap();
        let pieces = stream::unfold(received, async |mut received| {
            Some((Ok::<_, Infallible>(received.recv().await?), received))
        });
        async move { Body::from_stream(pieces) }
    };
    let (address, _stop) = listening(now().route("/stream", get(stream)), limits(8)).await;
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection.write_all(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    tokens.send("first".into()).await.unwrap();
    until_it_says(&mut connection, "first").await;
    // A later connection that sends nothing is closed: so the time for a head has passed.
    let mut silent = TcpStream::connect(address).await.unwrap();
    assert_eq!(rest_in_time(&mut silent).await, "");
    tokens.send("second".into()).await.unwrap();
    until_it_says(&mut connection, "second").await;
    drop(tokens);
    let rest = rest_in_time(&mut connection).await;
    assert!(rest.ends_with("0\r\n\r\n"), "{rest:?}");
}

/// Log lines, in the order in which they were written.
#[derive(Clone)]
struct Lines(mpsc::UnboundedSender<String>);

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        drop(self.0.send(String::from_utf8_lossy(line).into_owned()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn connections_over_the_limit_wait_and_a_line_says_so() {
    let (line, mut lines) = mpsc::unbounded_channel();
    let writer = Lines(line);
    let _logging = tracing::subscriber::set_default(
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish(),
    );
    let (release, running) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
    let held = {
        let (release, running) = (Arc::clone(&release), Arc::clone(&running));
        move || async move {
            running.fetch_add(1, Ordering::SeqCst);
            release.notified().await;
            "answered"
        }
    };
    let routes = axum::Router::new().route("/now", get(held));
    let (address, _stop) = listening(routes, limits(1)).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        clients.push(client);
    }
    let said = lines.recv().await.unwrap();
    assert!(said.contains("WARN") && said.contains("ulimit -n") && said.contains("most=1"), "{said}");
    // The server serves one after the other: it accepts the next when the one before was answered and closed.
    for (index, client) in clients.iter_mut().enumerate() {
        release.notify_one();
        assert!(rest(client).await.ends_with("answered"));
        assert!(running.load(Ordering::SeqCst) <= index + 2, "more were accepted than the limit");
    }
    assert!(lines.try_recv().is_err(), "said once, not for each");
}

#[tokio::test]
async fn a_stop_ends_idle_connections_and_lets_requests_end() {
    let release = Arc::new(Notify::new());
    let (begun, mut beginning) = mpsc::channel::<()>(1);
    let held = {
        let release = Arc::clone(&release);
        move || async move {
            begun.send(()).await.unwrap();
            release.notified().await;
            "answered"
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopping) = watch::channel(false);
    let limits = limits(4);
    let serving =
        tokio::spawn(serve(listener, axum::Router::new().route("/now", get(held)), limits, stopping));
    let mut silent = TcpStream::connect(address).await.unwrap();
    let mut asking = TcpStream::connect(address).await.unwrap();
    asking.write_all(ASK).await.unwrap();
    beginning.recv().await.unwrap();
    stop.send_replace(true);
    assert_eq!(rest(&mut silent).await, "");
    assert!(!serving.is_finished(), "a request is under way");
    release.notify_one();
    assert!(rest(&mut asking).await.ends_with("answered"));
    serving.await.unwrap();
}

#[test]
fn connections_leave_descriptors_to_the_rest() {
    for (descriptors, connections) in [(0, 1), (1, 1), (128, 96), (1024, 768), (u64::MAX, MOST_CONNECTIONS)] {
        assert_eq!(connections_within(descriptors), connections, "{descriptors}");
    }
}

/// An HTTP/2 connection, and a task that ends when it has ended.
async fn http2(
    address: std::net::SocketAddr,
    window: u32,
) -> (hyper::client::conn::http2::SendRequest<Body>, tokio::task::JoinHandle<()>) {
    let connection = TcpStream::connect(address).await.unwrap();
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(window);
    let (requests, driver) = builder.handshake(TokioIo::new(connection)).await.unwrap();
    let ended = tokio::spawn(async move {
        drop(driver.await);
    });
    (requests, ended)
}

/// Waits for the end of a connection while the time for a head passes.
async fn ends_in_time(ended: &mut tokio::task::JoinHandle<()>) {
    in_time("the end of a connection", ended, async || {}).await.unwrap();
}

/// Returns when the server has read all that this connection has sent, its answers to the server's own pings included. Because
/// the tests let time jump, a client can answer those pings soon enough only in this way.
async fn is_heard(pings: &mut h2::PingPong) {
    // Behind its first ping the client gets the server's ping. Before the second, the server gets its answer. By the third, the
    // server has read it.
    for _ in 0..3 {
        pings.ping(h2::Ping::opaque()).await.expect("the connection that waits is kept");
    }
}

async fn ask(
    requests: &mut hyper::client::conn::http2::SendRequest<Body>,
    path: &str,
) -> axum::http::Response<Incoming> {
    let request = axum::http::Request::get(format!("http://x{path}")).body(Body::empty()).unwrap();
    requests.send_request(request).await.unwrap()
}

#[tokio::test]
async fn an_http2_connection_that_asks_no_more_is_closed() {
    let (address, _stop) = listening(now(), limits(8)).await;
    let (mut requests, mut ended) = http2(address, 1 << 16).await;
    assert_eq!(ask(&mut requests, "/now").await.status(), 200);
    ends_in_time(&mut ended).await;
}

#[tokio::test]
async fn a_connection_whose_client_reads_nothing_is_closed_and_one_that_waits_is_kept() {
    let (tokens, received) = mpsc::channel::<Bytes>(4);
    let received = Arc::new(Mutex::new(Some(received)));
    let waits = move || {
        let received = received.lock().unwrap().take().unwrap();
        let pieces = stream::unfold(received, async |mut received| {
            Some((Ok::<_, Infallible>(received.recv().await?), received))
        });
        async move { Body::from_stream(pieces) }
    };
    let routes = now().route("/waits", get(waits)).route("/large", get(|| async { vec![b'x'; 10 << 20] }));
    let (address, _stop) = listening(routes, limits(8)).await;
    // The answer of this stream waits for this server.
    let (mut waiting, mut driver) =
        h2::client::handshake(TcpStream::connect(address).await.unwrap()).await.unwrap();
    let mut pings = driver.ping_pong().unwrap();
    let mut waiting_ended = tokio::spawn(async move { drop(driver.await) });
    let request = axum::http::Request::get("http://x/waits").body(()).unwrap();
    let mut answer = waiting.send_request(request, true).unwrap().0.await.unwrap().into_body();
    // This client's window is 0: nothing may be sent to it, although its answer is there.
    let (mut unread, mut unread_ended) = http2(address, 0).await;
    let _unread_answer = ask(&mut unread, "/large").await;
    in_time("the end of HTTP/2", &mut unread_ended, async || is_heard(&mut pings).await).await.unwrap();
    // The same with HTTP/1. The answer is larger than all buffers on the way.
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection.write_all(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    until_it_says(&mut connection, "xx").await;
    let rest = in_time("the end of HTTP/1", rest(&mut connection), async || is_heard(&mut pings).await).await;
    assert!(rest.len() < 10 << 20, "all of it came");
    assert!(!waiting_ended.is_finished());
    tokens.send("token".into()).await.unwrap();
    drop(tokens);
    let mut read = Vec::new();
    while let Some(data) = answer.data().await {
        read.extend_from_slice(&data.unwrap());
    }
    assert_eq!(read, b"token");
    ends_in_time(&mut waiting_ended).await;
}

#[tokio::test]
async fn a_client_beyond_its_share_of_connections_is_closed_and_another_is_served() {
    let (address, _stop) = listening(now(), limits(20)).await;
    let mut kept = Vec::new();
    for _ in 0..30 {
        let mut connection = TcpStream::connect(address).await.unwrap();
        connection.write_all(ASK).await.unwrap();
        let mut first = [0; 8];
        if connection.read_exact(&mut first).await.is_ok() {
            kept.push(connection);
        }
    }
    assert_eq!(kept.len(), 16);
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 2], 0).into()).unwrap();
    let mut other = socket.connect(address).await.unwrap();
    other.write_all(ASK).await.unwrap();
    until_it_says(&mut other, "answered").await;
}

#[tokio::test]
async fn a_client_beyond_its_share_of_streams_gets_no_more_on_any_connection_and_another_is_served() {
    let places = Places { streams: Shares::new(20), ..Places::from(limits(8)) };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_stop, stopping) = watch::channel(false);
    tokio::spawn(serve(listener, now(), places, stopping));
    let mut kept = Vec::new();
    for _connection in 0..3 {
        // The client lets no byte of an answer come.
        let (mut requests, driver) = http2(address, 0).await;
        let mut refused = 0;
        let mut unread = Vec::new();
        for _stream in 0..10 {
            let request = axum::http::Request::get("http://x/now").body(Body::empty()).unwrap();
            match requests.send_request(request).await {
                Ok(answer) => unread.push(answer),
                Err(_reset) => refused += 1,
            }
        }
        kept.push((unread, refused, requests, driver));
    }
    let refused: Vec<i32> = kept.iter().map(|(_, refused, _, _)| *refused).collect();
    assert_eq!(refused, [0, 4, 10]);
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 2], 0).into()).unwrap();
    let mut other = socket.connect(address).await.unwrap();
    other.write_all(ASK).await.unwrap();
    until_it_says(&mut other, "answered").await;
    // Streams that end leave room.
    drop(kept.remove(0));
    let served = async {
        loop {
            let mut again = TcpStream::connect(address).await.unwrap();
            again.write_all(ASK).await.unwrap();
            if again.read_exact(&mut [0; 8]).await.is_ok() {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, served).await.expect("streams that ended still count");
}

/// An answer of this many bytes, and a weak reference that tells whether it is still in memory.
fn kept(bytes: usize) -> (Bytes, std::sync::Weak<()>) {
    struct Kept(Vec<u8>, #[expect(dead_code, reason = "its drop is what is looked at")] Arc<()>);
    impl AsRef<[u8]> for Kept {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let is_kept = Arc::new(());
    let kept = Arc::downgrade(&is_kept);
    (Bytes::from_owner(Kept(vec![b'x'; bytes], is_kept)), kept)
}

/// Of each answer the client takes nothing, a part, or all but the last piece.
#[tokio::test]
async fn streams_that_are_not_read_end_alone_and_another_of_their_connection_goes_on() {
    const SIZES: [usize; 4] = [100, 16 << 10, 17 << 10, 10 << 20];
    for window in [0, 50, 1 << 16] {
        let (tokens, received) = mpsc::channel::<Bytes>(4);
        let received = Arc::new(Mutex::new(Some(received)));
        let waits = move || {
            let received = received.lock().unwrap().take().unwrap();
            let pieces = stream::unfold(received, async |mut received| {
                Some((Ok::<_, Infallible>(received.recv().await?), received))
            });
            async move { Body::from_stream(pieces) }
        };
        let answers: Vec<_> = SIZES.into_iter().map(kept).collect();
        let sizes = answers.iter().map(|(bytes, _)| bytes.len()).collect::<Vec<_>>();
        let in_memory: Vec<_> = answers.iter().map(|(_, kept)| kept.clone()).collect();
        let mut routes = axum::Router::new().route("/waits", get(waits));
        for (number, (bytes, _)) in answers.into_iter().enumerate() {
            let once = Arc::new(Mutex::new(Some(bytes)));
            let handler = move || async move { once.lock().unwrap().take().unwrap() };
            routes = routes.route(&format!("/{number}"), get(handler));
        }
        let (address, _stop) = listening(routes, limits(8)).await;
        let mut builder = h2::client::Builder::new();
        // The window of the connection has room for all of its streams.
        builder.initial_window_size(window).initial_connection_window_size(1 << 20);
        let connection = TcpStream::connect(address).await.unwrap();
        let (mut requests, mut driver) = builder.handshake::<_, Bytes>(connection).await.unwrap();
        let mut pings = driver.ping_pong().unwrap();
        let ended = tokio::spawn(async move { drop(driver.await) });
        let mut asked = async |path: String| {
            let request = axum::http::Request::get(format!("http://x{path}")).body(()).unwrap();
            requests.send_request(request, true).unwrap().0.await.unwrap().into_body()
        };
        let mut waiting = asked("/waits".to_owned()).await;
        let mut unread = Vec::new();
        for number in 0..SIZES.len() {
            unread.push(asked(format!("/{number}")).await);
        }
        let freed = async {
            while in_memory.iter().any(|kept| kept.strong_count() > 0) {
                tokio::task::yield_now().await;
            }
        };
        let what = format!("answers to leave the memory, with a window of {window} bytes");
        in_time(&what, freed, async || is_heard(&mut pings).await).await;
        for (mut body, size) in unread.into_iter().zip(sizes) {
            let (mut read, mut end) = (0, None);
            while let Some(data) = body.data().await {
                match data {
                    Ok(data) => read += data.len(),
                    // After the end of a connection this error comes again and again.
                    Err(error) => {
                        end = Some(error);
                        break;
                    }
                }
            }
            let is_whole = size <= window as usize;
            let reason = end.as_ref().and_then(h2::Error::reason);
            assert_eq!(
                reason,
                (!is_whole).then_some(h2::Reason::CANCEL),
                "window {window}, {size} bytes: {end:?}"
            );
            assert_eq!(read, size.min(window as usize), "window {window}");
        }
        assert!(!ended.is_finished());
        tokens.send("token".into()).await.unwrap();
        drop(tokens);
        if window >= 5 {
            assert_eq!(waiting.data().await.unwrap().unwrap(), "token");
        }
    }
}

//! Clients that take more than their share of places, threads or memory. Other clients are still served.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::Request;
use host_front::front::FrontConfig;
use host_front::text::decode::Utf8Stream;
use host_front::text::{ByteTokenizer, ChatTemplate, TextError, TextStream, Tokenizer};
use host_tests::wait::{PATIENCE, answered_until};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;

use super::client::{connect_from, send_from};
use super::fake_worker::{Step, echoes, steps};
use super::fixture::{Front, config, passes};
use super::gated::with_gate;

const PATH: &str = "/v1/completions";
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

fn body(stream: bool) -> Value {
    json!({"model": "fake", "prompt": "abc", "max_tokens": 50, "temperature": 0, "stream": stream})
}

/// An HTTP/2 connection whose client allows no byte of any answer to be sent.
async fn without_window(front: &Front) -> http2::SendRequest<Body> {
    let connection = connect_from(HERE, front.http).await;
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(0);
    let (requests, driver) = builder.handshake(TokioIo::new(connection)).await.unwrap();
    tokio::spawn(driver);
    requests
}

async fn post(
    requests: &mut http2::SendRequest<Body>,
    front: &Front,
) -> hyper::Response<hyper::body::Incoming> {
    let request = Request::post(format!("http://{}{PATH}", front.http))
        .header("content-type", "application/json")
        .body(Body::from(body(true).to_string()))
        .unwrap();
    requests.send_request(request).await.unwrap()
}

#[tokio::test]
async fn answers_that_are_never_read_give_their_places_back() {
    let mut config = config();
    config.max_requests = 8;
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let mut kept = Vec::new();
    for _ in 0..3 {
        let mut requests = without_window(&front).await;
        for _ in 0..20 {
            // A place is free again soon after each answer: 60 unread answers fit into 8 places.
            let answer = answered_until("an answer that is not read to give its place back", async || {
                let answer = post(&mut requests, &front).await;
                if answer.status() == 200 { Ok(answer) } else { Err(answer.status()) }
            })
            .await;
            kept.push(answer);
        }
        kept.reserve(20);
        front.until_metrics_say("host_requests_running 0").await;
    }
    let reply = front.post(PATH, &body(false)).await;
    assert_eq!(reply.status, 200);
    assert_eq!(kept.len(), 60);
}

#[tokio::test]
async fn a_client_with_its_share_of_the_places_gets_429_and_another_is_served() {
    let mut config = config();
    config.max_requests = 10;
    let mut front = Front::start(config).await;
    let worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let mut holding = Vec::new();
    let body_of = |stream| body(stream).to_string();
    let refused = loop {
        let reply = send_from(HERE, front.http, "POST", PATH, &[], body_of(true).as_bytes()).await;
        if reply.status != 200 {
            break reply;
        }
        holding.push(reply);
    };
    assert_eq!((holding.len(), refused.status, refused.header("retry-after")), (8, 429, Some("1")));
    let error = refused.json().await;
    assert_eq!(error["error"]["code"], "rate_limit_exceeded", "{error}");
    let other = send_from(ELSEWHERE, front.http, "POST", PATH, &[], body_of(true).as_bytes()).await;
    assert_eq!(other.status, 200);
    drop((holding, other));
    worker.watch.cancelled(9).await;
    front.until_metrics_say("host_requests_running 0").await;
}

/// In these tests, one thread serves all of the front's connections: work on text would block that thread.
#[tokio::test]
async fn while_texts_are_tokenized_other_requests_are_answered() {
    let (front, _worker, gate) = with_gate(config(), echoes()).await;
    let short = tokio::spawn(send_body(front.http, body(false)));
    gate.until_begun(1).await;
    assert_eq!(front.get("/v1/models").await.status, 200);
    gate.open();
    assert_eq!(short.await.unwrap(), 200);
}

async fn send_body(to: std::net::SocketAddr, body: Value) -> u16 {
    send_from(HERE, to, "POST", PATH, &[], body.to_string().as_bytes()).await.status
}

#[tokio::test]
async fn requests_that_are_abandoned_while_their_text_waits_are_never_tokenized() {
    let (front, _worker, gate) = with_gate(config(), echoes()).await;
    let mut long = body(false);
    long["prompt"] = "x".repeat(100_000).into();
    let abandoned: Vec<_> = (0..40).map(|_| tokio::spawn(send_body(front.http, long.clone()))).collect();
    gate.until_begun(1).await;
    front.until_metrics_say("host_requests_running 40").await;
    for task in abandoned {
        task.abort();
    }
    front.until_metrics_say("host_requests_running 0").await;
    // Short bodies do not wait behind long ones.
    let short = tokio::spawn(send_body(front.http, body(false)));
    let before = gate.begun.load(Ordering::SeqCst);
    gate.until_begun(before + 1).await;
    gate.open();
    assert_eq!(short.await.unwrap(), 200);
    assert_eq!(send_body(front.http, long).await, 400, "it is longer than the context");
    let (begun, most) = (gate.begun.load(Ordering::SeqCst), gate.most_working.load(Ordering::SeqCst));
    let threads = std::thread::available_parallelism().unwrap().get();
    assert!(most <= threads.min(8) + 1 && begun <= threads.min(8) + 2, "{most} at once, {begun} in all");
}

#[tokio::test]
async fn a_client_with_its_share_of_text_that_waits_gets_429_and_another_is_served() {
    let config = FrontConfig { max_text_bytes: 1_000_000, ..config() };
    let (front, _worker, gate) = with_gate(config, echoes()).await;
    // A body that counts as long, with a prompt of three tokens.
    let padded = body(false).to_string() + &" ".repeat(100_000);
    let send = |from| {
        let (to, body) = (front.http, padded[..100_000].to_owned());
        async move { send_from(from, to, "POST", PATH, &[], body.as_bytes()).await }
    };
    let mut waiting = Vec::new();
    for count in 1..=8 {
        waiting.push(tokio::spawn(send(HERE)));
        front.until_metrics_say(&format!("host_requests_running {count}\n")).await;
    }
    let refused = send(HERE).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    let message = refused.json().await["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("bytes of requests that wait to be read"), "{message}");
    waiting.push(tokio::spawn(send(ELSEWHERE)));
    front.until_metrics_say("host_requests_running 9\n").await;
    gate.open();
    for answered in waiting {
        assert_eq!(answered.await.unwrap().status, 200);
    }
    // A body that was read takes no share any more.
    assert_eq!(send(HERE).await.status, 200);
}

/// A tokenizer with tokens of up to four bytes, which counts the texts that it gets.
struct Counting {
    bytes: Arc<ByteTokenizer>,
    texts: AtomicUsize,
}

impl Tokenizer for Counting {
    fn encode(&self, text: &str, _add_special: bool) -> Result<Vec<u32>, TextError> {
        self.texts.fetch_add(1, Ordering::SeqCst);
        Ok(text.as_bytes().chunks(4).map(|chunk| chunk[0].into()).collect())
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        self.bytes.token_bytes(token)
    }

    fn is_special(&self, token: u32) -> bool {
        self.bytes.is_special(token)
    }

    fn vocabulary(&self) -> u32 {
        self.bytes.vocabulary()
    }

    fn least_tokens(&self, text: &str) -> Option<usize> {
        Some(text.len().div_ceil(4))
    }

    fn stream(self: Arc<Self>, specials: host_front::text::Specials) -> Box<dyn TextStream> {
        Arc::clone(&self.bytes).stream(specials)
    }
}

#[tokio::test]
async fn a_prompt_whose_bytes_cannot_fit_is_refused_before_it_is_tokenized() {
    let tokenizer =
        Arc::new(Counting { bytes: Arc::new(ByteTokenizer::new(300)), texts: AtomicUsize::new(0) });
    let mut config = config();
    config.text.tokenizer = tokenizer.clone();
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let bodies = |text: &str| {
        [
            (PATH, json!({"model": "fake", "prompt": text, "max_tokens": 1})),
            ("/generate", json!({"text": text, "sampling_params": {"max_new_tokens": 1}})),
            (
                "/v1/chat/completions",
                json!({"model": "fake", "messages": [{"role": "user", "content": text}]}),
            ),
        ]
    };
    // The worker holds 512 tokens, of which an answer needs one.
    for (path, body) in bodies(&"x".repeat(511 * 4 + 1)) {
        let reply = front.post(path, &body).await;
        assert_eq!(reply.status, 400, "{path}");
        let error = reply.json().await["error"].clone();
        assert_eq!(error["code"], "context_length_exceeded", "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("holds 512 tokens") && message.contains("has at least 51"), "{message}");
    }
    assert_eq!(tokenizer.texts.load(Ordering::SeqCst), 0);
    let (path, body) = &bodies(&"x".repeat(511 * 4))[0];
    assert_eq!(front.post(path, body).await.status, 200);
    assert_eq!(tokenizer.texts.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_template_makes_no_longer_text_of_a_conversation_than_memory_is_for() {
    let template = "{% for a in range(messages[0].content | int) %}{{ 'x' * 1024 }}{% endfor %}";
    let template = ChatTemplate::new(template.into(), String::new(), String::new()).unwrap();
    let mut config = config();
    config.text.template = Some(Arc::new(template));
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    // Texts for each of the turns, all of them longer than the context, and one for none.
    for (kib, code, words) in [
        ("2", json!("context_length_exceeded"), "512 tokens"),
        ("200", json!("context_length_exceeded"), "512 tokens"),
        ("1500", json!("context_length_exceeded"), "512 tokens"),
        ("9000", Value::Null, "more than 8388608 bytes of text from messages"),
    ] {
        let messages = json!([{"role": "user", "content": kib}]);
        for (path, input, length) in [
            ("/v1/chat/completions", "messages", "max_tokens"),
            ("/v1/responses", "input", "max_output_tokens"),
        ] {
            let reply = front.post(path, &json!({input: messages, length: 1})).await;
            assert_eq!(reply.status, 400, "{path} {kib}");
            let error = reply.json().await["error"].clone();
            let words = words.replace("messages", input);
            assert!(error["code"] == code && error["message"].as_str().unwrap().contains(&words), "{error}");
        }
        let reply = front.post("/tokenize", &json!({"messages": messages})).await;
        assert_eq!(reply.status, if code.is_null() { 400 } else { 200 }, "{kib}");
    }
    front.until_metrics_say("host_text_bytes 0\n").await;
}

#[tokio::test]
async fn a_body_that_never_ends_holds_no_place_and_the_bytes_that_came() {
    let mut config = config();
    config.max_requests = 1;
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let mut requests = without_window(&front).await;
    let mut open = Vec::new();
    for _ in 0..50 {
        let (sender, received) = tokio::sync::mpsc::channel::<Result<Bytes, std::io::Error>>(1);
        sender.send(Ok(Bytes::from(vec![b' '; 1000]))).await.unwrap();
        let request = Request::post(format!("http://{}{PATH}", front.http))
            .body(Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(received)))
            .unwrap();
        open.push((sender, requests.send_request(request)));
    }
    let reply = front.post(PATH, &body(false)).await;
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn streams_that_are_reset_as_soon_as_they_begin_leave_nothing() {
    let mut config = config();
    config.max_requests = 8;
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let mut begun = 0;
    for _ in 0..4 {
        let mut requests = without_window(&front).await;
        // Sends until the server hangs up, or until enough requests were sent.
        for _ in 0..5000 {
            if requests.ready().await.is_err() {
                break;
            }
            let request = Request::post(format!("http://{}{PATH}", front.http))
                .header("content-type", "application/json")
                .body(Body::from(body(true).to_string()))
                .unwrap();
            // The request is written, and the drop resets its stream.
            drop(timeout(Duration::ZERO, requests.send_request(request)).await);
            tokio::task::yield_now().await;
            begun += 1;
        }
    }
    assert!(begun > 100, "{begun}");
    front.until_metrics_say("host_requests_running 0").await;
    assert_eq!(front.post(PATH, &body(false)).await.status, 200);
}

#[tokio::test]
async fn headers_that_never_end_and_frames_that_ask_for_answers_take_no_memory() {
    /// A server that takes this many bytes keeps them in memory, or works on them.
    const MOST: usize = 64 << 20;
    /// A server that reads a connection takes something of it while it answers so many other requests.
    const MANY: usize = 100;
    /// The beginning of an HTTP/2 connection: the preface and empty settings.
    const BEGINNING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let mut front = Front::start(config()).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    // Headers of stream 1 that are not the last ones (":method: GET"), and more of the same without end.
    let headers = [0, 0, 1, 0x1, 0, 0, 0, 0, 1, 0x82];
    let continuation = [&[0, 0x27, 0x10, 0x9, 0, 0, 0, 0, 1][..], &[0x82; 10_000]].concat();
    // The server has to acknowledge each frame, to a client that reads nothing.
    let settings = [0, 0, 0, 0x4, 0, 0, 0, 0, 0].repeat(1000);
    let ping = [&[0, 0, 8, 0x6, 0, 0, 0, 0, 0][..], &[1; 8]].concat().repeat(1000);
    for (name, first, again) in
        [("headers", &headers[..], continuation), ("settings", &[], settings), ("pings", &[], ping)]
    {
        let mut connection = connect_from(HERE, front.http).await;
        connection.write_all(&[BEGINNING, first].concat()).await.unwrap();
        let taken = Arc::new(AtomicUsize::new(0));
        let counted = taken.clone();
        let sending = tokio::spawn(async move {
            while counted.load(Ordering::SeqCst) < MOST && connection.write_all(&again).await.is_ok() {
                counted.fetch_add(again.len(), Ordering::SeqCst);
            }
        });
        // Sends until the server hangs up, or stops reading: it serves others and takes nothing of this connection.
        let (mut sent, mut served) = (0, 0);
        while !sending.is_finished() && served < MANY {
            assert_eq!(front.get("/v1/models").await.status, 200);
            let now = taken.load(Ordering::SeqCst);
            served = if now > sent { 0 } else { served + 1 };
            sent = now;
        }
        sending.abort();
        let sent = taken.load(Ordering::SeqCst);
        println!("{name}: {sent} bytes were taken");
        assert!(sent < MOST, "{name}");
        assert_eq!(front.post(PATH, &body(false)).await.status, 200);
    }
}

/// An HTTP/2 connection whose client lets the server send `window` bytes of each answer before the client reads.
async fn with_window(front: &Front, window: u32) -> h2::client::SendRequest<Bytes> {
    let connection = connect_from(HERE, front.http).await;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(window).initial_connection_window_size(1 << 30);
    let (requests, driver) = builder.handshake(connection).await.unwrap();
    tokio::spawn(driver);
    requests.ready().await.unwrap()
}

/// Sends a request, and returns the head of its answer. The body is not read.
async fn ask(
    requests: &mut h2::client::SendRequest<Bytes>,
    path: &str,
    body: &Value,
) -> hyper::Response<h2::RecvStream> {
    let request = Request::post(format!("http://localhost{path}")).header("content-type", "application/json");
    let mut ready = requests.clone().ready().await.unwrap();
    let (answer, mut sent) = ready.send_request(request.body(()).unwrap(), false).unwrap();
    sent.send_data(Bytes::from(body.to_string()), true).unwrap();
    answer.await.unwrap()
}

/// The bytes that can be read of an answer, and how it ended.
async fn read(answer: hyper::Response<h2::RecvStream>) -> (Vec<u8>, Option<h2::Reason>) {
    let (mut body, mut all) = (answer.into_body(), Vec::new());
    while let Some(data) = timeout(PATIENCE, body.data()).await.expect("no more of the body comes") {
        match data {
            Ok(data) => {
                body.flow_control().release_capacity(data.len()).unwrap();
                all.extend_from_slice(&data);
            }
            Err(error) => return (all, error.reason()),
        }
    }
    (all, None)
}

#[tokio::test]
async fn answers_that_are_not_read_are_a_share_of_bytes_and_end_although_their_connection_waits() {
    let mut config = config();
    config.max_answer_bytes = 1_000_000;
    config.connections.head = Duration::from_secs(20);
    let mut front = Front::start(config).await;
    let worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let mut requests = with_window(&front, 1000).await;
    // This answer waits for the server as long as the test lasts, so the connection is never idle.
    let mut waiting = ask(&mut requests, PATH, &body(true)).await.into_body();
    assert!(waiting.data().await.unwrap().is_ok());
    // The answer of `/detokenize` has the text twice.
    let tokens = json!({"tokens": vec![97; 20_000]});
    let mut unread = Vec::new();
    let refused = loop {
        assert!(unread.len() < 100, "a client holds 4 MB of answers, and 800 kB are its share");
        let answer = ask(&mut requests, "/detokenize", &tokens).await;
        if answer.status() != 200 {
            break answer;
        }
        unread.push(answer);
    };
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"1".parse().unwrap()));
    let message = String::from_utf8(read(refused).await.0).unwrap();
    assert!(message.contains("answers that it has not read"), "{message}");
    let body = tokens.to_string();
    let other = send_from(ELSEWHERE, front.http, "POST", "/detokenize", &[], body.as_bytes());
    assert_eq!(other.await.text().await.len(), 40_023);
    // Each unread answer ends after its deadline and frees its resources. Answers that the server has not begun to write by now
    // end in real time.
    passes(Duration::from_secs(21)).await;
    answered_until("what is not read to be given up", async || {
        let metrics = send_from(ELSEWHERE, front.http, "GET", "/metrics", &[], b"").await.text().await;
        if metrics.contains("host_answer_bytes 0\n") { Ok(()) } else { Err(metrics) }
    })
    .await;
    for answer in unread {
        let (read, end) = read(answer).await;
        assert_eq!((read.len(), end), (1000, Some(h2::Reason::CANCEL)));
    }
    let answer = ask(&mut requests, "/detokenize", &tokens).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(read(answer).await.0.len(), 40_023);
    assert_eq!(worker.watch.cancelled_by_now(), 0, "the one that waits goes on");
}

/// A tokenizer whose tokens stand for `LONG` bytes each. Counts the tokens that were turned into text.
struct Long {
    bytes: Arc<ByteTokenizer>,
    decoded: AtomicUsize,
}

const LONG: usize = 128;

impl Tokenizer for Long {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.bytes.encode(text, add_special)
    }

    fn token_bytes(&self, _token: u32) -> Vec<u8> {
        self.decoded.fetch_add(1, Ordering::SeqCst);
        vec![b'x'; LONG]
    }

    fn is_special(&self, token: u32) -> bool {
        self.bytes.is_special(token)
    }

    fn vocabulary(&self) -> u32 {
        self.bytes.vocabulary()
    }

    fn stream(self: Arc<Self>, specials: host_front::text::Specials) -> Box<dyn TextStream> {
        Box::new(Utf8Stream::new(self, specials))
    }
}

#[tokio::test]
async fn tokens_whose_text_is_longer_than_a_body_are_refused_before_more_of_it_is_made() {
    let tokenizer = Arc::new(Long { bytes: Arc::new(ByteTokenizer::new(300)), decoded: AtomicUsize::new(0) });
    let mut config = config();
    config.text.tokenizer = tokenizer.clone();
    config.max_body = 10_000;
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let decoded = || tokenizer.decoded.swap(0, Ordering::SeqCst);
    let refused = front.post("/detokenize", &json!({"tokens": vec![97; 2000]})).await;
    assert_eq!(refused.status, 400);
    let error = refused.json().await["error"].clone();
    let message = error["message"].as_str().unwrap();
    assert!(error["param"] == "tokens" && message.contains("more than 10000 bytes"), "{error}");
    assert_eq!(decoded(), 10_000 / LONG + 1);
    // If the two texts are equal, one is made, otherwise two.
    for (last, hidden, made) in [(97, 78, 78), (257, 77, 78 + 77)] {
        let tokens = [vec![97; 77], vec![last]].concat();
        let answer = front.post("/detokenize", &json!({"tokens": tokens})).await.json().await;
        let length = |name: &str| answer[name].as_str().unwrap().len();
        assert_eq!((length("prompt"), length("text")), (78 * LONG, hidden * LONG));
        assert_eq!(decoded(), made);
    }
}

/// A front that never compiles a grammar: each grammar waits for its turn.
async fn without_turns() -> (Front, super::fake_worker::FakeWorker) {
    let mut config = config();
    config.grammars = host_grammar::Limits { compiling: 0, waiting_of_a_client: 50, ..config.grammars };
    let mut front = Front::start(config).await;
    let worker = front.worker("all", "aggregated", echoes()).await;
    (front, worker)
}

fn under(number: usize) -> String {
    let mut body = body(false);
    body["regex"] = format!("a{{{number}}}").into();
    body.to_string()
}

#[tokio::test]
async fn while_grammars_wait_to_be_compiled_other_requests_are_answered() {
    let (front, _worker) = without_turns().await;
    // More requests than there are permits for text. Half of them have the same grammar, the others have different ones.
    let count = 16 * std::thread::available_parallelism().unwrap().get();
    let mut waiting = Vec::new();
    for number in 0..count {
        let (to, body) = (front.http, under(if number % 2 == 0 { 0 } else { 1 + number % 50 }));
        waiting.push(tokio::spawn(async move {
            send_from(HERE, to, "POST", PATH, &[], body.as_bytes()).await.status
        }));
    }
    front.until_metrics_say(&format!("host_requests_running {count}\n")).await;
    let plain = send_from(ELSEWHERE, front.http, "POST", PATH, &[], body(false).to_string().as_bytes()).await;
    assert_eq!(plain.status, 200);
    assert!(waiting.iter().all(|task| !task.is_finished()));
    // The waits of grammars have a time limit.
    passes(Duration::from_secs(31)).await;
    for task in waiting {
        assert_eq!(task.await.unwrap(), 503);
    }
}

#[tokio::test]
async fn a_client_with_many_grammars_that_wait_gets_429_and_another_waits_for_its_turn() {
    let (front, _worker) = without_turns().await;
    let send = |from, number| {
        let (to, body) = (front.http, under(number));
        async move { send_from(from, to, "POST", PATH, &[], body.as_bytes()).await }
    };
    let mut waiting = tokio::task::JoinSet::new();
    for number in 0..=50 {
        waiting.spawn(send(HERE, number));
    }
    // One of the 51 grammars exceeds the limit.
    let refused = timeout(PATIENCE, waiting.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    let message = refused.json().await["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("grammars that wait to be compiled"), "{message}");
    let other = tokio::spawn(send(ELSEWHERE, 2000));
    front.until_metrics_say("host_grammars_waiting 51\n").await;
    // The last of them is in the queue a moment before its request begins to wait. Time passes in steps, with work between, and less
    // than clients have patience for. A wait that begins after the last step ends in real time.
    for _ in 0..PATIENCE.as_secs() / 8 - 1 {
        if other.is_finished() {
            break;
        }
        passes(Duration::from_secs(8)).await;
        for _ in 0..10 {
            front.until_metrics_say("host_grammars_waiting").await;
        }
    }
    let other = other.await.unwrap();
    assert_eq!(other.status, 503);
    let message = other.json().await["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("waited 30 s for its turn"), "{message}");
    for reply in waiting.join_all().await {
        assert_eq!(reply.status, 503);
    }
}

#[tokio::test]
async fn texts_that_wait_to_be_tokenized_are_a_share_of_the_requests() {
    let (front, _worker, gate) = with_gate(FrontConfig { max_requests: 10, ..config() }, echoes()).await;
    let body = json!({"prompt": "abc"}).to_string();
    let send = |from| {
        let (to, body) = (front.http, body.clone());
        async move { send_from(from, to, "POST", "/tokenize", &[], body.as_bytes()).await }
    };
    let mut waiting: Vec<_> = (0..8).map(|_| tokio::spawn(send(HERE))).collect();
    front.until_metrics_say("host_requests_running 8\n").await;
    let refused = send(HERE).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    waiting.push(tokio::spawn(send(ELSEWHERE)));
    front.until_metrics_say("host_requests_running 9\n").await;
    gate.open();
    for answered in waiting {
        assert_eq!(answered.await.unwrap().status, 200);
    }
}

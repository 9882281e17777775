//! Clients that break off at any byte of a request leave nothing behind.

use std::net::SocketAddr;
use std::sync::Arc;

use host_tests::wait::answered_until;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::client::send;
use super::fake_worker::echoes;
use super::fixture::config;
use super::operators::with_operators;

const PATH: &str = "/v1/chat/completions";
/// Clients that break off at the same time.
const AT_ONCE: usize = 32;
/// Metrics of all that a client can hold.
const HELD: [&str; 6] = [
    "host_requests_running",
    "host_connections",
    "host_uploads",
    "host_upload_bytes",
    "host_text_bytes",
    "host_answer_bytes",
];

fn body(stream: bool) -> String {
    let messages = json!([{"role": "user", "content": "abc"}]);
    json!({"model": "fake", "messages": messages, "max_tokens": 50, "stream": stream}).to_string()
}

fn request(stream: bool) -> Vec<u8> {
    let body = body(stream);
    let head = "content-type: application/json\r\nhost: localhost";
    format!("POST {PATH} HTTP/1.1\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Sends some bytes and ends the connection. `reset`: with a reset, not in order.
async fn break_off(to: SocketAddr, bytes: &[u8], reset: bool) {
    let mut connection = TcpStream::connect(to).await.unwrap();
    if reset {
        connection.set_zero_linger().unwrap();
    }
    connection.write_all(bytes).await.unwrap();
}

#[tokio::test]
async fn requests_that_break_off_at_any_byte_leave_nothing() {
    let (mut front, operators) = with_operators(config()).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let (places, mut clients) = (Arc::new(Semaphore::new(AT_ONCE)), JoinSet::new());
    for request in [request(false), request(true)].map(Arc::new) {
        // A reset may overtake the bytes that were sent, so each length ends in both ways.
        for (length, reset) in (0..=request.len()).flat_map(|length| [(length, false), (length, true)]) {
            let place = Arc::clone(&places).acquire_owned().await.unwrap();
            let (to, request) = (front.http, Arc::clone(&request));
            clients.spawn(async move {
                break_off(to, &request[..length], reset).await;
                drop(place);
            });
        }
    }
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    // This request is accepted after all of those.
    for (stream, end) in [(false, "\"finish_reason\":\"length\""), (true, "data: [DONE]")] {
        let reply = send(front.http, "POST", PATH, &[], body(stream).as_bytes()).await;
        assert_eq!(reply.status, 200);
        let text = reply.text().await;
        assert!(text.contains(end), "{text}");
    }
    answered_until("what clients hold to be given back", async || {
        let metrics = send(operators, "GET", "/metrics", &[], b"").await.text().await;
        let is_free = |name: &&str| metrics.lines().any(|line| line == format!("{name} 0"));
        let held = HELD.iter().find(|name| !is_free(name));
        held.map_or(Ok(()), |held| Err(format!("{held} is not 0 in\n{metrics}")))
    })
    .await;
}

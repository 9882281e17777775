//! Requests whose texts wait for their turn to be read.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;

use super::client::{Reply, send};
use super::fake_worker::{Step, steps};
use super::fixture::{config, passes};
use super::gated::with_gate;

const PATH: &str = "/v1/completions";

/// Sends a body that counts as long, with a prompt of three tokens.
fn send_long(
    to: SocketAddr,
    path: &'static str,
    timeout: Option<&'static str>,
) -> tokio::task::JoinHandle<Reply> {
    let body = match path {
        PATH => json!({"prompt": "abc", "max_tokens": 3}),
        _ => json!({"prompt": "abc"}),
    };
    let body = body.to_string() + &" ".repeat(20_000);
    tokio::spawn(async move {
        let headers: Vec<(&str, &str)> =
            timeout.map(|timeout| ("x-request-timeout", timeout)).into_iter().collect();
        send(to, "POST", path, &headers, body.as_bytes()).await
    })
}

#[tokio::test]
async fn what_waits_to_be_read_ends_when_its_time_is_over() {
    let mut config = config();
    config.retry.longest = Duration::from_secs(50);
    let (front, _worker, gate) = with_gate(config, steps(vec![Step::Hang])).await;
    let mut waiting: Vec<_> = (0..10).map(|_| send_long(front.http, PATH, None)).collect();
    waiting.push(send_long(front.http, "/tokenize", None));
    let short = send_long(front.http, PATH, Some("30"));
    front.until_metrics_say("host_requests_running 12\n").await;
    gate.until_begun(1).await;
    passes(Duration::from_secs(40)).await;
    let reply = short.await.unwrap();
    assert_eq!((reply.status, reply.header("x-should-retry")), (408, Some("false")));
    passes(Duration::from_secs(15)).await;
    for reply in waiting {
        let reply = reply.await.unwrap();
        assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")));
        let error = reply.json().await;
        let message = error["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("--request-timeout"), "{message}");
    }
    front.until_metrics_say("host_requests_running 0\n").await;
    gate.open();
}

#[tokio::test]
async fn the_time_of_a_request_counts_from_its_arrival() {
    let mut config = config();
    config.retry.longest = Duration::from_secs(50);
    let (front, worker, gate) = with_gate(config, steps(vec![Step::Hang])).await;
    let asked = send_long(front.http, PATH, None);
    gate.until_begun(1).await;
    passes(Duration::from_secs(40)).await;
    gate.open();
    worker.watch.begun(1).await;
    passes(Duration::from_secs(15)).await;
    assert_eq!(asked.await.unwrap().status, 503);
    worker.watch.cancelled(1).await;
}

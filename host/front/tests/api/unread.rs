//! Clients that do not read their answers, or hang up. All answers of a worker come over one connection, and those of other clients
//! go on.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use host_tests::wait::PATIENCE;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::client::{Reply, connect_from, send_from};
use super::fake_worker::{FakeWorker, Step, echoes};
use super::fixture::{Front, config};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const TOKENS: u32 = 4000;

async fn front() -> (Front, FakeWorker) {
    let mut front = Front::start(config()).await;
    let worker = front.worker_for(2 * TOKENS, "all", "aggregated", echoes()).await;
    (front, worker)
}

/// An HTTP/2 connection whose client lets no byte of an answer come before it reads.
async fn without_window(front: &Front) -> SendRequest<Body> {
    let connection = connect_from(HERE, front.http).await;
    let mut builder = Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(0);
    let (requests, driver) = builder.handshake(TokioIo::new(connection)).await.unwrap();
    tokio::spawn(driver);
    requests
}

fn request(path: &str, body: &Value) -> Request<Body> {
    let request = Request::post(format!("http://localhost{path}")).header("content-type", "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

async fn from_elsewhere(front: &Front, path: &str, body: &Value) -> Reply {
    let body = body.to_string();
    let asked = send_from(ELSEWHERE, front.http, "POST", path, &[], body.as_bytes());
    timeout(PATIENCE, asked).await.expect("no answer begins")
}

/// Eight clients ask and do not read. Another one gets as many tokens of the same worker, in one try.
async fn others_go_on(path: &str, settings: Value) {
    let (front, worker) = front().await;
    let mut body = json!({"model": "fake", "max_tokens": TOKENS, "temperature": 0, "stream": true});
    body.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    let mut unread = Vec::new();
    for _ in 0..8 {
        let mut requests = without_window(&front).await;
        unread.push((requests.send_request(request(path, &body)).await.unwrap(), requests));
    }
    let other = from_elsewhere(&front, path, &body).await;
    assert_eq!(other.status, 200);
    let text = timeout(PATIENCE, other.text()).await.expect("another client's answer is held up");
    assert!(text.ends_with("data: [DONE]\n\n"), "{}", &text[text.len().saturating_sub(300)..]);
    assert_eq!(worker.watch.calls().len(), 9, "calls were repeated");
}

#[tokio::test]
async fn answers_of_small_tokens_that_are_not_read_hold_up_no_other() {
    others_go_on("/v1/completions", json!({"prompt": "abc"})).await;
}

#[tokio::test]
async fn answers_with_log_probabilities_that_are_not_read_hold_up_no_other() {
    let messages = json!([{"role": "user", "content": "abc"}]);
    others_go_on("/v1/chat/completions", json!({"messages": messages, "logprobs": true, "top_logprobs": 20}))
        .await;
}

#[tokio::test]
async fn clients_that_hang_up_break_no_answer_of_another() {
    let gate = Arc::new(Semaphore::new(0));
    let script = {
        let gate = Arc::clone(&gate);
        Arc::new(move |request: &host_wire::proto::GenerateRequest| match request.max_new_tokens {
            2 => {
                vec![Step::Token(97), Step::Gate(Arc::clone(&gate)), Step::Token(98), Step::Finish("length")]
            }
            // Tokens that are under way as their client hangs up.
            most => (0..most).map(|_| Step::Token(97)).collect(),
        })
    };
    let mut front = Front::start(config()).await;
    let worker = front.worker_for(2 * TOKENS, "all", "aggregated", script).await;
    let body = json!({"model": "fake", "prompt": "abc", "max_tokens": 2, "stream": true});
    let mut other = from_elsewhere(&front, "/v1/completions", &body).await;
    assert_eq!((other.status, other.chunk().await.is_some()), (200, true));
    let body = json!({"model": "fake", "prompt": "abc", "max_tokens": TOKENS, "n": 100, "no_cache": true});
    for round in 1..=30 {
        let (to, body) = (front.http, body.to_string());
        let asking = tokio::spawn(async move {
            send_from(HERE, to, "POST", "/v1/completions", &[], body.as_bytes()).await.status
        });
        worker.watch.begun(1 + 100 * round).await;
        asking.abort();
        worker.watch.cancelled(100 * round).await;
    }
    gate.add_permits(1);
    let rest = timeout(PATIENCE, other.text()).await.expect("the other answer does not go on");
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert_eq!(worker.watch.calls().len(), 1 + 100 * 30, "calls were repeated");
}

//! The clients' numbers that workers get, so that clients get fair turns in the workers' queues.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use host_front::identity::{Keys, entry};
use serde_json::json;

use super::client::{Reply, send_from};
use super::fake_worker::{FakeWorker, Script, Step, steps};
use super::fixture::{Front, config};

const PATH: &str = "/v1/completions";
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// Begins a stream whose first token has come.
async fn begin(front: &Front, from: IpAddr, prompt: &str) -> Reply {
    let body = json!({"prompt": prompt, "max_tokens": 3, "stream": true}).to_string();
    let reply = send_from(from, front.http, "POST", PATH, &[], body.as_bytes()).await;
    assert_eq!(reply.status, 200);
    reply
}

/// The clients of the calls so far, each as the index of its first call.
fn clients(worker: &FakeWorker) -> Vec<usize> {
    let calls = worker.watch.calls();
    assert!(calls.iter().all(|call| call.client != 0), "a client is not known");
    let first = |client: u64| calls.iter().position(|call| call.client == client).unwrap();
    calls.iter().map(|call| first(call.client)).collect()
}

#[tokio::test]
async fn an_address_is_a_client() {
    let mut front = Front::start(config()).await;
    let worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let mut under_way = Vec::new();
    for from in [HERE, HERE, ELSEWHERE, HERE, ELSEWHERE] {
        under_way.push(begin(&front, from, "abc").await);
    }
    assert_eq!(clients(&worker), [0, 0, 2, 0, 2]);
    // Every router has the same number for a client.
    let mut other = Front::start(config()).await;
    let its_worker = other.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let _stream = begin(&other, ELSEWHERE, "abc").await;
    assert_eq!(its_worker.watch.calls()[0].client, worker.watch.calls()[2].client);
}

#[tokio::test]
async fn keys_are_clients_wherever_they_are_used() {
    let mut config = config();
    let text = entry("a", "sk-a", false) + &entry("b", "sk-b", false);
    config.keys = Some(Arc::new(Keys::parse(&text, None).unwrap()));
    let mut front = Front::start(config).await;
    let worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let body = json!({"prompt": "abc", "max_tokens": 3, "stream": true}).to_string();
    let mut under_way = Vec::new();
    for (from, key) in [(HERE, "sk-a"), (ELSEWHERE, "sk-a"), (HERE, "sk-b")] {
        let headers = [("x-api-key", key)];
        let reply = send_from(from, front.http, "POST", PATH, &headers, body.as_bytes()).await;
        assert_eq!(reply.status, 200);
        under_way.push(reply);
    }
    assert_eq!(clients(&worker), [0, 0, 2]);
}

#[tokio::test]
async fn a_request_that_is_resumed_is_of_the_same_client() {
    let mut front = Front::start(config()).await;
    let script: Script = Arc::new(|request| match request.answered {
        0 => vec![Step::Token(97), Step::Fail { code: "transfer", retryable: true }],
        _ => vec![Step::Token(98), Step::Hang],
    });
    let worker = front.worker("all", "aggregated", script).await;
    let _stream = begin(&front, HERE, "abc").await;
    worker.watch.begun(2).await;
    assert_eq!(clients(&worker), [0, 0]);
}

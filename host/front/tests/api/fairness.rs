//! Clients with many requests: how far behind those of others theirs are in the queues of workers.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use host_front::identity::{Keys, entry};
use serde_json::json;

use super::client::{Reply, send, send_from};
use super::fake_worker::{FakeWorker, Script, Step, echoes, steps};
use super::fixture::{Front, config};

const PATH: &str = "/v1/completions";
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// A stream, of which the first token has come.
async fn begin(front: &Front, from: IpAddr, prompt: &str) -> Reply {
    let body = json!({"prompt": prompt, "max_tokens": 3, "stream": true}).to_string();
    let reply = send_from(from, front.http, "POST", PATH, &[], body.as_bytes()).await;
    assert_eq!(reply.status, 200);
    reply
}

/// How far behind the calls so far are, in milliseconds.
fn behind(worker: &FakeWorker) -> Vec<u32> {
    worker.watch.calls().iter().map(|call| call.behind_ms).collect()
}

#[tokio::test]
async fn a_request_is_behind_by_those_that_its_client_has_under_way() {
    let mut front = Front::start(config()).await;
    let worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let mut under_way = Vec::new();
    for from in [HERE, HERE, ELSEWHERE, HERE, ELSEWHERE] {
        under_way.push(begin(&front, from, "abc").await);
    }
    assert_eq!(behind(&worker), [0, 1_000, 0, 2_000, 1_000]);
    // The last two have ended.
    under_way.truncate(3);
    front.until_metrics_say("host_requests_running 3").await;
    under_way.push(begin(&front, ELSEWHERE, "abc").await);
    drop(under_way);
    front.until_metrics_say("host_requests_running 0").await;
    let _last = begin(&front, HERE, "abc").await;
    assert_eq!(behind(&worker)[5..], [1_000, 0]);
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
    assert_eq!(behind(&worker), [0, 1_000, 0]);
}

#[tokio::test]
async fn each_answer_of_a_request_counts_and_the_first_is_least_behind() {
    let mut front = Front::start(config()).await;
    let worker = front.worker("all", "aggregated", echoes()).await;
    let body = json!({"prompt": "abc", "n": 3, "seed": 1, "max_tokens": 1}).to_string();
    assert_eq!(send(front.http, "POST", PATH, &[], body.as_bytes()).await.status, 200);
    let mut behind = behind(&worker);
    assert_eq!(behind[0], 0, "the others wait for it");
    behind.sort_unstable();
    assert_eq!(behind, [0, 1_000, 2_000]);
}

#[tokio::test]
async fn a_request_that_is_resumed_is_as_far_behind_as_before() {
    let mut front = Front::start(config()).await;
    let script: Script = Arc::new(|request| match (request.prompt.len(), request.answered) {
        (1, _) => vec![Step::Token(97), Step::Hang],
        (_, 0) => vec![Step::Token(97), Step::Fail { code: "transfer", retryable: true }],
        _ => vec![Step::Token(98), Step::Hang],
    });
    let worker = front.worker("all", "aggregated", script).await;
    let _first = begin(&front, HERE, "a").await;
    let _second = begin(&front, HERE, "abc").await;
    worker.watch.begun(3).await;
    assert_eq!(behind(&worker), [0, 1_000, 1_000]);
}

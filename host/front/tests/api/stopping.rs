//! Places for requests, and the requests that have one while a server or a worker stops.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use host_tests::wait::answered_until;
use host_wire::proto::Load;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::client::send_from;
use super::failures::{PATH, message, request};
use super::fake_worker::{Step, echoes, steps};
use super::fixture::{Front, config};

#[tokio::test]
async fn more_requests_than_places_are_sent_away() {
    let mut config = config();
    config.max_requests = 1;
    let mut front = Front::start(config).await;
    let worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let mut body = request();
    body["stream"] = json!(true);
    let holding = front.post(PATH, &body).await;
    let reply = front.post(PATH, &request()).await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")));
    let answer = reply.json().await;
    assert!(message(&answer).contains("1 requests are under way"), "{answer}");
    drop(holding);
    worker.watch.cancelled(1).await;
}

#[tokio::test]
async fn a_stopping_server_lets_requests_end_and_then_ends_them() {
    let mut config = config();
    config.drain = Duration::from_millis(50);
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let mut body = request();
    body["stream"] = json!(true);
    let reply = front.post(PATH, &body).await;
    front.stop().await.unwrap();
    let events = reply.events().await;
    assert!(message(events.last().unwrap()).contains("shutting down"), "{events:?}");
}

/// Asks the server to stop, and waits until it says so to a request on a new connection.
async fn until_stopping(front: &mut Front) {
    front.begin_to_stop();
    answered_until("requests to be sent away", async || {
        let reply = front.post(PATH, &request()).await;
        if reply.status == 503 { Ok(()) } else { Err(reply.status) }
    })
    .await;
}

#[tokio::test]
async fn a_stopping_server_answers_new_requests_that_it_stops_until_the_last_one_has_ended() {
    let mut front = Front::start(config()).await;
    let gate = Arc::new(Semaphore::new(0));
    let held = vec![Step::Token(97), Step::Gate(Arc::clone(&gate)), Step::Token(98), Step::Finish("length")];
    let _worker = front.worker("all", "aggregated", steps(held)).await;
    assert_eq!(front.get("/health/ready").await.status, 200);
    let mut body = request();
    body["stream"] = json!(true);
    let reply = front.post(PATH, &body).await;
    until_stopping(&mut front).await;
    let refused = front.post(PATH, &request()).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.header("connection"), Some("close"));
    assert!(message(&refused.json().await).contains("shutting down"));
    assert_eq!(front.get("/health/live").await.status, 200);
    assert_eq!(front.get("/health/ready").await.status, 503);
    gate.add_permits(1);
    assert_eq!(reply.events().await.last().unwrap(), &json!("[DONE]"));
    front.stopped().await.unwrap();
}

#[tokio::test]
async fn connections_without_a_request_do_not_keep_others_from_being_told_that_the_server_stops() {
    let mut config = config();
    config.connections.head = Duration::from_secs(3_600);
    let mut front = Front::start(config).await;
    let gate = Arc::new(Semaphore::new(0));
    let held = vec![Step::Token(97), Step::Gate(Arc::clone(&gate)), Step::Finish("length")];
    let _worker = front.worker("all", "aggregated", steps(held)).await;
    let mut body = request();
    body["stream"] = json!(true);
    let reply = front.post(PATH, &body).await;
    until_stopping(&mut front).await;
    // As many connections as are served at once while it stops. None of them sends anything.
    let mut silent = Vec::new();
    for _ in 0..64 {
        silent.push(TcpStream::connect(front.http).await.unwrap());
    }
    let other = IpAddr::from([127, 0, 0, 2]);
    let body = request().to_string();
    let refused = send_from(other, front.http, "POST", PATH, &[], body.as_bytes()).await;
    assert_eq!(refused.status, 503);
    gate.add_permits(1);
    assert_eq!(reply.events().await.last().unwrap(), &json!("[DONE]"));
    front.stopped().await.unwrap();
}

#[tokio::test]
async fn a_worker_that_is_told_to_drain_is_named_and_unknown_ones_are_not_found() {
    let mut front = Front::start(config()).await;
    let worker = front.worker("all", "aggregated", echoes()).await;
    let instance = format!("{:016x}", worker.info.instance);
    for name in ["all", instance.as_str()] {
        let reply = front.post(&format!("/drain?worker={name}"), &Value::Null).await;
        assert_eq!(reply.status, 202);
        assert_eq!(reply.json().await["instance"], instance.as_str());
    }
    let reply = front.post("/drain?worker=other", &Value::Null).await;
    assert_eq!(reply.status, 404);
    assert!(message(&reply.json().await).contains("there are all"));
    assert_eq!(front.post("/drain", &Value::Null).await.status, 400);
}

#[tokio::test]
async fn a_worker_that_drains_finishes_what_it_has_and_new_requests_go_elsewhere() {
    let mut front = Front::start(config()).await;
    let gate = Arc::new(Semaphore::new(0));
    let held = vec![Step::Token(97), Step::Gate(Arc::clone(&gate)), Step::Token(98), Step::Finish("length")];
    let old = front.worker("old", "aggregated", steps(held)).await;
    let mut body = request();
    body["stream"] = json!(true);
    let reply = front.post(PATH, &body).await;
    assert!(front.heartbeat_with(old.info.instance, Load { draining: true, ..Load::default() }).await);
    let new = front.worker("new", "aggregated", echoes()).await;
    assert_eq!(front.post(PATH, &request()).await.status, 200);
    assert_eq!((old.watch.calls().len(), new.watch.calls().len()), (1, 1));
    gate.add_permits(1);
    assert_eq!(reply.events().await.last().unwrap(), &json!("[DONE]"));
    front.leave(old.info.instance).await;
    let health = front.get("/health").await.json().await;
    assert_eq!(health["workers"].as_array().unwrap().len(), 1, "{health}");
}

#[tokio::test]
async fn a_body_that_comes_slowly_keeps_no_other_request_out() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut config = config();
    config.max_requests = 1;
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let mut slow = tokio::net::TcpStream::connect(front.http).await.unwrap();
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n"
    );
    slow.write_all(head.as_bytes()).await.unwrap();
    // The server sends this when it begins to wait for the body.
    let mut go_on = [0; 12];
    slow.read_exact(&mut go_on).await.unwrap();
    assert_eq!(&go_on, b"HTTP/1.1 100");
    assert_eq!(front.post(PATH, &request()).await.status, 200);
    drop(slow);
}

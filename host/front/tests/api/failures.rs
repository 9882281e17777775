//! What happens when workers or clients go away.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use host_tests::wait::answered_until;
use host_wire::proto::{GenerateRequest, Load};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::fake_worker::{Script, Step, echoes, prefills, says, steps};
use super::fixture::{Front, config};

const PATH: &str = "/v1/completions";

fn message(answer: &Value) -> &str {
    answer["error"]["message"].as_str().unwrap_or_else(|| panic!("no error in {answer}"))
}

/// `first` on the first call, then `rest`.
fn first_then(first: Vec<Step>, rest: Script) -> Script {
    let calls = AtomicUsize::new(0);
    Arc::new(
        move |request| {
            if calls.fetch_add(1, Ordering::SeqCst) == 0 { first.clone() } else { rest(request) }
        },
    )
}

fn request() -> Value {
    json!({"prompt": "abc", "max_tokens": 6, "temperature": 0})
}

#[tokio::test]
async fn a_failed_prefill_leg_is_retried_elsewhere_in_a_new_room() {
    for failure in [
        Step::Fail { code: "transfer", retryable: true },
        Step::Status(tonic::Code::Unavailable),
        Step::Status(tonic::Code::ResourceExhausted),
        Step::Break,
    ] {
        for stream in [false, true] {
            let mut front = Front::start(config()).await;
            let mut bad = front.worker("bad", "prefill", steps(vec![failure.clone()])).await;
            let good = front.worker("good", "prefill", prefills()).await;
            // The good one looks busy, so that the bad one is tried first.
            assert!(
                front.heartbeat_with(good.info.instance, Load { running: 9, ..Default::default() }).await
            );
            // Decode waits for prefill, as the real one does.
            let good_instance = good.info.instance;
            let script: Script = Arc::new(move |request| {
                let served =
                    request.prefill.as_ref().is_some_and(|prefill| prefill.instance == good_instance);
                if served { echoes()(request) } else { vec![Step::Hang] }
            });
            let decode = front.worker("decode", "decode", script).await;
            let mut body = request();
            body["stream"] = json!(stream);
            let reply = front.post(PATH, &body).await;
            assert_eq!(reply.status, 200, "{failure:?}");
            let text = if stream {
                reply.events().await.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
            } else {
                reply.json().await["choices"][0]["text"].as_str().unwrap().to_owned()
            };
            assert_eq!(text, "abcabc", "{failure:?}");
            good.watch.begun(1).await;
            // The leg that had not failed was told, unless it failed before it had begun.
            let calls = decode.watch.calls();
            decode.watch.cancelled(calls.len() - 1).await;
            // Calls reach a worker in any order, so the room that served is known by its prefill worker.
            let served = |call: &&GenerateRequest| call.prefill.as_ref().unwrap().instance == good_instance;
            let room = calls.iter().find(served).unwrap().room;
            assert_eq!(room, good.watch.calls()[0].room);
            assert!(bad.watch.calls().iter().all(|call| call.room != room));
            assert!(!bad.watch.calls().is_empty(), "the bad one was tried");
            bad.kill();
        }
    }
}

#[tokio::test]
async fn a_failed_decode_leg_is_retried_and_prefill_is_told() {
    let mut front = Front::start(config()).await;
    let prefill = front.worker("prefill", "prefill", first_then(vec![Step::Hang], prefills())).await;
    let failing = vec![Step::Fail { code: "full", retryable: true }];
    let _decode = front.worker("decode", "decode", first_then(failing, echoes())).await;
    let answer = front.post(PATH, &request()).await.json().await;
    assert_eq!(answer["choices"][0]["text"], "abcabc");
    prefill.watch.cancelled(1).await;
    let metrics = front.get("/metrics").await.text().await;
    assert!(metrics.contains("host_retries_total 1"), "{metrics}");
}

#[tokio::test]
async fn tries_are_bounded_and_the_last_failure_is_told() {
    let (front, prefill, _decode) =
        Front::with_pair(steps(vec![Step::Fail { code: "full", retryable: true }])).await;
    let reply = front.post(PATH, &request()).await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.header("retry-after"), Some("5"));
    let answer = reply.json().await;
    assert!(message(&answer).contains("\"decode-0\" failed: scripted (full) (after 4 tries)"), "{answer}");
    assert!(prefill.watch.calls().len() <= 4);
}

#[tokio::test]
async fn a_failure_that_would_repeat_is_not_retried() {
    for (step, status) in [
        (Step::Fail { code: "executor", retryable: false }, 500),
        (Step::Fail { code: "invalid-request", retryable: false }, 400),
        (Step::Status(tonic::Code::InvalidArgument), 400),
        (Step::Status(tonic::Code::Unimplemented), 500),
    ] {
        let (front, _prefill, decode) = Front::with_pair(steps(vec![step])).await;
        assert_eq!(front.post(PATH, &request()).await.status, status);
        assert_eq!(decode.watch.calls().len(), 1);
    }
}

#[tokio::test]
async fn a_stream_that_breaks_after_its_first_token_ends_with_an_error_event() {
    let (front, _prefill, mut decode) = Front::with_pair(steps(vec![Step::Token(97), Step::Hang])).await;
    let mut body = request();
    body["stream"] = json!(true);
    let mut reply = front.post(PATH, &body).await;
    assert_eq!(reply.some_events().await[0]["choices"][0]["text"], "a");
    decode.kill();
    let rest = reply.events().await;
    let [error] = rest.as_slice() else { panic!("{rest:?}") };
    assert!(message(error).contains("the answer broke off"), "{error}");
    assert_eq!(error["error"]["code"], "answer_broken");
    let health = front.get("/health").await;
    assert_eq!(health.status, 503);
    let health = health.json().await;
    assert_eq!(health["workers"][0]["state"], "suspected", "{health}");
}

#[tokio::test]
async fn an_answer_of_which_the_client_has_seen_nothing_is_begun_again() {
    let mut front = Front::start(config()).await;
    let mut dying = front.worker("dying", "aggregated", steps(vec![Step::Token(120), Step::Hang])).await;
    let answer = tokio::spawn({
        let (http, body) = (front.http, request().to_string());
        async move { super::client::send(http, "POST", PATH, &[], body.as_bytes()).await.json().await }
    });
    dying.watch.begun(1).await;
    let _other = front.worker("other", "aggregated", echoes()).await;
    dying.kill();
    let answer = answer.await.unwrap();
    assert_eq!(answer["choices"][0]["text"], "abcabc", "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 6);
}

#[tokio::test]
async fn prefill_may_die_once_decode_answers() {
    let mut front = Front::start(config()).await;
    let gate = Arc::new(Semaphore::new(0));
    let script =
        vec![Step::Token(97), Step::Gate(Arc::clone(&gate)), Step::Token(98), Step::Finish("length")];
    let _decode = front.worker("decode", "decode", steps(script)).await;
    let mut prefill = front.worker("prefill", "prefill", steps(vec![Step::Hang])).await;
    let mut reply = front.post(PATH, &json!({"prompt": "a", "max_tokens": 2, "stream": true})).await;
    assert_eq!(reply.some_events().await[0]["choices"][0]["text"], "a");
    prefill.kill();
    answered_until("prefill to be missed", async || {
        let health = front.get("/health").await.json().await;
        if health["workers"][1]["state"] == "live" { Err(health) } else { Ok(()) }
    })
    .await;
    gate.add_permits(1);
    let rest = reply.events().await;
    assert_eq!((&rest[0]["choices"][0]["text"], rest.last().unwrap()), (&json!("b"), &json!("[DONE]")));
}

#[tokio::test]
async fn without_workers_a_request_waits_and_then_is_told_what_is_missing() {
    let mut config = config();
    config.retry.total = Duration::from_millis(50);
    let mut front = Front::start(config).await;
    let health = front.get("/health").await;
    assert_eq!(health.status, 503);
    for (register, sentence) in
        [(None, "no live worker is registered"), (Some("decode"), "no live prefill worker is registered")]
    {
        let _worker = match register {
            Some(role) => Some(front.worker("w", role, says("x")).await),
            None => None,
        };
        let reply = front.post(PATH, &request()).await;
        assert_eq!(reply.status, 503);
        assert!(reply.header("retry-after").is_some());
        let answer = reply.json().await;
        assert!(message(&answer).contains(sentence), "{answer}");
    }
}

#[tokio::test]
async fn a_request_that_waits_is_served_when_a_worker_registers() {
    let mut front = Front::start(config()).await;
    let waiting = tokio::spawn({
        let (http, body) = (front.http, request().to_string());
        async move { super::client::send(http, "POST", PATH, &[], body.as_bytes()).await.json().await }
    });
    // The request counts as running once it has its place.
    front.until_metrics_say("host_requests_running 1").await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    assert_eq!(waiting.await.unwrap()["choices"][0]["text"], "abcabc");
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels_both_legs() {
    for (stream, decode_steps) in [(true, vec![Step::Token(97), Step::Hang]), (false, vec![Step::Hang])] {
        let mut front = Front::start(config()).await;
        let prefill = front.worker("prefill", "prefill", steps(vec![Step::Hang])).await;
        let decode = front.worker("decode", "decode", steps(decode_steps)).await;
        let mut body = request();
        body["stream"] = json!(stream);
        let client = tokio::spawn({
            let (http, body) = (front.http, body.to_string());
            async move { super::client::send(http, "POST", PATH, &[], body.as_bytes()).await.some_events().await }
        });
        decode.watch.begun(1).await;
        prefill.watch.begun(1).await;
        if stream {
            // It read one event and dropped the connection.
            assert_eq!(client.await.unwrap().len(), 1);
        } else {
            client.abort();
        }
        decode.watch.cancelled(1).await;
        prefill.watch.cancelled(1).await;
        front.until_metrics_say("outcome=\"cancelled\"} 1").await;
        let counted = format!("host_output_tokens_total {}\n", u32::from(stream));
        let metrics = front.get("/metrics").await.text().await;
        assert!(metrics.contains(&counted), "{counted} is not in\n{metrics}");
    }
}

#[tokio::test]
async fn a_worker_that_says_more_than_it_was_asked_for_is_cut_off() {
    let mut front = Front::start(config()).await;
    let worker = front.worker("all", "aggregated", steps(vec![Step::Token(97); 100])).await;
    let mut body = request();
    body["max_tokens"] = json!(3);
    let reply = front.post(PATH, &body).await;
    assert_eq!(reply.status, 500);
    let answer = reply.json().await;
    assert!(message(&answer).contains("more tokens than the request asked for"), "{answer}");
    worker.watch.begun(1).await;
}

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
    // Said when the server begins to wait for the body.
    let mut go_on = [0; 12];
    slow.read_exact(&mut go_on).await.unwrap();
    assert_eq!(&go_on, b"HTTP/1.1 100");
    assert_eq!(front.post(PATH, &request()).await.status, 200);
    drop(slow);
}

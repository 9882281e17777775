//! Requests whose workers or clients go away.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use host_tests::wait::answered_until;
use host_wire::proto::{GenerateRequest, Load};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::client::send;
use super::fake_worker::{FakeWorker, Script, Step, echoes, info, prefills, says, steps};
use super::fixture::{Front, config, passes};

pub const PATH: &str = "/v1/completions";

pub fn message(answer: &Value) -> &str {
    answer["error"]["message"].as_str().unwrap_or_else(|| panic!("no error in {answer}"))
}

/// Takes the steps `first` on the first call, then runs `rest`.
fn first_then(first: Vec<Step>, rest: Script) -> Script {
    let calls = AtomicUsize::new(0);
    Arc::new(
        move |request| {
            if calls.fetch_add(1, Ordering::SeqCst) == 0 { first.clone() } else { rest(request) }
        },
    )
}

pub fn request() -> Value {
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
            // The good worker looks busy, so that the bad one is tried first.
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
            // The leg that had not failed was cancelled, unless it failed before it had begun.
            let calls = decode.watch.calls();
            decode.watch.cancelled(calls.len() - 1).await;
            // Calls reach a worker in any order, so the room that served is identified by its prefill worker.
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
async fn workers_that_begin_nothing_are_tried_until_they_do() {
    // Like a decode worker whose prefill worker died while the router was cut off, and like one without memory for a thread.
    for code in ["peer_refused", "unable"] {
        let calls = AtomicUsize::new(0);
        let script: Script = Arc::new(move |request| match calls.fetch_add(1, Ordering::SeqCst) {
            0..8 => vec![Step::Fail { code, retryable: true }],
            _ => echoes()(request),
        });
        let (front, _prefill, decode) = Front::with_pair(script).await;
        let reply = front.post(PATH, &request()).await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.json().await["choices"][0]["text"], "abcabc");
        assert_eq!(decode.watch.calls().len(), 9);
    }
}

/// The worker has received nothing, so the try is none of the few that a request has.
#[tokio::test]
async fn a_worker_that_no_connection_can_be_made_to_costs_no_try() {
    let mut config = config();
    config.retry.tries = 1;
    let mut front = Front::start(config).await;
    let closed = host_tests::ports::listener().local_addr().unwrap();
    assert!(front.register(info("dead", "aggregated", 1, closed)).await.accepted);
    let (http, body) = (front.http, request().to_string());
    let reply = tokio::spawn(async move { send(http, "POST", PATH, &[], body.as_bytes()).await });
    front.until_metrics_say("host_retries_total 1").await;
    let _live = front.worker("live", "aggregated", echoes()).await;
    assert_eq!(reply.await.unwrap().status, 200);
}

#[tokio::test]
async fn workers_that_never_come_together_are_tried_for_a_while_and_the_reason_is_told() {
    let mut config = config();
    config.retry.total = Duration::from_millis(200);
    let mut front = Front::start(config).await;
    let _prefill = front.worker("prefill", "prefill", prefills()).await;
    let apart = steps(vec![Step::Fail { code: "peer_refused", retryable: true }]);
    let _decode = front.worker("decode", "decode", apart).await;
    let reply = front.post(PATH, &request()).await;
    assert_eq!(reply.status, 503);
    let answer = reply.json().await;
    assert!(message(&answer).contains("\"decode\" failed: scripted (peer_refused)"), "{answer}");
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
async fn without_resuming_a_stream_that_breaks_after_its_first_token_ends_with_an_error_event() {
    let mut config = config();
    config.retry.resume = false;
    let mut front = Front::start(config).await;
    let _prefill = front.worker("prefill", "prefill", prefills()).await;
    let mut decode = front.worker("decode", "decode", steps(vec![Step::Token(97), Step::Hang])).await;
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

/// Counts on from the last token of its prompt, like a model whose tokens depend on the sequence only.
fn counts_on() -> Script {
    Arc::new(|request| {
        let last = *request.prompt.last().unwrap();
        let tokens = (1..=request.max_new_tokens).map(|step| Step::Token(last + step));
        tokens.chain([Step::Finish("length")]).collect()
    })
}

/// Counts on in the same way, but sends nothing more after `tokens` tokens.
fn counts_on_and_stops(tokens: usize) -> Script {
    let whole = counts_on();
    Arc::new(move |request| {
        let mut steps = whole(request);
        steps.truncate(tokens);
        steps.push(Step::Hang);
        steps
    })
}

#[tokio::test]
async fn an_answer_whose_worker_dies_goes_on_on_another_with_the_same_seed_and_the_client_sees_no_gap() {
    for stream in [false, true] {
        let mut front = Front::start(config()).await;
        let mut dying = front.worker("dying", "aggregated", counts_on_and_stops(2)).await;
        let mut body = request();
        body["stream"] = json!(stream);
        body["temperature"] = json!(0.5);
        body["stream_options"] = if stream { json!({"include_usage": true}) } else { Value::Null };
        let client = tokio::spawn({
            let (http, body) = (front.http, body.to_string());
            async move { super::client::send(http, "POST", PATH, &[], body.as_bytes()).await }
        });
        front.until_metrics_say("host_output_tokens_total 2\n").await;
        let other = front.worker("other", "aggregated", counts_on()).await;
        dying.kill();
        let mut reply = client.await.unwrap();
        assert_eq!(reply.status, 200);
        let (text, usage) = if stream {
            let mut events = Vec::new();
            while events.last() != Some(&json!("[DONE]")) {
                events.extend(reply.some_events().await);
            }
            let text: String =
                events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
            let usage = events.iter().find(|event| event["usage"].is_object()).unwrap()["usage"].clone();
            (text, usage)
        } else {
            let answer = reply.json().await;
            (answer["choices"][0]["text"].as_str().unwrap().to_owned(), answer["usage"].clone())
        };
        assert_eq!(text, "defghi");
        assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(3), &json!(6)), "{usage}");
        let (first, second) = (&dying.watch.calls()[0], &other.watch.calls()[0]);
        // The request has no seed, so the router chose one.
        assert_eq!(first.sampling, second.sampling);
        assert_eq!((second.prompt.as_slice(), second.max_new_tokens), (&[97, 98, 99, 100, 101][..], 4));
        assert_ne!(first.room, second.room);
        front.until_metrics_say("host_resumed_total 1\n").await;
    }
}

#[tokio::test]
async fn an_answer_that_has_its_last_token_is_complete_though_its_worker_died() {
    for (tokens, stop, reason) in [(6, None, "length"), (2, Some(101), "stop")] {
        let mut front = Front::start(config()).await;
        let mut dying = front.worker("dying", "aggregated", counts_on_and_stops(tokens)).await;
        let mut body = request();
        body["stop_token_ids"] = stop.map_or(Value::Null, |stop| json!([stop]));
        let client = tokio::spawn({
            let (http, body) = (front.http, body.to_string());
            async move { super::client::send(http, "POST", PATH, &[], body.as_bytes()).await.json().await }
        });
        front.until_metrics_say(&format!("host_output_tokens_total {tokens}\n")).await;
        dying.kill();
        let answer = client.await.unwrap();
        assert_eq!(answer["choices"][0]["finish_reason"], reason, "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], tokens, "{answer}");
        assert_eq!(dying.watch.calls().len(), 1);
    }
}

#[tokio::test]
async fn a_request_that_breaks_every_worker_is_tried_four_times_in_all() {
    let (front, _prefill, decode) = Front::with_pair(Arc::new(|request| {
        let last = *request.prompt.last().unwrap();
        vec![Step::Token(last + 1), Step::Fail { code: "transfer", retryable: true }]
    }))
    .await;
    let mut body = request();
    body["stream"] = json!(true);
    let events = front.post(PATH, &body).await.events().await;
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "defg");
    let error = events.last().unwrap();
    assert!(message(error).contains("(after 4 tries)"), "{error}");
    assert_eq!(error["error"]["code"], "answer_broken");
    assert_eq!(decode.watch.calls().len(), 4);
}

#[tokio::test]
async fn a_request_is_tried_more_often_while_workers_break_that_do_not_serve_it() {
    let mut front = Front::start(config()).await;
    let gate = Arc::new(Semaphore::new(0));
    let script: Script = Arc::new({
        let gate = Arc::clone(&gate);
        move |request| match request.max_new_tokens {
            2 => echoes()(request),
            _ => vec![Step::Gate(Arc::clone(&gate)), Step::Fail { code: "transfer", retryable: true }],
        }
    });
    let large = front.worker("large", "aggregated", script).await;
    let mut small = FakeWorker::start("small", "aggregated", 5, steps(vec![Step::Hang]));
    small.info.max_tokens = 8;
    assert!(front.register(small.info.clone()).await.accepted);
    let ask = |most: u32| {
        let (http, body) = (front.http, json!({"prompt": "abc", "max_tokens": most}).to_string());
        tokio::spawn(async move {
            super::client::send(http, "POST", PATH, &[], body.as_bytes()).await.json().await
        })
    };
    // This answer is too long for the small worker.
    let failing = ask(9);
    large.watch.begun(1).await;
    let other = ask(2);
    small.watch.begun(1).await;
    small.kill();
    other.await.unwrap();
    gate.add_permits(100);
    let answer = failing.await.unwrap();
    assert!(message(&answer).contains("(after 10 tries)"), "{answer}");
    assert_eq!(large.watch.calls().len(), 11);
}

#[tokio::test]
async fn an_answer_that_makes_progress_outlives_more_workers_than_one_that_makes_none() {
    let mut front = Front::start(config()).await;
    let script: Script = Arc::new(|request| {
        let mut steps = vec![Step::Token(97); 40.min(request.max_new_tokens as usize)];
        let last = request.max_new_tokens <= 40;
        steps.push(if last {
            Step::Finish("length")
        } else {
            Step::Fail { code: "transfer", retryable: true }
        });
        steps
    });
    let worker = front.worker("all", "aggregated", script).await;
    let answer = front.post(PATH, &json!({"prompt": "abc", "max_tokens": 300})).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json().await["usage"]["completion_tokens"], 300);
    assert_eq!(worker.watch.calls().len(), 8);
}

#[tokio::test]
async fn a_request_that_fitted_a_worker_that_died_waits_for_it_although_a_smaller_one_lives() {
    let mut front = Front::start(config()).await;
    let mut large = front.worker("large", "aggregated", counts_on_and_stops(2)).await;
    let mut small = FakeWorker::start("small", "aggregated", 5, echoes());
    small.info.max_tokens = 8;
    assert!(front.register(small.info.clone()).await.accepted);
    let client = tokio::spawn({
        let (http, mut body) = (front.http, request());
        body["stream"] = json!(true);
        async move { super::client::send(http, "POST", PATH, &[], body.to_string().as_bytes()).await }
    });
    front.until_metrics_say("host_output_tokens_total 2\n").await;
    large.kill();
    front.until_metrics_say("host_retries_total 1\n").await;
    let again = FakeWorker::start("large-again", "aggregated", 6, counts_on());
    assert!(front.register(again.info.clone()).await.accepted);
    let events = client.await.unwrap().events().await;
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "defghi", "{events:?}");
    assert!(small.watch.calls().is_empty());
}

#[tokio::test]
async fn without_resuming_an_answer_of_which_the_client_has_seen_nothing_is_begun_again() {
    let mut config = config();
    config.retry.resume = false;
    let mut front = Front::start(config).await;
    let mut dying = front.worker("dying", "aggregated", steps(vec![Step::Token(120), Step::Hang])).await;
    let answer = tokio::spawn({
        let (http, body) = (front.http, request().to_string());
        async move { super::client::send(http, "POST", PATH, &[], body.as_bytes()).await.json().await }
    });
    front.until_metrics_say("host_output_tokens_total 1\n").await;
    let other = front.worker("other", "aggregated", echoes()).await;
    dying.kill();
    let answer = answer.await.unwrap();
    assert_eq!(answer["choices"][0]["text"], "abcabc", "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    assert_eq!(other.watch.calls()[0].prompt, [97, 98, 99]);
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
            // The client read one event and dropped the connection.
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
async fn a_request_ends_when_its_time_is_over_whatever_its_worker_says() {
    for stream in [false, true] {
        let mut config = config();
        config.retry.longest = Duration::from_secs(100);
        let mut front = Front::start(config).await;
        let worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
        let mut body = request();
        body["stream"] = json!(stream);
        let (http, body) = (front.http, body.to_string());
        let asked =
            tokio::spawn(async move { super::client::send(http, "POST", PATH, &[], body.as_bytes()).await });
        worker.watch.begun(1).await;
        let error = if stream {
            // The head comes with the first token.
            let reply = asked.await.unwrap();
            passes(Duration::from_secs(101)).await;
            reply.events().await.pop().unwrap()
        } else {
            passes(Duration::from_secs(101)).await;
            let reply = asked.await.unwrap();
            assert_eq!(reply.status, 503);
            reply.json().await
        };
        assert!(message(&error).contains("--request-timeout"), "{error}");
        worker.watch.cancelled(1).await;
    }
}

#[tokio::test]
async fn an_answer_whose_able_worker_broke_waits_for_another_that_is_able() {
    let mut front = Front::start(config()).await;
    let mut old = FakeWorker::start("old", "aggregated", 5, echoes());
    old.info.protocol = 2;
    assert!(front.register(old.info.clone()).await.accepted);
    let new = front.worker("new", "aggregated", steps(vec![Step::Token(97), Step::Break])).await;
    let mut body = request();
    body["presence_penalty"] = json!(0.5);
    let (http, body) = (front.http, body.to_string());
    let reply = tokio::spawn(async move { send(http, "POST", PATH, &[], body.as_bytes()).await.status });
    front.until_metrics_say("host_retries_total 1").await;
    passes(Duration::from_millis(200)).await;
    assert!(!reply.is_finished());
    let able = front.worker("able", "aggregated", echoes()).await;
    assert_eq!(reply.await.unwrap(), 200);
    assert_eq!((old.watch.calls().len(), new.watch.calls().len(), able.watch.calls().len()), (0, 1, 1));
}

//! Workers that come, go, and do not fit each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use host_front::front::FrontConfig;
use host_tests::wait::answered_until;
use host_wire::proto::TransferEndpoint;
use serde_json::json;
use tokio::sync::Semaphore;

use super::fake_worker::{FakeWorker, Step, echoes, prefills, says, steps};
use super::fixture::{Front, config, passes};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_pair_whose_kv_differs_is_refused_with_both_values_everywhere() {
    let mut config = config();
    config.retry.total = Duration::from_millis(50);
    let mut front = Front::start(config).await;
    let _prefill = front.worker("p", "prefill", prefills()).await;
    let mut decode = FakeWorker::start("d", "decode", 2, echoes());
    decode.info.identity.as_mut().unwrap().page_tokens = 32;
    let reply = front.register(decode.info.clone()).await;
    let sentence = "page_tokens is 16 on prefill and 32 on decode";
    assert!(reply.accepted, "it may fit another worker");
    assert!(reply.message.contains(sentence), "{}", reply.message);

    let answer = front.post(PATH, &json!({"prompt": "a"})).await;
    assert_eq!(answer.status, 503);
    assert!(answer.text().await.contains(sentence));
    let health = front.get("/health").await;
    assert_eq!(health.status, 503);
    assert!(health.json().await["refused_pairs"][0].as_str().unwrap().contains(sentence));

    // A decode worker that fits is used, and the other stays registered.
    let _fits = front.worker("fits", "decode", says("ok")).await;
    assert_eq!(front.post(PATH, &json!({"prompt": "a"})).await.json().await["choices"][0]["text"], "ok");
    assert_eq!(front.get("/health").await.status, 200);
    assert!(decode.watch.calls().is_empty());
}

#[tokio::test]
async fn a_pair_without_a_common_transfer_plugin_is_refused() {
    let mut front = Front::start(config()).await;
    let _prefill = front.worker("p", "prefill", prefills()).await;
    let mut decode = FakeWorker::start("d", "decode", 2, echoes());
    decode.info.transfer = vec![TransferEndpoint { plugin: "nixl".into(), ..Default::default() }];
    let reply = front.register(decode.info.clone()).await;
    assert!(reply.message.contains("no transfer plugin in common: shm and nixl"), "{}", reply.message);
}

#[tokio::test]
async fn a_restarted_worker_takes_over_and_streams_of_the_old_instance_go_on_there() {
    let mut config = config();
    // No worker sends a heartbeat, so all are suspected at once and none is lost.
    config.worker_timeout = Duration::from_secs(100);
    let mut front = Front::start(config).await;
    let old = front.worker("w", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let body = json!({"prompt": "abc", "max_tokens": 2, "stream": true});
    let mut stream = front.post(PATH, &body).await;
    assert_eq!(stream.some_events().await.len(), 1);
    passes(Duration::from_secs(101)).await;
    let new = FakeWorker::start("w", "aggregated", 99, echoes());
    assert!(front.register(new.info.clone()).await.accepted);
    let rest = stream.events().await;
    assert_eq!(rest[0]["choices"][0]["text"], "a", "{rest:?}");
    assert_eq!(rest.last().unwrap(), &json!("[DONE]"));
    // The new worker continues from the prompt "abca".
    assert_eq!(new.watch.calls()[0].prompt, [97, 98, 99, 97]);
    assert!(!front.heartbeat(old.info.instance).await, "the old instance is unknown now");
    assert!(front.heartbeat(99).await);
    let answer = front.post(PATH, &json!({"prompt": "abc", "max_tokens": 2})).await.json().await;
    assert_eq!(answer["choices"][0]["text"], "ab");
}

#[tokio::test]
async fn a_second_worker_of_a_live_ones_name_is_refused_until_that_one_is_gone() {
    let mut front = Front::start(config()).await;
    let mut old = front.worker("w", "aggregated", echoes()).await;
    let new = FakeWorker::start("w", "aggregated", 99, echoes());
    let reply = front.register(new.info.clone()).await;
    assert!(!reply.accepted);
    assert!(reply.message.contains(&old.info.address) && reply.message.contains(&new.info.address));
    assert!(front.heartbeat(old.info.instance).await, "the first keeps its place");
    // From now on its address refuses connections, so the new worker need not wait for the timeout of ten minutes.
    old.kill();
    answered_until("the other worker to be accepted", async || {
        let reply = front.register(new.info.clone()).await;
        if reply.accepted { Ok(()) } else { Err(reply.message) }
    })
    .await;
    assert!(front.heartbeat(99).await);
}

#[tokio::test]
async fn workers_are_live_once_a_dummy_request_has_gone_through_them() {
    let mut config = config();
    config.warm_up = true;
    let mut front = Front::start(config).await;
    // Decode answers when prefill was called.
    let prefilled = Arc::new(Semaphore::new(0));
    let fails_first = {
        let (calls, prefilled) = (AtomicUsize::new(0), prefilled.clone());
        Arc::new(move |request: &_| {
            let first = calls.fetch_add(1, Ordering::SeqCst) == 0;
            let fails = || vec![Step::Fail { code: "executor", retryable: true }];
            let mut steps = vec![Step::Gate(prefilled.clone())];
            steps.extend(if first { fails() } else { echoes()(request) });
            steps
        })
    };
    let tells = Arc::new(move |_: &_| {
        prefilled.add_permits(1);
        vec![Step::Finish("prefill")]
    });
    let decode = front.worker("d", "decode", fails_first).await;
    let state = async |front: &Front| front.get("/health").await.json().await["workers"][0].clone();
    answered_until("what it waits for", async || {
        let worker = state(&front).await;
        let why = worker["why"].as_str().unwrap_or_default().to_owned();
        if worker["state"] == "warming" && why.contains("no prefill worker") { Ok(()) } else { Err(worker) }
    })
    .await;
    assert_eq!(front.get("/health/ready").await.status, 503);
    let prefill = front.worker("p", "prefill", tells).await;
    // The dummy request fails once, and is repeated.
    let answer = front.post(PATH, &json!({"prompt": "abc", "max_tokens": 3})).await;
    assert_eq!(answer.status, 200);
    let calls = decode.watch.calls();
    assert!(calls.len() >= 3 && calls[1].request_id.starts_with("warm-up-"), "{calls:?}");
    assert!(calls[1].no_cache && calls[1].prompt.len() > 16, "{calls:?}");
    assert_eq!(calls.last().unwrap().prompt, [97, 98, 99]);
    // The calls are the successful warm-up and this request. The failed warm-up may have ended before prefill was called.
    let prefilled = prefill.watch.calls();
    assert!(prefilled.len() >= 2, "{prefilled:?}");
    assert_eq!(front.get("/health/ready").await.status, 200);
}

#[tokio::test]
async fn a_worker_that_falls_silent_ends_its_streams() {
    let mut config = config();
    config.retry.total = Duration::from_millis(1);
    (config.worker_timeout, config.lost_after) = (Duration::from_secs(100), Duration::from_secs(100));
    let mut front = Front::start(config).await;
    let worker = front.worker("w", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let mut stream = front.post(PATH, &json!({"prompt": "a", "stream": true})).await;
    assert_eq!(stream.some_events().await.len(), 1);
    passes(Duration::from_secs(101)).await;
    let events = stream.events().await;
    assert!(events.last().unwrap()["error"]["message"].as_str().unwrap().contains("was not heard of for"));
    worker.watch.cancelled(1).await;
    let health = front.get("/health").await.json().await;
    assert_eq!(health["workers"][0]["state"], "suspected");
    assert!(front.heartbeat(worker.info.instance).await, "a silent worker may come back");
    assert_eq!(front.get("/health").await.json().await["workers"][0]["state"], "live");
}

#[tokio::test]
async fn a_worker_with_another_model_is_refused_with_both_names() {
    let mut front = Front::start(config()).await;
    let mut other = FakeWorker::start("w", "aggregated", 1, echoes());
    other.info.identity.as_mut().unwrap().model = "other".into();
    let reply = front.register(other.info.clone()).await;
    assert!(!reply.accepted);
    assert_eq!(reply.message, "the worker serves model \"other\" and this router \"fake\"");
}

#[tokio::test]
async fn workers_of_adjacent_versions_work_together_and_one_of_version_1_is_not_told_to_drain() {
    let mut front = Front::start(config()).await;
    for (instance, oldest, newest, agreed) in [(1, 1, 1, 1), (2, 2, 4, 3), (3, 0, 0, 1), (4, 1, 2, 2)] {
        let name = format!("w{instance}");
        let mut worker = FakeWorker::start(&name, "aggregated", instance, echoes());
        (worker.info.protocol_oldest, worker.info.protocol) = (oldest, newest);
        let reply = front.register(worker.info.clone()).await;
        assert!(reply.accepted, "{}", reply.message);
        assert_eq!(reply.protocol, agreed, "{oldest} to {newest}");
        assert_eq!((reply.protocol_oldest, reply.protocol_newest), (1, 3));
        let health = front.get("/health").await.json().await;
        assert_eq!(health["workers"][0]["protocol"], agreed, "{health}");
        let line = format!("host_worker_protocol{{worker=\"{name}\",role=\"aggregated\"}} {agreed}\n");
        front.until_metrics_say(&line).await;
        let reply = front.post(&format!("/drain?worker={name}"), &serde_json::Value::Null).await;
        if agreed == 1 {
            assert_eq!(reply.status, 502);
            let why = reply.text().await;
            assert!(why.contains("version 1") && why.contains("SIGTERM"), "{why}");
        } else {
            assert_eq!(reply.status, 202);
        }
        let answer = front.post(PATH, &json!({"prompt": "abc", "max_tokens": 2})).await.json().await;
        assert_eq!(answer["choices"][0]["text"], "ab");
        front.leave(instance).await;
    }
    let mut far = FakeWorker::start("far", "aggregated", 5, echoes());
    (far.info.protocol_oldest, far.info.protocol) = (7, 9);
    let reply = front.register(far.info.clone()).await;
    assert!(!reply.accepted);
    assert!(reply.message.contains("7 to 9") && reply.message.contains("1 to 3"), "{}", reply.message);
    assert_eq!((reply.protocol, reply.protocol_oldest, reply.protocol_newest), (0, 1, 3));
}

#[tokio::test]
async fn a_model_is_served_under_each_of_its_names() {
    let mut front =
        Front::start(FrontConfig { aliases: vec!["small".into(), "org/x".into()], ..config() }).await;
    let _prefill = front.worker("p", "prefill", prefills()).await;
    let _decode = front.worker("d", "decode", echoes()).await;
    let models = front.get("/v1/models").await.json().await;
    let names: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(names, ["fake", "small", "org/x"]);
    for name in ["fake", "small", "org/x"] {
        assert_eq!(front.get(&format!("/v1/models/{name}")).await.json().await["id"], name);
        let answer = front.post(PATH, &json!({"model": name, "prompt": "abc", "max_tokens": 2})).await;
        let answer = answer.json().await;
        assert_eq!(
            (&answer["model"], &answer["choices"][0]["text"]),
            (&json!("fake"), &json!("ab")),
            "{name}"
        );
    }
    let answer = front.post(PATH, &json!({"model": "other", "prompt": "abc"})).await;
    assert_eq!(answer.status, 404);
    let message = answer.json().await["error"]["message"].to_string();
    assert!(message.contains(r#"this server has \"fake\", \"small\", \"org/x\""#), "{message}");
}

#[tokio::test]
async fn models_and_metrics_tell_what_is_there() {
    let (front, _prefill, _decode) = Front::echoing().await;
    front.post(PATH, &json!({"prompt": "abc", "max_tokens": 4})).await.json().await;
    front.post(PATH, &json!({"prompt": "abc", "max_tokens": 0})).await.json().await;
    let models = front.get("/v1/models").await.json().await;
    assert_eq!(
        (&models["data"][0]["id"], &models["data"][0]["max_model_len"]),
        (&json!("fake"), &json!(512))
    );
    assert_eq!(front.get("/v1/models/fake").await.json().await["id"], "fake");
    let metrics = front.get("/metrics").await.text().await;
    for line in [
        "host_requests_total{endpoint=\"/v1/completions\",outcome=\"ok\"} 1",
        "host_requests_total{endpoint=\"/v1/completions\",outcome=\"invalid\"} 1",
        "host_prompt_tokens_total 3",
        "host_output_tokens_total 4",
        "host_cached_prompt_tokens_total 3",
        "host_transferred_bytes_total 4096",
        "host_time_to_first_token_seconds_count 1",
        "host_inter_token_seconds_count 3",
        "host_workers{role=\"prefill\",state=\"live\"} 1",
        "host_worker_pages{worker=\"decode-0\",role=\"decode\",state=\"quarantined\"} 0",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
}

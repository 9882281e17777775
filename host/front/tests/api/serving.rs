//! The parts of serving beside the answers: heads, comments, deadlines, formats, and descriptions of the server.

use std::time::Duration;

use serde_json::{Value, json};

use super::client::send;
use super::fake_worker::{Step, echoes, prefills, steps};
use super::fixture::{Front, config, passes};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn the_head_of_a_stream_does_not_wait_for_the_first_token() {
    let mut config = config();
    config.waits.head = Duration::from_millis(1);
    let mut front = Front::start(config).await;
    let worker = front.worker("all", "aggregated", steps(vec![Step::Hang])).await;
    let reply = front.post(PATH, &json!({"prompt": "a", "stream": true})).await;
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("text/event-stream")));
    worker.watch.begun(1).await;
    drop(reply);
    worker.watch.cancelled(1).await;
}

#[tokio::test]
async fn what_fails_before_the_first_token_keeps_its_status() {
    let fails = steps(vec![Step::Fail { code: "invalid", retryable: false }]);
    let (front, _prefill, _decode) = Front::with_pair(fails).await;
    assert_eq!(front.post(PATH, &json!({"prompt": "a", "stream": true})).await.status, 400);
}

#[tokio::test]
async fn a_client_that_waits_gets_comments_only_if_the_operator_says_so() {
    let mut config = config();
    config.stream_keep_alive = Some(Duration::from_millis(5));
    config.waits.head = Duration::from_millis(1);
    let mut front = Front::start(config).await;
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let script = steps(vec![Step::Gate(gate.clone()), Step::Token(97), Step::Finish("stop")]);
    let _worker = front.worker("all", "aggregated", script).await;
    let mut reply = front.post(PATH, &json!({"prompt": "a", "stream": true})).await;
    let first = String::from_utf8(reply.chunk().await.unwrap()).unwrap();
    assert!(first.starts_with(": waiting\n\n"), "{first}");
    gate.add_permits(1);
    let text = reply.text().await;
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
}

#[tokio::test]
async fn a_deadline_ends_a_request_and_clients_are_told_not_to_repeat_it() {
    let (front, _prefill, decode) = Front::with_pair(steps(vec![Step::Hang])).await;
    let mut body = json!({"prompt": "a", "timeout": 100});
    let (http, text) = (front.http, body.to_string());
    let asked = tokio::spawn(async move { send(http, "POST", PATH, &[], text.as_bytes()).await });
    decode.watch.begun(1).await;
    passes(Duration::from_secs(101)).await;
    let reply = asked.await.unwrap();
    assert_eq!((reply.status, reply.header("x-should-retry")), (408, Some("false")));
    assert_eq!(reply.json().await["error"]["code"], "timeout");
    decode.watch.cancelled(1).await;
    body.as_object_mut().unwrap().remove("timeout");
    let headers = [("x-request-timeout", "0.05")];
    let reply = send(front.http, "POST", PATH, &headers, body.to_string().as_bytes()).await;
    assert_eq!(reply.status, 408);
    let headers = [("x-request-timeout", "soon")];
    let reply = send(front.http, "POST", PATH, &headers, body.to_string().as_bytes()).await;
    assert_eq!((reply.status, &reply.json().await["error"]["param"]), (400, &json!("x-request-timeout")));
    front.until_metrics_say("outcome=\"late\"} 2\n").await;
    front.until_metrics_say("host_requests_running 0\n").await;
}

#[tokio::test]
async fn settings_of_sampling_reach_both_workers_and_neutral_ones_do_not() {
    let (front, prefill, decode) = Front::echoing().await;
    let body = json!({"prompt": "a", "max_tokens": 3, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.5, "min_p": 0.25, "min_tokens": 2, "logit_bias": {"65": 200, "66": 0, "5": -1.5},
        "allowed_token_ids": [1, 2], "bad_words": ["no"], "stop_token_ids": [9], "priority": 3, "seed": 1});
    assert_eq!(front.post(PATH, &body).await.status, 200);
    prefill.watch.begun(1).await;
    let (call, at_prefill) = (decode.watch.calls().remove(0), prefill.watch.calls().remove(0));
    assert_eq!((&call.sampling, call.priority), (&at_prefill.sampling, at_prefill.priority));
    let sampling = call.sampling.unwrap();
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty, sampling.min_p), (0.5, -0.5, 0.25));
    assert_eq!((sampling.repetition_penalty, sampling.min_tokens, call.priority), (1.5, 2, 3));
    let biases: Vec<(u32, f32)> = sampling.logit_bias.iter().map(|bias| (bias.token, bias.bias)).collect();
    assert_eq!(biases, [(5, -1.5), (65, 100.0)], "cut to 100, in order, without those that change nothing");
    assert_eq!((sampling.end_tokens, sampling.allowed_tokens), (vec![9], vec![1, 2]));
    let words: Vec<Vec<u32>> = sampling.bad_words.into_iter().map(|word| word.tokens).collect();
    assert_eq!(words, [vec![110, 111]]);
    let neutral = json!({"prompt": "a", "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0, "min_tokens": 0,
        "logit_bias": {}, "bad_words": [], "seed": 1, "temperature": 0});
    assert_eq!(front.post(PATH, &neutral).await.status, 200);
    let sampling = decode.watch.calls().pop().unwrap().sampling.unwrap();
    let plain = host_wire::proto::Sampling { top_p: 1.0, seed: 1, ..Default::default() };
    assert_eq!(sampling, plain);
}

#[tokio::test]
async fn a_seed_of_minus_one_is_none() {
    let (front, _prefill, decode) = Front::echoing().await;
    let native =
        |seed: i64| json!({"text": "a", "sampling_params": {"max_new_tokens": 3, "sampling_seed": seed}});
    for (path, body) in [
        (PATH, json!({"prompt": "a", "max_tokens": 3, "seed": -1})),
        ("/generate", native(-1)),
        // Every other number is a seed.
        ("/generate", native(-2)),
    ] {
        assert_eq!(front.post(path, &body).await.status, 200);
    }
    let seeds: Vec<u64> = decode.watch.calls().into_iter().map(|call| call.sampling.unwrap().seed).collect();
    // A drawn seed has 52 bits.
    assert!(seeds[0] < 1 << 52 && seeds[1] < 1 << 52 && seeds[0] != seeds[1], "{seeds:?}");
    assert_eq!(seeds[2], (-2_i64).cast_unsigned());
}

#[tokio::test]
async fn a_worker_that_knows_fewer_settings_is_not_given_them() {
    let mut front = Front::start(config()).await;
    let mut worker = super::fake_worker::FakeWorker::start("old", "aggregated", 5, echoes());
    worker.info.protocol = 2;
    assert!(front.register(worker.info.clone()).await.accepted);
    assert_eq!(front.post(PATH, &json!({"prompt": "a"})).await.status, 200);
    let reply = front.post(PATH, &json!({"prompt": "a", "presence_penalty": 1})).await;
    assert_eq!(reply.status, 500);
    let message = reply.json().await["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("\"old\" is of an older version"), "{message}");
}

#[tokio::test]
async fn offsets_count_characters() {
    let text: Vec<Step> =
        "日本x".bytes().map(|byte| Step::Token(byte.into())).chain([Step::Finish("stop")]).collect();
    let (front, _prefill, _decode) = Front::with_pair(steps(text)).await;
    let answer = front.post(PATH, &json!({"prompt": "a", "logprobs": 0})).await.json().await;
    // The bytes of a character begin where the text before it ends.
    assert_eq!(answer["choices"][0]["logprobs"]["text_offset"], json!([0, 0, 0, 1, 1, 1, 2]));
}

#[tokio::test]
async fn text_becomes_tokens_and_text_again() {
    let (front, _prefill, _decode) = Front::echoing().await;
    let answer =
        front.post("/tokenize", &json!({"prompt": "abc", "return_token_strs": true})).await.json().await;
    assert_eq!((&answer["count"], &answer["tokens"]), (&json!(3), &json!([97, 98, 99])));
    assert_eq!((&answer["token_strs"], &answer["max_model_len"]), (&json!(["a", "b", "c"]), &json!(512)));
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    let answer = front.post("/v1/tokenize", &chat).await.json().await;
    assert_eq!(answer["count"], "<user>x<assistant>".len());
    let answer = front.post("/tokenize", &json!({"prompt": ["a", "bc"]})).await.json().await;
    assert_eq!((&answer["count"], &answer["tokens"]), (&json!([1, 2]), &json!([[97], [98, 99]])));
    assert_eq!(answer["token_strs"], Value::Null);
    let listed = json!({"prompt": ["a", "bc"], "return_token_strs": true});
    let answer = front.post("/tokenize", &listed).await.json().await;
    assert_eq!(answer["token_strs"], json!([["a"], ["b", "c"]]));
    let answer = front.post("/detokenize", &json!({"tokens": [97, 257, 98]})).await.json().await;
    assert_eq!((&answer["prompt"], &answer["text"]), (&json!("a<eos>b"), &json!("ab")));
    assert_eq!(front.post("/detokenize", &json!({})).await.status, 400);
    let refused = front.post("/v1/embeddings", &json!({"input": "a"})).await;
    assert_eq!(refused.status, 404);
    assert!(refused.text().await.contains("computes no embeddings"));
    for counted in [
        "endpoint=\"/tokenize\",outcome=\"ok\"} 4\n",
        "endpoint=\"/detokenize\",outcome=\"ok\"} 1\n",
        "endpoint=\"/detokenize\",outcome=\"invalid\"} 1\n",
    ] {
        front.until_metrics_say(counted).await;
    }
}

#[tokio::test]
async fn special_tokens_show_when_they_are_asked_for() {
    let script = steps(vec![Step::Token(97), Step::Token(257), Step::Token(98), Step::Finish("length")]);
    let (front, _prefill, _decode) = Front::with_pair(script).await;
    for (skips, text) in [(true, "ab"), (false, "a<eos>b")] {
        let body = json!({"prompt": "p", "skip_special_tokens": skips});
        assert_eq!(front.post(PATH, &body).await.json().await["choices"][0]["text"], text);
    }
}

#[tokio::test]
async fn the_server_says_what_it_serves_and_the_same_each_time() {
    let mut config = config();
    config.about.model_path = Some("/models/fake".into());
    let mut front = Front::start(config).await;
    let _prefill = front.worker("prefill-0", "prefill", prefills()).await;
    let _decode = front.worker("decode-0", "decode", echoes()).await;
    let models = front.get("/v1/models").await.json().await;
    assert_eq!(
        (&models["data"][0]["id"], &models["data"][0]["max_model_len"]),
        (&json!("fake"), &json!(512))
    );
    assert_eq!(front.get("/v1/models").await.json().await, models);
    for path in ["/server_info", "/get_server_info"] {
        let info = front.get(path).await.json().await;
        assert_eq!((&info["context_length"], &info["model_path"]), (&json!(512), &json!("/models/fake")));
        assert!(info["internal_states"][0].is_object());
    }
    for path in ["/model_info", "/get_model_info"] {
        assert_eq!(front.get(path).await.json().await["tokenizer_path"], "/models/fake");
    }
    assert!(front.get("/version").await.json().await["version"].is_string());
}

#[tokio::test]
async fn metrics_come_in_the_format_that_is_accepted() {
    let front = Front::start(config()).await;
    let plain = front.get("/metrics").await;
    assert_eq!(plain.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert!(plain.text().await.contains("# TYPE host_retries_total counter\n"));
    let accept = [("accept", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")];
    let open = send(front.http, "GET", "/metrics", &accept, b"").await;
    assert_eq!(
        open.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    assert!(open.text().await.ends_with("# EOF\n"));
}

#[tokio::test]
async fn pages_of_named_origins_may_use_the_api_and_operators_endpoints_stay_closed() {
    let mut config = config();
    config.origins = host_front::identity::Origins::Named(vec!["https://app.example.com".into()]);
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let body = json!({"prompt": "a"}).to_string();
    for (origin, allowed) in [("https://app.example.com", true), ("https://other.example.com", false)] {
        let question = [("origin", origin), ("access-control-request-method", "POST")];
        let asked = send(front.http, "OPTIONS", PATH, &question, b"").await;
        assert_eq!(
            (asked.status == 204, asked.header("access-control-allow-origin")),
            (allowed, allowed.then_some(origin))
        );
        let headers = [("origin", origin), ("content-type", "application/json")];
        let reply = send(front.http, "POST", PATH, &headers, body.as_bytes()).await;
        assert_eq!(reply.status, if allowed { 200 } else { 403 });
        assert_eq!(reply.header("access-control-allow-origin"), allowed.then_some(origin));
        // Programs of the page read these of an answer.
        let shown = "x-request-id, retry-after, x-should-retry";
        assert_eq!(reply.header("access-control-expose-headers"), allowed.then_some(shown));
        assert_eq!(send(front.http, "POST", "/flush_cache", &headers, b"").await.status, 403);
    }
}

#[tokio::test]
async fn a_page_may_send_the_headers_that_its_client_has() {
    const FIXED: &str =
        "authorization, content-type, x-api-key, x-request-id, x-session-id, x-request-timeout";
    let mut config = config();
    config.origins = host_front::identity::Origins::Any;
    config.tenant_header = Some(axum::http::HeaderName::from_static("x-tenant"));
    let front = Front::start(config).await;
    let many = vec!["x-a"; 65].join(",");
    let long = "x".repeat(2049);
    for (asked, allowed) in [
        ("authorization,content-type,x-stainless-lang", "authorization, content-type, x-stainless-lang"),
        ("X-Stainless-OS , x-api-key", "x-stainless-os, x-api-key"),
        // The gateway's header is not for pages.
        ("x-tenant,x-api-key", "x-api-key"),
        ("x-tenant", FIXED),
        ("", FIXED),
        ("a b", FIXED),
        (many.as_str(), FIXED),
        (long.as_str(), FIXED),
    ] {
        let question = [
            ("origin", "https://app.example.com"),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", asked),
        ];
        let reply = send(front.http, "OPTIONS", PATH, &question, b"").await;
        assert_eq!((reply.status, reply.header("access-control-allow-headers")), (204, Some(allowed)));
    }
}

#[tokio::test]
async fn where_cached_tokens_were_is_told_when_it_is_asked_for() {
    let (front, _prefill, _decode) = Front::echoing().await;
    let mut body = json!({"prompt": "abc", "max_tokens": 2, "return_cached_tokens_details": true});
    let details = json!({"cached_tokens_details": {"device": 2, "host": 1}});
    assert_eq!(front.post(PATH, &body).await.json().await["sglext"], details);
    body["stream"] = json!(true);
    let events = front.post(PATH, &body).await.events().await;
    let told: Vec<&Value> = events.iter().filter_map(|event| event.get("sglext")).collect();
    assert_eq!(told, [&details]);
    assert!(events.iter().filter(|event| event.is_object()).all(|event| !event["choices"][0].is_null()));
}

#[tokio::test]
async fn usage_stands_in_every_event_when_it_is_asked_for() {
    let (front, _prefill, _decode) = Front::echoing().await;
    let body = json!({"prompt": "abc", "max_tokens": 3, "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let events = front.post(PATH, &body).await.events().await;
    let counts: Vec<u64> =
        events.iter().filter_map(|event| event["usage"]["completion_tokens"].as_u64()).collect();
    assert!(counts.is_sorted() && counts.first() == Some(&1) && counts.last() == Some(&3), "{counts:?}");
    assert!(
        events.iter().filter(|event| event.is_object()).all(|event| event["usage"]["prompt_tokens"] == 3)
    );
}

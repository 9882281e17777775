//! The fields of a request about cached KV reach both legs.

use host_wire::proto::Namespace;
use serde_json::{Value, json};

use super::fixture::Front;

/// A minimal request for a path, with more fields.
fn body(path: &str, fields: Value) -> Value {
    let mut body = match path {
        "/generate" => json!({"text": "p", "sampling_params": {"max_new_tokens": 1}}),
        "/v1/completions" => json!({"prompt": "p", "max_tokens": 1}),
        _ => json!({"messages": [{"role": "user", "content": "p"}], "max_tokens": 1}),
    };
    let Value::Object(fields) = fields else { panic!("fields are an object") };
    body.as_object_mut().unwrap().extend(fields);
    body
}

const PATHS: [&str; 3] = ["/generate", "/v1/completions", "/v1/chat/completions"];

#[tokio::test]
async fn both_legs_hear_the_namespace_on_every_path() {
    let (front, prefill, decode) = Front::echoing().await;
    for (number, path) in (1..).zip(PATHS) {
        let fields = json!({"extra_key": "lora-7", "cache_salt": "tenant", "no_cache": true});
        let reply = front.post(path, &body(path, fields)).await;
        assert_eq!(reply.status, 200, "{path}");
        for worker in [&prefill, &decode] {
            worker.watch.begun(number).await;
            let call = worker.watch.calls().pop().unwrap();
            let expected =
                Namespace { model: "fake".into(), extra_key: "lora-7".into(), cache_salt: "tenant".into() };
            assert_eq!((call.namespace, call.no_cache), (Some(expected), true), "{path}");
        }
    }
    front.post("/generate", &body("/generate", json!({}))).await;
    decode.watch.begun(4).await;
    let call = decode.watch.calls().pop().unwrap();
    assert_eq!(call.namespace, Some(Namespace { model: "fake".into(), ..Namespace::default() }));
    assert!(!call.no_cache);
}

#[tokio::test]
async fn keys_that_are_too_long_or_no_strings_are_refused_by_name() {
    let (front, _prefill, decode) = Front::echoing().await;
    for path in PATHS {
        for field in ["extra_key", "cache_salt"] {
            for wrong in [json!("x".repeat(257)), json!(5), json!(["a"])] {
                let reply = front.post(path, &body(path, json!({field: wrong}))).await;
                assert_eq!(reply.status, 400, "{path} {field}");
                let error = reply.json().await["error"].clone();
                assert_eq!(error["param"], field, "{path}: {error}");
                assert!(error["message"].as_str().unwrap().contains("256 bytes"), "{error}");
            }
            let longest = "x".repeat(256);
            assert_eq!(front.post(path, &body(path, json!({field: longest}))).await.status, 200);
        }
    }
    assert_eq!(decode.watch.calls().len(), 2 * PATHS.len());
}

#[tokio::test]
async fn a_flush_asks_every_worker_and_names_the_one_that_cannot_be_reached() {
    let (front, _prefill, mut decode) = Front::echoing().await;
    let reply = front.post("/flush_cache", &json!({})).await;
    assert_eq!(reply.status, 200);
    let worker = |name: &str, role: &str| json!({"name": name, "role": role, "cache": true, "pages_freed": 7, "pages_in_use": 2});
    let both = [worker("decode-0", "decode"), worker("prefill-0", "prefill")];
    assert_eq!(reply.json().await, json!({"flushed": true, "workers": both}));

    decode.kill();
    let reply = front.post("/flush_cache", &json!({})).await;
    assert_eq!(reply.status, 502);
    let answer = reply.json().await;
    assert_eq!((&answer["flushed"], &answer["workers"][1]), (&json!(false), &both[1]));
    let error = answer["workers"][0]["error"].as_str().unwrap();
    assert!(error.contains("decode-0") && error.contains(&decode.info.address), "{error}");
}

#[tokio::test]
async fn a_tenant_does_not_move_the_sessions_of_another() {
    let mut config = super::fixture::config();
    config.tenant_header = Some(axum::http::HeaderName::from_static("x-tenant"));
    let (mut front, operators) = super::operators::with_operators(config).await;
    let _worker = front.worker("all", "aggregated", super::fake_worker::echoes()).await;
    let (path, mut known) = (PATHS[0], 0);
    for (tenant, new) in [("one", 1), ("two", 1), ("one", 0), ("two", 0)] {
        let headers = [("x-tenant", tenant), ("x-session-id", "same")];
        let body = body(path, json!({})).to_string();
        let reply = super::client::send(front.http, "POST", path, &headers, body.as_bytes()).await;
        assert_eq!(reply.status, 200);
        known += new;
        let health = super::client::send(operators, "GET", "/health", &[], b"").await;
        assert_eq!(health.json().await["routing"]["sessions"], known, "{tenant}");
    }
}

#[tokio::test]
async fn a_session_is_named_by_field_header_or_cache_key() {
    let (front, _prefill, _decode) = Front::echoing().await;
    let mut known = 0;
    for path in PATHS {
        for (headers, fields, new) in [
            (&[][..], json!({}), 0),
            (&[], json!({"session_id": format!("{path} 1")}), 1),
            (&[("x-session-id", "same")], json!({"session_id": format!("{path} 1")}), 0),
            (&[], json!({"prompt_cache_key": format!("{path} 2")}), 1),
            (&[("x-session-id", path)], json!({}), 1),
            (&[("x-dynamo-session-id", path)], json!({"session_id": null}), 0),
        ] {
            let body = body(path, fields).to_string();
            let reply = super::client::send(front.http, "POST", path, headers, body.as_bytes()).await;
            assert_eq!(reply.status, 200, "{path} {headers:?} {body}");
            known += new;
            let health = front.get("/health").await.json().await;
            assert_eq!(health["routing"]["sessions"], known, "{path} {headers:?} {body}");
        }
        for wrong in [json!("x".repeat(257)), json!(7)] {
            let reply = front.post(path, &body(path, json!({ "session_id": wrong }))).await;
            assert_eq!(
                (reply.status, reply.json().await["error"]["param"].clone()),
                (400, json!("session_id"))
            );
        }
    }
}

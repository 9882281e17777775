//! Identities of requests: keys, tenants, gateways, operators, and limits for web pages.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use axum::http::HeaderName;
use host_front::front::FrontConfig;
use host_front::identity::{Hosts, Keys, entry};
use host_tests::wait::answered_until;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::client::{Reply, send, send_from};
use super::fake_worker::{Step, echoes, steps};
use super::fixture::{Front, config};
use super::operators::OF_OPERATORS;

const PATH: &str = "/v1/completions";

fn body() -> Vec<u8> {
    json!({"model": "fake", "prompt": "abc", "max_tokens": 3}).to_string().into_bytes()
}

async fn post(front: &Front, headers: &[(&str, &str)]) -> Reply {
    send(front.http, "POST", PATH, headers, &body()).await
}

async fn with_keys(text: &str) -> Front {
    let mut config = config();
    config.keys = Some(Arc::new(Keys::parse(text, None).unwrap()));
    Front::start(config).await
}

#[tokio::test]
async fn requests_need_a_key_operators_need_theirs_and_health_is_for_all() {
    let text = entry("team-a", "sk-a", false) + &entry("ops", "sk-ops", true);
    let mut front = with_keys(&text).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let (user, operator) = ([("authorization", "Bearer sk-a")], [("authorization", "Bearer sk-ops")]);
    for (headers, status) in
        [(&[][..], 401), (&[("authorization", "Bearer sk-x")][..], 401), (&user[..], 200)]
    {
        let reply = post(&front, headers).await;
        assert_eq!(reply.status, status);
        if status == 401 {
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
            assert_eq!(reply.json().await["error"]["code"], "invalid_api_key");
        }
    }
    for (method, path) in [("POST", "/flush_cache"), ("GET", "/metrics")] {
        let mut statuses = Vec::new();
        for headers in [&[][..], &user, &operator] {
            statuses.push(send(front.http, method, path, headers, b"").await.status);
        }
        assert_eq!(statuses, [401, 403, 200], "{path}");
    }
    assert_eq!(send(front.http, "GET", "/v1/models", &[], b"").await.status, 401);
    let health = async |headers| send(front.http, "GET", "/health", headers, b"").await.json().await;
    assert_eq!(health(&[][..]).await, json!({"status": "ok"}));
    assert_eq!(health(&user).await, json!({"status": "ok"}));
    assert_eq!(health(&operator).await["workers"][0]["name"], "all");
}

#[tokio::test]
async fn a_key_has_as_many_requests_at_once_as_its_file_says() {
    let text = entry("a", "sk-a", false) + "max_requests = 2\n" + &entry("b", "sk-b", false);
    let mut front = with_keys(&text).await;
    let _worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    let stream = json!({"model": "fake", "prompt": "abc", "max_tokens": 3, "stream": true}).to_string();
    let ask = async |key: &str| {
        let bearer = format!("Bearer {key}");
        let headers = [("authorization", bearer.as_str())];
        send(front.http, "POST", PATH, &headers, stream.as_bytes()).await
    };
    let held = (ask("sk-a").await, ask("sk-a").await);
    assert_eq!((held.0.status, held.1.status), (200, 200));
    assert_eq!(ask("sk-a").await.status, 429);
    assert_eq!(ask("sk-b").await.status, 200);
    drop(held.0);
    answered_until("the place of a request that was hung up on", async || {
        let status = ask("sk-a").await.status;
        if status == 200 { Ok(()) } else { Err(status) }
    })
    .await;
}

#[tokio::test]
async fn keys_that_are_added_work_and_keys_that_are_removed_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    std::fs::write(&path, entry("a", "sk-a", false)).unwrap();
    let mut config = config();
    config.keys = Some(Arc::new(Keys::load(&path).unwrap()));
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    assert_eq!(post(&front, &[("authorization", "Bearer sk-a")]).await.status, 200);
    // The new file has another length, because two writes may have the same time.
    std::fs::write(&path, entry("other", "sk-b", false)).unwrap();
    answered_until("the new key to work", async || {
        let status = post(&front, &[("authorization", "Bearer sk-b")]).await.status;
        if status == 200 { Ok(()) } else { Err(status) }
    })
    .await;
    assert_eq!(post(&front, &[("authorization", "Bearer sk-a")]).await.status, 401);
}

#[tokio::test]
async fn tenants_share_no_pages_whatever_salt_they_name() {
    let text = entry("a", "sk-a", false) + &entry("b", "sk-b", false);
    let mut front = with_keys(&text).await;
    let worker = front.worker("all", "aggregated", echoes()).await;
    let mut salts = Vec::new();
    for (key, salt) in [("sk-a", ""), ("sk-b", ""), ("sk-a", "x"), ("sk-b", "x"), ("sk-a", "")] {
        let bearer = format!("Bearer {key}");
        let mut body: Value = serde_json::from_slice(&body()).unwrap();
        body["cache_salt"] = salt.into();
        let headers = [("authorization", bearer.as_str())];
        let reply = send(front.http, "POST", PATH, &headers, body.to_string().as_bytes()).await;
        assert_eq!(reply.status, 200);
        salts.push(worker.watch.calls().last().unwrap().namespace.clone().unwrap().cache_salt);
    }
    let different: std::collections::BTreeSet<&String> = salts.iter().collect();
    assert_eq!((different.len(), &salts[4]), (4, &salts[0]), "{salts:?}");
}

#[tokio::test]
async fn a_gateway_names_the_tenant_in_its_header() {
    let mut config = config();
    config.tenant_header = Some(HeaderName::from_static("x-tenant"));
    config.max_requests = 10;
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    assert_eq!(post(&front, &[]).await.status, 401);
    // All requests come from one address: tenants have shares, not addresses.
    let stream = json!({"model": "fake", "prompt": "abc", "max_tokens": 3, "stream": true}).to_string();
    let ask = async |tenant| send(front.http, "POST", PATH, &[("x-tenant", tenant)], stream.as_bytes()).await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(ask("one").await);
    }
    assert!(held.iter().all(|reply| reply.status == 200));
    assert_eq!((ask("one").await.status, ask("two").await.status), (429, 200));
    // If the gateway added its header to the client's, the client could choose the tenant.
    let twice = [("x-tenant", "two"), ("x-tenant", "one")];
    assert_eq!(send(front.http, "POST", PATH, &twice, stream.as_bytes()).await.status, 401);
}

#[tokio::test]
async fn clients_of_a_gateway_operate_nothing() {
    let mut config = config();
    config.tenant_header = Some(HeaderName::from_static("x-tenant"));
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let (tenant, passed_on) = ([("x-tenant", "one")], [("x-forwarded-for", "192.0.2.7")]);
    for (method, path) in [("POST", "/flush_cache"), ("POST", "/drain?worker=all"), ("GET", "/metrics")] {
        let mut statuses = Vec::new();
        for headers in [&tenant[..], &passed_on, &[]] {
            statuses.push(send(front.http, method, path, headers, b"").await.status);
        }
        assert!(matches!(statuses[..], [403, 401, 401]), "{path}: {statuses:?}");
    }
    let refused = send(front.http, "POST", "/flush_cache", &tenant, b"").await.json().await;
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("--admin"), "{message}");
    let health = async |headers| send(front.http, "GET", "/health", headers, b"").await.json().await;
    assert!(health(&tenant[..]).await.get("workers").is_none());
    assert!(health(&passed_on).await.get("workers").is_none());
    assert!(health(&[]).await.get("workers").is_none());
    assert_eq!((post(&front, &tenant).await.status, post(&front, &[]).await.status), (200, 401));
}

#[tokio::test]
async fn a_web_page_of_another_name_or_origin_and_a_form_are_refused() {
    let (front, _prefill, _decode) = Front::echoing().await;
    let port = front.http.port();
    let own = format!("http://localhost:{port}");
    let address = format!("127.0.0.1:{port}");
    for (headers, status) in [
        (vec![("host", "evil.example")], 421),
        (vec![("host", address.as_str())], 200),
        (vec![("origin", "http://evil.example")], 403),
        (vec![("origin", "null")], 403),
        (vec![("host", own.strip_prefix("http://").unwrap()), ("origin", own.as_str())], 200),
        (vec![("content-type", "text/plain")], 415),
        (vec![("content-type", "multipart/form-data; boundary=x")], 415),
        (vec![("content-type", "application/json; charset=utf-8")], 200),
        // The type that curl sends by default.
        (vec![("content-type", "application/x-www-form-urlencoded")], 200),
    ] {
        let reply = post(&front, &headers).await;
        assert_eq!(reply.status, status, "{headers:?}");
    }
    let flushed = send(front.http, "POST", "/flush_cache", &[("origin", "http://evil.example")], b"").await;
    assert_eq!(flushed.status, 403);
}

#[tokio::test]
async fn a_server_with_a_name_answers_to_it() {
    let mut config = config();
    config.hosts = Some(Hosts::Named(vec!["api.example.com".to_owned()]));
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    for (host, status) in [("api.example.com", 200), ("other.example.com", 421)] {
        let reply = send_from(here, front.http, "POST", PATH, &[("host", host)], &body()).await;
        assert_eq!(reply.status, status, "{host}");
        // A proxy may forward a request of the server's own page under another address.
        let origin = format!("https://{host}");
        let reply = send_from(here, front.http, "POST", PATH, &[("origin", &origin)], &body()).await;
        assert_eq!(reply.status, if status == 200 { 200 } else { 403 }, "{host}");
    }
}

/// A front that other machines reach, with its address on this machine.
async fn on_all_interfaces(config: FrontConfig) -> Front {
    let http = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let here = (Ipv4Addr::LOCALHOST, http.local_addr().unwrap().port());
    Front::start_on(config, http, here.into()).await
}

#[tokio::test]
async fn without_keys_a_page_whose_name_resolves_to_this_machine_operates_nothing() {
    let mut front = on_all_interfaces(config()).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let evil = [("host", "evil.example:8000"), ("origin", "http://evil.example:8000")];
    for (method, path) in OF_OPERATORS {
        for headers in [&evil[..], &evil[..1]] {
            let refused = send(front.http, method, path, headers, b"").await;
            assert_eq!(refused.status, 421, "{path} {headers:?}");
            let message = refused.json().await["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.contains("--allowed-hosts"), "{message}");
        }
    }
    let health = send(front.http, "GET", "/health", &evil[..1], b"").await;
    assert_eq!(health.status, 200, "a load balancer may have a name for it");
    assert_eq!(health.json().await, json!({"status": "ok"}));
    assert_eq!(post(&front, &evil[..1]).await.status, 200, "generating is for all");
    // `/drain` is left out, because a worker drains only once.
    for host in ["localhost:8000", "127.0.0.1", "192.0.2.7:8000", "[::1]:8000"] {
        for (method, path) in [("POST", "/flush_cache"), ("GET", "/metrics")] {
            let served = send(front.http, method, path, &[("host", host)], b"").await;
            assert_eq!(served.status, 200, "{host} {path}");
        }
    }
}

#[tokio::test]
async fn operators_use_a_name_that_is_allowed_and_one_that_has_a_key_any() {
    let mut named = config();
    named.hosts = Some(Hosts::Named(vec!["host.internal".to_owned()]));
    let front = on_all_interfaces(named).await;
    for (host, status) in [("host.internal:8000", 200), ("evil.example", 421)] {
        assert_eq!(
            send(front.http, "GET", "/metrics", &[("host", host)], b"").await.status,
            status,
            "{host}"
        );
    }
    let mut with_key = config();
    with_key.keys = Some(Arc::new(Keys::parse(&entry("ops", "sk-ops", true), None).unwrap()));
    let front = on_all_interfaces(with_key).await;
    let headers = [("host", "any.example"), ("authorization", "Bearer sk-ops")];
    assert_eq!(send(front.http, "GET", "/metrics", &headers, b"").await.status, 200);
}

#[tokio::test]
async fn a_key_bounds_the_priority_of_its_requests() {
    let text = entry("late", "sk-late", false) + "priority = 5\n" + &entry("free", "sk-free", false);
    let text = text + &entry("urgent", "sk-urgent", false) + "priority = -5\n";
    let mut front = with_keys(&text).await;
    let worker = front.worker("all", "aggregated", echoes()).await;
    for (key, asked, given) in [
        ("sk-late", None, 5),
        ("sk-late", Some(-1), 5),
        ("sk-late", Some(9), 9),
        ("sk-free", Some(-1), 0),
        ("sk-free", Some(i32::MIN), 0),
        ("sk-free", Some(7), 7),
        ("sk-urgent", Some(-9), -5),
        ("sk-urgent", Some(-1), -1),
        ("sk-urgent", None, -5),
        ("sk-free", None, 0),
    ] {
        let body = json!({"prompt": "a", "max_tokens": 1, "priority": asked}).to_string();
        let bearer = format!("Bearer {key}");
        let reply = send(front.http, "POST", PATH, &[("authorization", &bearer)], body.as_bytes()).await;
        assert_eq!(reply.status, 200);
        assert_eq!(worker.watch.calls().pop().unwrap().priority, given, "{key} asks for {asked:?}");
    }
}

#[tokio::test]
async fn a_priority_below_0_counts_as_0_without_a_key() {
    let mut front = Front::start(config()).await;
    let worker = front.worker("all", "aggregated", echoes()).await;
    for (asked, given) in [(i32::MIN, 0), (-1, 0), (0, 0), (3, 3)] {
        let body = json!({"prompt": "a", "max_tokens": 1, "priority": asked});
        assert_eq!(front.post(PATH, &body).await.status, 200);
        assert_eq!(worker.watch.calls().pop().unwrap().priority, given, "{asked}");
    }
}

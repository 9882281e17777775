//! A listener for operators, beside the one for clients, and a certificate.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use axum::http::HeaderName;
use host_front::connections::HttpListener;
use host_front::front::{FrontConfig, HttpListeners};
use host_front::identity::{Keys, entry};
use host_wire::endpoint::authority::{Authority, Validity};
use host_wire::endpoint::{ApiTls, Authorities};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::client::send;
use super::fake_worker::echoes;
use super::fixture::{Front, config};

/// Requests that only operators may send.
pub const OF_OPERATORS: [(&str, &str); 3] =
    [("POST", "/flush_cache"), ("POST", "/drain?worker=all"), ("GET", "/metrics")];

/// A front with a listener for operators, and the address of that listener.
pub async fn with_operators(config: FrontConfig) -> (Front, SocketAddr) {
    let clients = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let operators = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (http, address) = (clients.local_addr().unwrap(), operators.local_addr().unwrap());
    let listeners = HttpListeners { clients, operators: Some(HttpListener::from(operators)) };
    (Front::start_on(config, listeners, http).await, address)
}

#[tokio::test]
async fn what_operators_do_is_served_at_their_own_address_alone() {
    let (mut front, operators) = with_operators(config()).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    for (method, path) in OF_OPERATORS {
        let refused = send(front.http, method, path, &[], b"").await;
        assert_eq!(refused.status, 404, "{path}");
        let message = refused.json().await["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("at the address that --admin names"), "{message}");
        let served = send(operators, method, path, &[], b"").await;
        assert!(matches!(served.status, 200 | 202), "{path}: {}", served.status);
    }
    for path in ["/health", "/health/live", "/health/ready"] {
        assert_eq!(send(front.http, "GET", path, &[], b"").await.status, 200, "{path}");
        assert_eq!(send(operators, "GET", path, &[], b"").await.status, 200, "{path}");
    }
    assert_eq!(front.get("/health").await.json().await, json!({"status": "ok"}), "names no worker");
    let health = send(operators, "GET", "/health", &[], b"").await.json().await;
    assert_eq!(health["workers"][0]["name"], "all");
    let body = json!({"model": "fake", "prompt": "abc", "max_tokens": 3}).to_string();
    let refused = send(operators, "POST", "/v1/completions", &[], body.as_bytes()).await;
    assert_eq!(refused.status, 404);
    assert!(refused.text().await.contains("/flush_cache"));
    assert_eq!(send(front.http, "POST", "/v1/completions", &[], body.as_bytes()).await.status, 200);
}

#[tokio::test]
async fn operators_need_their_keys_there_and_no_gateway() {
    let text = entry("team-a", "sk-a", false) + &entry("ops", "sk-ops", true);
    let mut config = config();
    config.keys = Some(Arc::new(Keys::parse(&text, None).unwrap()));
    let (mut front, operators) = with_operators(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let (user, operator) = ([("authorization", "Bearer sk-a")], [("authorization", "Bearer sk-ops")]);
    let mut statuses = Vec::new();
    for headers in [&[][..], &user, &operator] {
        statuses.push(send(operators, "GET", "/metrics", headers, b"").await.status);
        // An operator's key does not open paths that the clients' listener does not serve, either.
        statuses.push(send(front.http, "GET", "/metrics", headers, b"").await.status);
    }
    assert_eq!(statuses, [401, 401, 403, 404, 200, 404]);
    let public = send(front.http, "GET", "/health", &operator, b"").await.json().await;
    assert_eq!(public, json!({"status": "ok"}));

    let mut config = super::fixture::config();
    config.tenant_header = Some(HeaderName::from_static("x-tenant"));
    let (front, operators) = with_operators(config).await;
    assert_eq!(send(front.http, "GET", "/v1/models", &[], b"").await.status, 401);
    assert_eq!(send(operators, "GET", "/metrics", &[], b"").await.status, 200);
}

#[tokio::test]
async fn an_answer_streams_over_tls_and_what_ends_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let [cert, key, ca] = ["cert.pem", "key.pem", "ca.pem"].map(|name| folder.path().join(name));
    let authority = Authority::new(Validity::Days(1)).unwrap();
    let issued = authority.issue_server(&["localhost".to_owned()], Validity::Days(1)).unwrap();
    std::fs::write(&cert, issued.certificate.pem()).unwrap();
    std::fs::write(&key, issued.key.serialize_pem()).unwrap();
    std::fs::write(&ca, authority.certificate().pem()).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    let mut config = config();
    config.tls = Some(ApiTls::load(&cert, &key).unwrap());
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let trusted = Authorities::of_file(&ca).unwrap();
    let connection = TcpStream::connect(front.http).await.unwrap();
    let mut connection = trusted.connect("localhost", connection).await.unwrap();
    let body = json!({"model": "fake", "prompt": "abc", "max_tokens": 50, "temperature": 0, "stream": true});
    let (body, host) = (body.to_string(), "host: localhost\r\ncontent-type: application/json");
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\n{host}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes()).await.unwrap();
    let mut answer = String::new();
    // Reading to the end succeeds only if the server closes TLS in order.
    connection.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("data: [DONE]"), "{answer}");
}

//! No log line has data of clients that may be secret, even with the most verbose logging.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};

use axum::http::HeaderName;
use host_front::connections::Limits;
use host_front::front::{FrontConfig, serve};
use host_front::identity::{Keys, entry};
use host_tests::wait::answered_until;
use host_wire::endpoint::{Credentials, ListenAt, Listener, Tls, TlsSource, channel};
use host_wire::proto::LeaveRequest;
use host_wire::proto::registry_client::RegistryClient;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tracing::level_filters::LevelFilter;

use super::client::{connect_from, send, send_from};
use super::fake_worker::{Step, echoes, steps};
use super::fixture::{Front, config};

/// A text that is part of all data that is secret, or may be.
const CANARY: &str = "c4n4ry";
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const PATHS: [&str; 3] = ["/v1/completions", "/v1/chat/completions", "/generate"];

/// All log lines of a runtime.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    fn subscriber(&self) -> impl tracing::Subscriber + Send + Sync + 'static {
        let log = self.clone();
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(LevelFilter::TRACE)
            .with_writer(move || log.clone())
            .finish()
    }

    /// Runs a test, and captures the log of all threads of its runtime.
    fn of(&self, test: impl Future<Output = ()>) {
        let log = self.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .on_thread_start(move || std::mem::forget(tracing::subscriber::set_default(log.subscriber())))
            .build()
            .unwrap();
        let _logging = tracing::subscriber::set_default(self.subscriber());
        runtime.block_on(test);
    }

    /// Checks that the log has these lines, and no canary.
    fn check(&self, lines: &[&str]) {
        let text = self.text();
        let leak = text.lines().find(|line| line.to_ascii_lowercase().contains(CANARY));
        assert_eq!(leak, None);
        for line in lines {
            assert!(text.contains(line), "{line:?} was not logged");
        }
        assert!(text.contains("TRACE"), "not everything was logged");
    }
}

fn prompts(stream: bool) -> [String; 3] {
    let text = format!("{CANARY}-prompt");
    let shared = json!({"model": "fake", "max_tokens": 20, "stream": stream, "user": text, "stop": text});
    let with = |name: &str, value: serde_json::Value| {
        let mut body = shared.clone();
        body[name] = value;
        body.to_string()
    };
    [
        with("prompt", json!(text)),
        with("messages", json!([{"role": "user", "content": text}])),
        json!({"text": text, "stream": stream, "cache_salt": text}).to_string(),
    ]
}

/// Sends requests that are answered, and requests that are refused for their content or for the way they are sent.
async fn of_all_kinds(front: &Front, headers: &[(&str, &str)]) {
    for stream in [false, true] {
        for (path, body) in PATHS.into_iter().zip(prompts(stream)) {
            // The place of the previous request is free soon after its answer has ended.
            answered_until("an answer", async || {
                let reply = send(front.http, "POST", path, headers, body.as_bytes()).await;
                let status = reply.status;
                let text = reply.text().await;
                if status == 200 { Ok(()) } else { Err(text) }
            })
            .await;
        }
    }
    let (host, origin) = (format!("{CANARY}.example"), format!("http://{CANARY}.example"));
    let kind = format!("text/{CANARY}");
    let large = CANARY.repeat(2 << 20);
    let wrong = json!({"model": CANARY, "prompt": CANARY}).to_string();
    let strange = json!({CANARY: CANARY, "prompt": [CANARY, CANARY]}).to_string();
    for (more, body, status) in [
        (Some(("host", host.as_str())), "{}", 421),
        (Some(("origin", origin.as_str())), "{}", 403),
        (Some(("content-type", kind.as_str())), "{}", 415),
        (None, CANARY, 400),
        (None, wrong.as_str(), 404),
        (None, strange.as_str(), 400),
        (None, large.as_str(), 413),
    ] {
        let headers: Vec<_> = headers.iter().copied().chain(more).collect();
        answered_until("a refusal", async || {
            let reply = send(front.http, "POST", PATHS[0], &headers, body.as_bytes()).await;
            // The previous request may still have its place for a moment.
            if reply.status == 429 {
                return Err("its client has its share");
            }
            assert_eq!(reply.status, status, "{more:?}");
            Ok(())
        })
        .await;
    }
}

#[test]
fn keys_and_prompts_are_not_logged_and_refusals_are() {
    let log = Log::default();
    log.of(async {
        let secrets = ["a", "b"].map(|name| format!("sk-{CANARY}-{name}"));
        let [a, b] = secrets.each_ref().map(|secret| format!("Bearer {secret}"));
        let text = entry("a", &secrets[0], true) + "max_requests = 1\n" + &entry("b", &secrets[1], false);
        let mut config = config();
        config.keys = Some(Arc::new(Keys::parse(&text, None).unwrap()));
        config.max_requests = 2;
        config.connections = Limits { connections: 10, ..config.connections };
        let mut front = Front::start(config).await;
        let worker = front.worker("all", "aggregated", echoes()).await;
        let (of_a, of_b) = ([("authorization", a.as_str())], [("authorization", b.as_str())]);
        of_all_kinds(&front, &of_a).await;
        drop(worker);
        let unknown = format!("Bearer sk-{CANARY}-c");
        let basic = format!("Basic {CANARY}");
        let refused = [
            (&[][..], "/v1/completions", 401),
            (&[("authorization", unknown.as_str())], "/v1/completions", 401),
            (&[("authorization", basic.as_str())], "/v1/completions", 401),
            (&[("x-api-key", unknown.as_str())], "/v1/completions", 401),
            (&[("x-tenant", CANARY)], "/v1/completions", 401),
            (&of_b, "/flush_cache", 403),
            (&of_a, "/drain", 400),
        ];
        for (headers, path, status) in refused {
            let reply = send(front.http, "POST", path, headers, b"{}").await;
            assert_eq!(reply.status, status, "{path}");
        }
        // One request that goes on uses up all that its key allows, and another uses up all places.
        let hangs = steps(vec![Step::Token(97), Step::Hang]);
        let _hanging = front.worker("other", "aggregated", hangs).await;
        let stream = &prompts(true)[0];
        let ask = async |headers: &[(&str, &str)]| {
            send(front.http, "POST", PATHS[0], headers, stream.as_bytes()).await
        };
        let held = answered_until("the worker that is left", async || {
            let reply = ask(&of_a).await;
            if reply.status == 200 { Ok(reply) } else { Err(reply.status) }
        })
        .await;
        assert_eq!(ask(&of_a).await.status, 429);
        let other = ask(&of_b).await;
        assert_eq!((other.status, ask(&of_b).await.status), (200, 503));
        drop((held, other));
        // More connections than the share of the client. Each has sent something already.
        let mut open = Vec::new();
        for _ in 0..10 {
            let mut connection = connect_from(HERE, front.http).await;
            let head = format!("POST /v1/completions HTTP/1.1\r\nx-api-key: {CANARY}\r\n");
            drop(connection.write_all(head.as_bytes()).await);
            open.push(connection);
        }
        let closed = open.last_mut().unwrap().read(&mut [0; 16]).await;
        assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
        drop(open);
    });
    log.check(&[
        "an operator's request client=\"a\"",
        "reason=\"addressed to a name that is not this server's",
        "reason=\"sent by a web page of another origin",
        "reason=\"the body is not JSON",
        "reason=\"no API key\"",
        "reason=\"an API key that is not one of this server's\"",
        "a request is refused client=\"b\" address=127.0.0.1 reason=\"only operators may send it\"",
        "a request is refused client=\"a\" address=127.0.0.1 reason=\"the client's share of --max-requests",
        "a request is refused client=\"b\" address=127.0.0.1 reason=\"all of --max-requests\"",
        "an HTTP connection is refused address=127.0.0.1 reason=\"the client's share of --max-connections\"",
    ]);
}

#[test]
fn tenants_that_a_gateway_names_are_logged_as_digests() {
    let log = Log::default();
    log.of(async {
        let mut config = config();
        config.tenant_header = Some(HeaderName::from_static("x-tenant"));
        config.max_text_bytes = 2000;
        let mut front = Front::start(config).await;
        let _worker = front.worker("all", "aggregated", echoes()).await;
        let tenant = format!("tenant-{CANARY}");
        let of_tenant = [("x-tenant", tenant.as_str())];
        of_all_kinds(&front, &of_tenant).await;
        let spaced = format!("{CANARY} {CANARY}");
        for headers in [&[("x-tenant", spaced.as_str())][..], &[of_tenant[0]; 2], &[]] {
            let reply = send_from(HERE, front.http, "POST", PATHS[0], headers, b"{}").await;
            assert_eq!(reply.status, 401);
        }
        let body = prompts(false)[0].clone() + &" ".repeat(2001);
        assert_eq!(send(front.http, "POST", PATHS[0], &of_tenant, body.as_bytes()).await.status, 503);
        assert_eq!(send(front.http, "POST", "/flush_cache", &of_tenant, b"").await.status, 403);
        assert_eq!(send(front.http, "POST", "/flush_cache", &[], b"").await.status, 401);
    });
    // printf %s tenant-c4n4ry | sha256sum
    log.check(&[
        "a request is refused client=\"tenant-18ba4d36d1f8\" address=127.0.0.1 reason=\"only operators may send it\"",
        "a request is refused client=\"tenant-18ba4d36d1f8\" address=127.0.0.1 reason=\"all of --max-text-bytes\"",
        "a request is refused address=127.0.0.1 reason=\"the gateway names no tenant, or a wrong one\"",
    ]);
}

#[test]
fn a_failing_worker_makes_no_line_of_a_prompt() {
    let log = Log::default();
    log.of(async {
        let mut front = Front::start(config()).await;
        let fails = steps(vec![Step::Token(97), Step::Fail { code: "internal", retryable: false }]);
        let _worker = front.worker("all", "aggregated", fails).await;
        for stream in [false, true] {
            for (path, body) in PATHS.into_iter().zip(prompts(stream)) {
                send(front.http, "POST", path, &[], body.as_bytes()).await.text().await;
            }
        }
    });
    log.check(&["request status=500 outcome=\"failed\""]);
}

#[test]
fn the_secret_of_a_cluster_is_not_logged() {
    let log = Log::default();
    log.of(async {
        let folder = tempfile::tempdir().unwrap();
        let tls = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, format!("{CANARY}-{name}-0123456789abcdefghijklmnop")).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            Tls::load(TlsSource::Secret(path)).unwrap()
        };
        let http = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = Listener::bind(&ListenAt::loopback(), Credentials::Tls(tls("own"))).await.unwrap();
        let address = control.address().unwrap();
        let config: FrontConfig = config();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let serving = tokio::spawn(serve(config, http, control, async move {
            drop(stopped.await);
        }));
        // A client in plain text, and clients with the wrong and the right secret.
        let port = address.to_string().rsplit_once(':').unwrap().1.parse().unwrap();
        let mut stranger = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        stranger.write_all(format!("{CANARY}\r\n\r\n").as_bytes()).await.unwrap();
        drop(stranger.read(&mut [0; 16]).await);
        for (secret, is_refused) in [("other", true), ("own", false)] {
            let channel = channel(&address, &Credentials::Tls(tls(secret))).unwrap();
            let called = RegistryClient::new(channel).leave(LeaveRequest { instance: 1 }).await;
            assert_eq!(called.is_err(), is_refused, "{called:?}");
        }
        stop.send(()).unwrap();
        serving.await.unwrap().unwrap();
    });
    log.check(&["a control connection was refused"]);
}

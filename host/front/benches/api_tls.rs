//! What TLS costs the HTTP API: requests per second and time to the first byte, beside plain text, in one run.
//!
//!     cargo bench -p host-front --bench api_tls
//!     cargo bench -p host-front --bench api_tls -- 7 4      # rounds, and seconds of each
//!
//! One front in plain text and one with a certificate serve scripted workers. These echo the prompt, so that the time is that of
//! the HTTP API. Each client asks for a streamed answer of 8 tokens, again and again. Rounds of all cases take turns, and medians
//! are printed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "shares its fake workers with tests, and ends where its assumptions break"
)]

#[allow(dead_code, reason = "tests use more of it")]
#[path = "../tests/api/fake_worker.rs"]
mod fake_worker;

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use host_front::front::{FrontConfig, serve};
use host_front::text::TextModel;
use host_wire::clock::{self, Instant};
use host_wire::endpoint::authority::{Authority, Validity};
use host_wire::endpoint::{ApiTls, Authorities};
use host_wire::proto::RegisterRequest;
use host_wire::proto::registry_client::RegistryClient;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Clients at once.
const CLIENTS: usize = 8;
const BODY: &str = r#"{"model":"fake","prompt":"abcdefgh","max_tokens":8,"temperature":0,"stream":true}"#;
/// The end of a body in chunked encoding.
const END: &[u8] = b"\r\n0\r\n\r\n";

trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// How a client connects.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    /// TLS with the session of the previous connection, if the server remembers it.
    Resumed,
    /// TLS as a client that connects for the first time.
    New,
}

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    way: Way,
    keeps: bool,
}

const CASES: [Case; 5] = [
    Case { name: "kept connections, plain", way: Way::Plain, keeps: true },
    Case { name: "kept connections, TLS", way: Way::Resumed, keeps: true },
    Case { name: "a connection per request, plain", way: Way::Plain, keeps: false },
    Case { name: "a connection per request, TLS, session resumed", way: Way::Resumed, keeps: false },
    Case { name: "a connection per request, TLS, new client", way: Way::New, keeps: false },
];

struct Setting {
    plain: SocketAddr,
    tls: SocketAddr,
    ca: PathBuf,
    known: Authorities,
}

impl Setting {
    async fn connect(&self, way: Way) -> (Box<dyn Connection>, Duration) {
        // Reads the authorities of a new client before the time is measured.
        let authorities = match way {
            Way::New => Authorities::of_file(&self.ca).unwrap(),
            _ => self.known.clone(),
        };
        let begun = clock::now();
        let to = if way == Way::Plain { self.plain } else { self.tls };
        let connection = TcpStream::connect(to).await.unwrap();
        connection.set_nodelay(true).unwrap();
        let connection: Box<dyn Connection> = match way {
            Way::Plain => Box::new(connection),
            _ => Box::new(authorities.connect("localhost", connection).await.unwrap()),
        };
        (connection, begun.elapsed())
    }
}

/// Sends a request, reads the whole answer, and returns the time to its first byte.
async fn ask(connection: &mut dyn Connection, keeps: bool, all: &mut Vec<u8>) -> Duration {
    let close = if keeps { "" } else { "connection: close\r\n" };
    let length = BODY.len();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{close}content-length: {length}\r\n\r\n{BODY}"
    );
    let begun = clock::now();
    connection.write_all(head.as_bytes()).await.unwrap();
    all.clear();
    assert!(connection.read_buf(all).await.unwrap() > 0, "closed before an answer");
    let first = begun.elapsed();
    while !all.ends_with(END) {
        assert!(connection.read_buf(all).await.unwrap() > 0, "closed in the middle of an answer");
    }
    assert!(all.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(all));
    first
}

/// Runs one client up to a point in time. Returns the time to the first byte of each of its requests, connecting included.
async fn client(setting: Arc<Setting>, case: Case, until: Instant) -> Vec<Duration> {
    let (mut kept, mut all, mut times) = (None, Vec::new(), Vec::new());
    while clock::now() < until {
        let (mut connection, connecting) = match kept.take() {
            Some(connection) => (connection, Duration::ZERO),
            None => setting.connect(case.way).await,
        };
        times.push(connecting + ask(&mut *connection, case.keeps, &mut all).await);
        if case.keeps {
            kept = Some(connection);
        }
    }
    times
}

/// Returns requests per second, and the times to the first byte in microseconds, sorted.
async fn round(setting: &Arc<Setting>, case: Case, length: Duration) -> (f64, Vec<f64>) {
    let begun = clock::now();
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        clients.spawn(client(Arc::clone(setting), case, begun + length));
    }
    let times: Vec<Duration> = clients.join_all().await.into_iter().flatten().collect();
    let rate = times.len() as f64 / begun.elapsed().as_secs_f64();
    let mut micros: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e6).collect();
    micros.sort_by(f64::total_cmp);
    (rate, micros)
}

fn at(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    at(&values, 0.5)
}

async fn front(tls: Option<ApiTls>) -> (SocketAddr, fake_worker::FakeWorker) {
    let (http, control) =
        (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let (address, registry) =
        (http.local_addr().unwrap(), format!("http://{}", control.local_addr().unwrap()));
    let mut config = FrontConfig::new("fake".into(), TextModel::bytes(300));
    // Scripted workers send no heartbeats.
    (config.worker_timeout, config.lost_after) = (Duration::from_secs(3600), Duration::from_secs(3600));
    (config.warm_up, config.tls) = (false, tls);
    tokio::spawn(serve(config, http, control, std::future::pending()));
    let worker = fake_worker::FakeWorker::start("all", "aggregated", 1, fake_worker::echoes());
    let mut registry = RegistryClient::connect(registry).await.unwrap();
    let reply =
        registry.register(RegisterRequest { worker: Some(worker.info.clone()), load: None }).await.unwrap();
    assert!(reply.into_inner().accepted);
    (address, worker)
}

fn certificate(folder: &Path) -> (ApiTls, PathBuf) {
    let [cert, key, ca] = ["cert.pem", "key.pem", "ca.pem"].map(|name| folder.join(name));
    let authority = Authority::new(Validity::Days(1)).unwrap();
    let issued = authority.issue_server(&["localhost".to_owned()], Validity::Days(1)).unwrap();
    std::fs::write(&cert, issued.certificate.pem()).unwrap();
    std::fs::write(&key, issued.key.serialize_pem()).unwrap();
    std::fs::write(&ca, authority.certificate().pem()).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    (ApiTls::load(&cert, &key).unwrap(), ca)
}

#[tokio::main]
async fn main() {
    // `cargo bench` adds a flag of its own, which is no number and is ignored.
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let (rounds, seconds) =
        (numbers.first().copied().unwrap_or(5).max(1), numbers.get(1).copied().unwrap_or(3).max(1));
    let folder = tempfile::tempdir().unwrap();
    let (tls, ca) = certificate(folder.path());
    let ((plain, _first), (with_tls, _second)) = (front(None).await, front(Some(tls)).await);
    let known = Authorities::of_file(&ca).unwrap();
    let setting = Arc::new(Setting { plain, tls: with_tls, ca, known });
    let mut seen: Vec<Vec<(f64, f64, f64)>> = vec![Vec::new(); CASES.len()];
    for number in 0..=rounds {
        for (index, case) in CASES.iter().enumerate() {
            let (rate, times) = round(&setting, *case, Duration::from_secs(seconds)).await;
            // The first round warms up.
            if number > 0 {
                seen[index].push((rate, at(&times, 0.5), at(&times, 0.99)));
            }
        }
    }
    println!("{CLIENTS} clients, {rounds} rounds of {seconds} s, medians\n");
    println!(
        "| Case | Requests/s | First byte, median, us | First byte, 99 %, us |\n| --- | ---: | ---: | ---: |"
    );
    for (case, rounds) in CASES.iter().zip(&seen) {
        let of = |pick: fn(&(f64, f64, f64)) -> f64| median(rounds.iter().map(pick).collect());
        println!("| {} | {:.0} | {:.0} | {:.0} |", case.name, of(|r| r.0), of(|r| r.1), of(|r| r.2));
    }
    let ratio = |over: usize, under: usize| {
        median(seen[over].iter().zip(&seen[under]).map(|(over, under)| over.0 / under.0).collect())
    };
    println!(
        "\nRequests/s of TLS over plain, within a round: kept connections {:.2}, a connection per request {:.2} \
         resumed and {:.2} new",
        ratio(1, 0),
        ratio(3, 2),
        ratio(4, 2)
    );
    // Exits without waiting for the runtimes of the fake workers.
    std::process::exit(0)
}

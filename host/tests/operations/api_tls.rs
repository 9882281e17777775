//! The HTTP API over TLS: clients of other projects, the program's own commands, and the address for operators.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use host_tests::cluster::{Cluster, Start, agent};
use host_tests::plugin_files;
use host_tests::program::Program;
use host_tests::wait::until;

const HOST: &str = env!("CARGO_BIN_EXE_host");

/// A client with Python's own TLS and HTTP: requests with each version of TLS, ALPN, and a certificate that it does not trust.
const FOREIGN: &str = r#"
import http.client, json, ssl, sys
port, ca = int(sys.argv[1]), sys.argv[2]
body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0}})
for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = context.maximum_version = version
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=60)
    for _ in range(2):
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        print(connection.sock.version(), answer.status, len(json.loads(answer.read())["output_ids"]))
context = ssl.create_default_context(cafile=ca)
context.set_alpn_protocols(["h2", "http/1.1"])
connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=60)
connection.connect()
print(connection.sock.selected_alpn_protocol())
try:
    connection = http.client.HTTPSConnection("localhost", port, context=ssl.create_default_context(), timeout=60)
    connection.request("GET", "/health")
    print("trusted")
except ssl.SSLCertVerificationError:
    print("not trusted")
"#;
const SHOWN: &str =
    "import ssl, sys; print(ssl.get_server_certificate(('localhost', int(sys.argv[1]))), end='')";

fn host(arguments: &[&str]) -> Output {
    Command::new(HOST).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Runs the program on a machine that trusts these authorities.
fn host_trusting(ca: &str, arguments: &[&str]) -> Output {
    Command::new(HOST).args(arguments).env("SSL_CERT_FILE", ca).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn python(script: &str, arguments: &[&str]) -> String {
    let output = Command::new("python3").args(["-c", script]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// A folder with a certificate, made with the operator's command.
struct Certificate(tempfile::TempDir);

impl Certificate {
    fn new() -> Self {
        let certificate = Self(tempfile::tempdir().unwrap());
        certificate.make();
        certificate
    }

    /// Makes a new certificate of the same authority in place of the old one.
    fn make(&self) {
        let folder = self.0.path().display().to_string();
        let made = host(&["certs", "server", &folder, "--name", "localhost", "--name", "127.0.0.1"]);
        assert!(made.status.success(), "{}", said(&made));
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn flags(&self) -> [String; 4] {
        ["--tls-cert".to_owned(), self.path("cert.pem"), "--tls-key".to_owned(), self.path("key.pem")]
    }
}

/// Sends a GET over a Unix socket and returns the answer.
fn get_at_socket(path: &Path, of: &str) -> Result<String, String> {
    let mut connection = UnixStream::connect(path).map_err(|error| error.to_string())?;
    let request = format!("GET {of} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).map_err(|error| error.to_string())?;
    Ok(answer)
}

fn ready_at(path: &Path) {
    until("the server to be ready", || match get_at_socket(path, "/health/ready") {
        Ok(answer) if answer.starts_with("HTTP/1.1 200 ") => Ok(()),
        other => Err(format!("{other:?}")),
    });
}

fn port(url: &str) -> &str {
    url.rsplit(':').next().unwrap()
}

#[test]
fn one_command_serves_foreign_clients_over_tls_and_shows_a_new_certificate_without_a_restart() {
    let (certificate, plugins) = (Certificate::new(), plugin_files::directory(&["shm"]));
    let socket: PathBuf = certificate.0.path().join("admin.sock");
    let flags = ["--executor", "synthetic", "--kv-memory", "4MiB", "--no-warm-up", "--plugins-dir"];
    let mut flags: Vec<String> = flags.map(str::to_owned).to_vec();
    flags.push(plugins.path().display().to_string());
    flags.extend(certificate.flags());
    flags.extend(["--admin".to_owned(), format!("unix:{}", socket.display())]);
    let start = Start { program: Path::new(HOST), flags, config: String::new(), workers: 0 };
    let cluster = Cluster::start_as_given(&start, &[]);
    assert!(cluster.url.starts_with("https://127.0.0.1:"), "{}", cluster.greeting);
    ready_at(&socket);
    let (port, ca) = (port(&cluster.url), certificate.path("ca.pem"));
    assert_eq!(
        python(FOREIGN, &[port, &ca]),
        "TLSv1.2 200 4\nTLSv1.2 200 4\nTLSv1.3 200 4\nTLSv1.3 200 4\nh2\nnot trusted\n"
    );

    let mut plain = TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut told = String::new();
    plain.read_to_string(&mut told).unwrap();
    assert!(told.starts_with("HTTP/1.1 400 ") && told.contains("use https://"), "{told}");

    let shown = || python(SHOWN, &[port]);
    let before = shown();
    assert_eq!(before, std::fs::read_to_string(certificate.path("cert.pem")).unwrap().replace("\r\n", "\n"));
    certificate.make();
    assert_ne!(shown(), before);

    // The router is started again as another process, which takes over its sockets.
    let router = cluster.pid("router").unwrap();
    host_tests::cluster::signal(router, "KILL");
    until("another router", || match cluster.pid("router") {
        Some(pid) if pid != router => Ok(()),
        other => Err(format!("{other:?}")),
    });
    ready_at(&socket);
    assert!(python(FOREIGN, &[port, &ca]).starts_with("TLSv1.2 200 4\n"));

    // The program's own commands.
    let metrics = get_at_socket(&socket, "/metrics").unwrap();
    assert!(metrics.contains("host_requests_total{endpoint=\"/generate\",outcome=\"ok\"}"), "{metrics}");
    let other = Certificate::new();
    let drain = ["drain", "decode-0", "--url", &cluster.url];
    let refused = said(&host_trusting(&other.path("ca.pem"), &drain));
    assert!(refused.contains("is not trusted") && refused.contains("--ca FILE"), "{refused}");
    for reached in [host(&[&drain[..], &["--ca", &ca]].concat()), host_trusting(&ca, &drain)] {
        assert!(said(&reached).contains("at the address that --admin names"), "{}", said(&reached));
    }
    let drained = host(&["drain", "decode-0", "--url", &format!("unix:{}", socket.display()), "--no-wait"]);
    assert!(drained.status.success() && said(&drained).contains("decode-0 drains"), "{}", said(&drained));
}

#[test]
fn operators_are_served_at_their_own_port_and_commands_reach_a_server_over_tls() {
    let certificate = Certificate::new();
    let mut command = Command::new(HOST);
    command.args(["--role", "aggregated", "--name", "all", "--executor", "synthetic", "--kv-memory", "4MiB"]);
    command.args(["--port", "0", "--admin", "127.0.0.1:0"]).args(certificate.flags());
    let mut program = Program::start("host", &mut command);
    let url = |said: &str, after: &str| {
        let line = said.lines().find(|line| line.starts_with("host: ") && line.contains(after))?;
        line.split(after).nth(1)?.split_whitespace().next().map(str::to_owned)
    };
    program.wait("where it serves", |said| url(said, "host: serving synthetic on ").is_some());
    let (clients, operators) = {
        let said = program.said();
        (url(&said, "host: serving synthetic on ").unwrap(), url(&said, "operators are served on ").unwrap())
    };
    assert!(
        clients.starts_with("https://127.0.0.1:") && operators.starts_with("http://127.0.0.1:"),
        "{operators}"
    );
    let get = |path: &str| {
        let answer = agent().get(format!("{operators}{path}")).call();
        answer.map(|answer| answer.status().as_u16()).map_err(|error| error.to_string())
    };
    until("a worker to be ready", || match get("/health/ready") {
        Ok(200) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_eq!((get("/metrics"), get("/v1/models")), (Ok(200), Ok(404)));

    let ca = certificate.path("ca.pem");
    // The chat is answered with an error: the synthetic model has no chat template.
    let mut chat = Command::new(HOST);
    chat.args(["chat", &clients, "--ca", &ca]).stdin(Stdio::piped());
    let mut chat = chat.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    chat.stdin.take().unwrap().write_all(b"hello\n").unwrap();
    let chatted = said(&chat.wait_with_output().unwrap());
    assert!(chatted.contains("has no chat template"), "{chatted}");
    let refused = said(&host_trusting(&Certificate::new().path("ca.pem"), &["chat", &clients]));
    assert!(refused.contains("is not trusted"), "{refused}");
    let drained = host(&["drain", "all", "--url", &operators, "--no-wait"]);
    assert!(drained.status.success(), "{}", said(&drained));
}

#[test]
fn a_drain_is_told_over_tls_where_clients_and_operators_share_an_address() {
    let (certificate, folder) = (Certificate::new(), tempfile::tempdir().unwrap());
    let keys = folder.path().join("keys.toml");
    let made = host(&["keys", "new", "ops", "--admin", "--file", &keys.display().to_string()]);
    let key = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let flags = ["--role", "aggregated", "--name", "all", "--executor", "synthetic", "--kv-memory", "4MiB"];
    let mut flags: Vec<String> = flags.map(str::to_owned).to_vec();
    flags.extend(certificate.flags());
    flags.extend(["--api-keys".to_owned(), keys.display().to_string()]);
    let start = Start { program: Path::new(HOST), flags, config: String::new(), workers: 0 };
    let cluster = Cluster::start_as_given(&start, &[]);
    let drain = |key: &str| {
        let mut command = Command::new(HOST);
        command.args([
            "drain",
            "all",
            "--no-wait",
            "--url",
            &cluster.url,
            "--ca",
            &certificate.path("ca.pem"),
        ]);
        command.env("HOST_API_KEY", key).output().unwrap()
    };
    let refused = drain("sk-other");
    assert!(said(&refused).contains("the API key is not one of this server's"), "{}", said(&refused));
    until("the worker to be there and to drain", || {
        let drained = drain(&key);
        if drained.status.success() { Ok(()) } else { Err(said(&drained)) }
    });
}

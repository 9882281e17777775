//! Processes over TCP that authenticate each other by a secret or by certificates. Others get no information.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::plugin_files;
use host_tests::wait::answered_until;
use host_wire::endpoint::{Address, Credentials, Tls, TlsSource, channel, reason};
use host_wire::proto::worker_client::WorkerClient;
use host_wire::proto::{HandshakeRequest, WorkerInfo};

use super::one_user::{answers, supervised};

const HOST: &str = env!("CARGO_BIN_EXE_host");

/// Registers as a worker that does not exist, as a port scanner might. Its role fits the other worker.
pub async fn handshake(address: &str, credentials: &Credentials) -> Result<String, String> {
    let address: Address = address.parse().map_err(|error| format!("{error}"))?;
    let channel = channel(&address, credentials).map_err(|mismatch| mismatch.to_string())?;
    let stranger =
        WorkerInfo { instance: 7, name: "stranger".into(), role: "prefill".into(), ..WorkerInfo::default() };
    let request = HandshakeRequest { from: Some(stranger), floor: 0, to: 0 };
    let reply = WorkerClient::new(channel).handshake(request).await;
    reply.map(|reply| reply.into_inner().message).map_err(|status| reason(&status))
}

/// The answer to a member of the cluster. Its handshake is repeated until it is answered.
async fn member(address: &str, credentials: &Credentials) -> String {
    answered_until("an answer to a member", async || handshake(address, credentials).await).await
}

/// Runs `host certs`.
fn certs(arguments: &[&str], path: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(HOST);
    let made = command.arg("certs").args(arguments).arg(path).args(more).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    made
}

/// A process of a cluster over TCP, ended with the test.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            signal(self.0.id(), "TERM");
            self.0.wait().unwrap();
        }
    }
}

/// A router and workers over TCP, each with flags for their authentication.
struct OverTcp {
    router: Cluster,
    workers: Vec<Process>,
    plugins: tempfile::TempDir,
    control: String,
}

impl OverTcp {
    fn start(flags: &[String]) -> Self {
        let router = ["--role", "router", "--executor", "synthetic", "--control", "127.0.0.1:0"];
        let router = router.iter().map(|flag| (*flag).to_owned()).chain(flags.iter().cloned()).collect();
        let start = Start { program: Path::new(HOST), flags: router, config: String::new(), workers: 0 };
        let router = Cluster::start_as_given(&start, &[]);
        let control = router.greeting.rsplit(' ').next().unwrap().to_owned();
        let mut cluster =
            Self { router, workers: Vec::new(), plugins: plugin_files::directory(&["shm"]), control };
        for role in ["prefill", "decode"] {
            cluster.worker(role, role, flags);
        }
        cluster.router.wait("both to register", || cluster.router.workers().len() == 2);
        cluster
    }

    fn worker(&mut self, role: &str, name: &str, flags: &[String]) {
        let child = Command::new(HOST)
            .args(["--role", role, "--name", name, "--executor", "synthetic", "--kv-memory", "4MiB"])
            .args(["--router", &self.control, "--plugins-dir"])
            .arg(self.plugins.path())
            .args(flags)
            .stdin(Stdio::null())
            .spawn();
        self.workers.push(Process(child.unwrap()));
    }
}

/// A flag with its value.
fn flag(name: &str, path: &Path) -> Vec<String> {
    vec![name.to_owned(), path.display().to_string()]
}

#[test]
fn a_secret_and_certificates_make_clusters_that_answer_as_one_machine_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    certs(&["secret"], &path("secret"), &[]);
    certs(&["secret"], &path("other-secret"), &[]);
    certs(&["new"], &path("certs"), &[]);
    certs(&["new"], &path("other-certs"), &[]);
    let expected = {
        let base = tempfile::tempdir().unwrap();
        let (cluster, _plugins) = supervised(base.path());
        answers(&cluster)
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let tls = |source| Credentials::Tls(Tls::load(source).unwrap());
    for (flags, own, others) in [
        (
            flag("--cluster-secret", &path("secret")),
            tls(TlsSource::Secret(path("secret"))),
            tls(TlsSource::Secret(path("other-secret"))),
        ),
        (
            flag("--cluster-certs", &path("certs")),
            tls(TlsSource::Certificates(path("certs"))),
            tls(TlsSource::Certificates(path("other-certs"))),
        ),
    ] {
        let cluster = OverTcp::start(&flags);
        assert_eq!(answers(&cluster.router), expected);
        for worker in cluster.router.workers() {
            assert!(worker.address.starts_with("https://127.0.0.1:"), "{worker:?}");
            // Prefill may end its part of the request a moment after the answer.
            cluster.router.wait("its requests to be counted", || {
                let metrics = cluster.router.metrics(&worker);
                metrics.get("host_requests_finished_total").is_some_and(|count| *count > 0.0)
            });
            let plain = worker.address.replace("https:", "http:");
            for address in [&worker.address, &cluster.control] {
                runtime.block_on(handshake(address, &others)).unwrap_err();
            }
            runtime.block_on(handshake(&plain, &Credentials::None)).unwrap_err();
            runtime.block_on(handshake(&worker.metrics, &Credentials::None)).unwrap_err();
            // A member that sends the same handshake is answered, so the certificate was the reason for the refusal.
            let answered = runtime.block_on(member(&worker.address, &own));
            let says =
                if worker.role == "prefill" { "KV goes from prefill" } else { "cannot share KV pages" };
            assert!(answered.contains(says), "{answered}");
        }
        cluster.router.wait("a refusal in the router's log", || {
            cluster.router.log().contains("a control connection was refused")
        });
        assert!(!cluster.router.log().contains(std::fs::read_to_string(path("secret")).unwrap().trim()));
        cluster.router.wait("all pages to be free", || cluster.router.all_free());
    }
}

#[test]
fn a_secret_is_replaced_while_everything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let [file, new, old] = ["secret", "new", "old"].map(|name| folder.path().join(name));
    certs(&["secret"], &file, &[]);
    certs(&["secret"], &new, &[]);
    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    let write = |path: &Path, text: &str| {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
    };
    write(&old, &text(&file));
    let flags = flag("--cluster-secret", &file);
    let mut cluster = OverTcp::start(&flags);
    let expected = answers(&cluster.router);
    let before: Vec<String> = cluster.router.workers().into_iter().map(|worker| worker.instance).collect();

    // All processes read one file here, so the new secret may replace the old one directly.
    let next = folder.path().join("next");
    write(&next, &text(&new));
    std::fs::rename(&next, &file).unwrap();
    cluster.worker("decode", "late", &flags);
    cluster.router.wait("a worker with the new secret", || cluster.router.workers().len() == 3);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for worker in cluster.router.workers() {
        let of = |path: &Path| Credentials::Tls(Tls::load(TlsSource::Secret(path.to_owned())).unwrap());
        runtime.block_on(member(&worker.address, &of(&new)));
        runtime.block_on(handshake(&worker.address, &of(&old))).unwrap_err();
    }
    cluster.router.wait("the same processes to be there", || {
        let now: Vec<String> = cluster.router.workers().into_iter().map(|worker| worker.instance).collect();
        before.iter().all(|instance| now.contains(instance))
    });
    for _ in 0..4 {
        assert_eq!(answers(&cluster.router), expected);
    }
}

#[test]
fn a_worker_with_another_secret_is_not_registered_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let [own, other] = ["own", "other"].map(|name| folder.path().join(name));
    certs(&["secret"], &own, &[]);
    certs(&["secret"], &other, &[]);
    let cluster = OverTcp::start(&flag("--cluster-secret", &own));
    let child = Command::new(HOST)
        .args(["--role", "decode", "--name", "stranger", "--executor", "synthetic", "--kv-memory", "4MiB"])
        .args(["--router", &cluster.control, "--plugins-dir"])
        .arg(cluster.plugins.path())
        .args(flag("--cluster-secret", &other))
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut stranger = Process(child.unwrap());
    let said = host_tests::lines::Lines::of(stranger.0.stderr.take().unwrap());
    // The stranger may first time out, which it also logs.
    let line = said.find("why it is not registered", |line| {
        (line.contains("not registered with the router") && line.contains("certificate")).then_some(())
    });
    line.unwrap_or_else(|missing| panic!("{missing}"));
    let names: Vec<String> = cluster.router.workers().into_iter().map(|worker| worker.name).collect();
    assert!(!names.contains(&"stranger".to_owned()), "{names:?}");
}

#[test]
fn certificates_are_made_for_their_owner_and_nothing_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second, secret] = ["a", "b", "secret"].map(|name| folder.path().join(name));
    certs(&["new"], &first, &["--days", "30"]);
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    for name in ["key.pem", "ca-key.pem"] {
        assert_eq!(mode(&first.join(name)), 0o600, "{name}");
    }
    let read = |folder: &Path, name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let earlier = ["ca.pem", "ca-key.pem", "cert.pem", "key.pem"].map(|name| read(&first, name));
    // Makes another certificate of the same authority, here and in a second folder.
    certs(&["new"], &first, &[]);
    certs(&["new"], &second, &["--ca", first.to_str().unwrap()]);
    assert_eq!([&earlier[0], &earlier[1]], [&read(&first, "ca.pem"), &read(&first, "ca-key.pem")]);
    assert_ne!([&earlier[2], &earlier[3]], [&read(&first, "cert.pem"), &read(&first, "key.pem")]);
    assert_eq!(read(&second, "ca.pem"), earlier[0]);
    assert!(!second.join("ca-key.pem").exists());
    for folder in [&first, &second] {
        Tls::load(TlsSource::Certificates(folder.clone())).unwrap();
    }
    certs(&["secret"], &secret, &[]);
    assert_eq!(mode(&secret), 0o600);
    let made = std::fs::read_to_string(&secret).unwrap();
    let again = Command::new(HOST).args(["certs", "secret"]).arg(&secret).output().unwrap();
    assert_eq!(again.status.code(), Some(2), "{again:?}");
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), made);
    // Without the authority's key no certificate can be signed, and a new authority would shut the other processes out.
    std::fs::remove_file(first.join("ca-key.pem")).unwrap();
    let none = Command::new(HOST).args(["certs", "new"]).arg(&first).output().unwrap();
    assert_eq!(none.status.code(), Some(2), "{none:?}");
    assert_eq!(read(&first, "ca.pem"), earlier[0]);
}

//! Processes of one user on one machine: they meet on Unix sockets, and processes of other users get no information.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use host_tests::cluster::{Cluster, PATIENCE, Start, runs, signal};
use host_tests::hold::Hold;
use host_tests::plugin_files;
use host_tests::skip::skipped;
use host_tests::wait::until;
use host_wire::endpoint::Credentials;

use super::cluster_identity::{Process, handshake};

const HOST: &str = env!("CARGO_BIN_EXE_host");
/// Id of a user that is not root and need not exist.
const OTHER: u32 = 65_533;
pub const PROMPTS: [&[u32]; 2] = [&[7; 40], &[1, 2, 3]];

/// Starts a server without a role, with its sockets in `base`.
pub fn supervised(base: &Path) -> (Cluster, tempfile::TempDir) {
    supervised_with(base, String::new())
}

fn supervised_with(base: &Path, config: String) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let mut flags =
        ["--executor", "synthetic", "--kv-memory", "4MiB", "--plugins-dir"].map(str::to_owned).to_vec();
    flags.push(plugins.path().display().to_string());
    let start = Start { program: Path::new(HOST), flags, config, workers: 2 };
    (Cluster::start_as_given(&start, &[("TMPDIR", base)]), plugins)
}

/// The tokens of the answers. The number of bytes moved is left out: it depends on the cached part of the prompts.
pub fn answers(cluster: &Cluster) -> [Vec<u64>; 2] {
    PROMPTS.map(|prompt| cluster.generate(prompt, 6).unwrap().tokens)
}

/// The one folder of sockets in `base`.
fn folder(base: &Path) -> PathBuf {
    let found: Vec<PathBuf> = std::fs::read_dir(base).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

/// The bytes that a process of another user reads from a socket before the connection is closed.
fn heard_by_another_user(socket: &Path) -> std::io::Result<Vec<u8>> {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            // On Linux each thread has its own user.
            let user = rustix::process::Uid::from_raw(OTHER);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            let mut connection = UnixStream::connect(socket)?;
            connection.set_read_timeout(Some(PATIENCE))?;
            // The beginning of HTTP/2, which a server answers with its settings. The server may have closed the connection before.
            drop(connection.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"));
            let mut heard = Vec::new();
            match connection.read_to_end(&mut heard) {
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(heard),
                read => read.map(|_bytes| heard),
            }
        });
        other.join().unwrap()
    })
}

#[test]
fn supervised_processes_meet_on_sockets_of_their_user_that_go_with_them() {
    let base = tempfile::tempdir().unwrap();
    let (mut cluster, _plugins) = supervised(base.path());
    let expected = answers(&cluster);
    let folder = folder(base.path());
    assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    let sockets = ["router", "prefill-0", "decode-0"].map(|name| folder.join(format!("{name}.sock")));
    for (worker, socket) in ["prefill", "decode"].iter().zip(&sockets[1..]) {
        assert_eq!(cluster.worker(worker).address, format!("unix:{}", socket.display()));
    }

    if rustix::process::geteuid().is_root() {
        for socket in &sockets {
            let kept_out = heard_by_another_user(socket).unwrap_err();
            assert_eq!(kept_out.kind(), std::io::ErrorKind::PermissionDenied, "the folder is private");
        }
        // Opens the permissions, so that only the check of the sockets themselves is left.
        std::fs::set_permissions(base.path(), PermissionsExt::from_mode(0o711)).unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o711)).unwrap();
        for socket in &sockets {
            std::fs::set_permissions(socket, PermissionsExt::from_mode(0o666)).unwrap();
            assert_eq!(heard_by_another_user(socket).unwrap(), b"", "{}", socket.display());
        }
        cluster.wait("refusals in the log", || {
            cluster.log().matches("a control connection was refused").count() >= 3
        });
        assert!(cluster.log().contains(&format!("user {OTHER}")), "{}", cluster.log());
    } else {
        skipped("connections of another user to a supervised server: only root can make them");
    }

    // The address for metrics does not accept a handshake.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let worker = cluster.worker("prefill");
    assert!(cluster.metrics(&worker).contains_key("host_requests_finished_total"));
    let told = runtime.block_on(handshake(&worker.metrics, &Credentials::None));
    assert!(told.is_err(), "{told:?}");

    // Processes that are started again have the same addresses as before.
    let decode = cluster.worker("decode");
    signal(cluster.pid("decode").unwrap(), "KILL");
    cluster.wait_for_another(&decode);
    assert_eq!(cluster.worker("decode").address, decode.address);
    let router = cluster.pid("router").unwrap();
    signal(router, "KILL");
    cluster.wait("another router", || cluster.pid("router") != Some(router) && cluster.workers().len() == 2);
    cluster.wait("an answer", || cluster.generate(PROMPTS[0], 6).is_ok());
    assert_eq!(answers(&cluster), expected);
    assert_eq!(cluster.interrupt(), Some(0));
    assert!(!folder.exists());
}

#[test]
fn what_a_killed_supervisor_left_is_removed_by_the_next() {
    let base = tempfile::tempdir().unwrap();
    let (cluster, _plugins) = supervised(base.path());
    let left = folder(base.path());
    let children = ["router", "prefill", "decode"].map(|role| cluster.pid(role).unwrap());
    signal(cluster.supervisor(), "KILL");
    until("the children to end", || match children.into_iter().find(|child| runs(*child)) {
        None => Ok(()),
        Some(child) => Err(format!("process {child} runs")),
    });
    assert!(left.exists());
    let (cluster, _plugins) = supervised(base.path());
    assert_ne!(folder(base.path()), left);
    cluster.generate(PROMPTS[0], 2).unwrap();
}

#[test]
fn an_aggregated_worker_and_its_router_meet_on_sockets_too() {
    let base = tempfile::tempdir().unwrap();
    let flags = ["--role", "aggregated", "--executor", "synthetic", "--kv-memory", "4MiB"];
    let flags = flags.map(str::to_owned).to_vec();
    let start = Start { program: Path::new(HOST), flags, config: String::new(), workers: 1 };
    let mut cluster = Cluster::start_as_given(&start, &[("TMPDIR", base.path())]);
    cluster.generate(PROMPTS[0], 2).unwrap();
    let address = cluster.worker("aggregated").address;
    assert_eq!(address, format!("unix:{}/aggregated-0.sock", folder(base.path()).display()));
    assert_eq!(cluster.interrupt(), Some(0));
    assert_eq!(std::fs::read_dir(base.path()).unwrap().count(), 0);
}

#[test]
fn what_workers_compute_for_a_router_that_froze_ends() {
    let (base, hold) = (tempfile::tempdir().unwrap(), Hold::new());
    let config = format!("[synthetic]\n{}", hold.prompts_from(800));
    let (cluster, _plugins) = supervised_with(base.path(), config);
    let prompt: Vec<u32> = (0..1600).map(|token| token % 256).collect();
    let expected = cluster.generate(&prompt[..40], 8).unwrap().tokens;
    let decode = cluster.worker("decode");
    let under_way = || cluster.metrics(&decode).get("host_requests_active").copied();
    std::thread::scope(|scope| {
        let held = hold.begin();
        let request = scope.spawn(|| cluster.generate(&prompt, 8));
        cluster.wait("the request to be under way", || under_way() == Some(1.0));
        // The router is stopped: its connections stay open, and it does not answer.
        let router = cluster.pid("router").unwrap();
        signal(router, "STOP");
        until("the request to end", || if under_way() == Some(0.0) { Ok(()) } else { Err("it goes on") });
        held.end();
        signal(router, "CONT");
        request.join().unwrap().unwrap();
    });
    assert_eq!(cluster.generate(&prompt[..40], 8).unwrap().tokens, expected);
    cluster.wait("all pages to be free", || cluster.all_free());
}

#[test]
fn parts_started_by_hand_meet_on_sockets_where_they_are_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let plugins = plugin_files::directory(&["shm"]);
    let at = |name: &str| format!("unix:{}", folder.path().join(name).display());
    let router = at("router");
    let flags = ["--role", "router", "--executor", "synthetic", "--control", &router];
    let flags = flags.map(str::to_owned).to_vec();
    let start = Start { program: Path::new(HOST), flags: flags.clone(), config: String::new(), workers: 0 };
    let cluster = Cluster::start_as_given(&start, &[]);
    assert!(cluster.greeting.ends_with(&router), "{}", cluster.greeting);
    let workers = ["prefill", "decode"].map(|role| {
        let child = Command::new(HOST)
            .args(["--role", role, "--executor", "synthetic", "--kv-memory", "4MiB", "--router", &router])
            .args(["--control", &at(role), "--plugins-dir"])
            .arg(plugins.path())
            .stdin(Stdio::null())
            .spawn();
        Process(child.unwrap())
    });
    cluster.wait("both to register", || cluster.workers().len() == 2);
    assert_eq!(cluster.worker("decode").address, at("decode"));
    assert!(cluster.generate(PROMPTS[0], 6).unwrap().transferred_bytes > 0);
    // A second process cannot take over a socket on which a process listens.
    let second = Command::new(HOST).args(&flags).args(["--port", "0"]).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{said}");
    assert!(said.contains(&router) && said.contains("change --control"), "{said}");
    cluster.wait("all pages to be free", || cluster.all_free());
    drop(workers);
}

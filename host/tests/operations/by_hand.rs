//! Router and workers started one by one, as on several machines: addresses from flags and from TOML, and workers that do not fit
//! each other.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::plugin_files;
use host_wire::proto::worker_client::WorkerClient;
use host_wire::proto::{HandshakeRequest, WorkerInfo};

const HOST: &str = env!("CARGO_BIN_EXE_host");

/// A worker process, ended with the test.
pub(super) struct Worker(pub(super) Child);

impl Worker {
    /// Starts a worker that reads its addresses and plugins from a TOML file.
    pub(super) fn start(directory: &Path, role: &str, router: &str, flags: &[&str]) -> Self {
        Self::start_with(directory, role, router, flags, "")
    }

    /// As [`start`](Self::start), with more lines in the file.
    pub(super) fn start_with(
        directory: &Path,
        role: &str,
        router: &str,
        flags: &[&str],
        lines: &str,
    ) -> Self {
        let config = directory.join(format!("{role}-{}.toml", flags.concat()));
        let text = format!(
            "role = \"{role}\"\nrouter = \"{router}\"\nexecutor = \"synthetic\"\nkv-memory = \"4MiB\"\n\
             prefill-radix-cache = false\ndecode-radix-cache = false\n\
             plugins = [\"shm\"]\nplugins-dir = [\"{}\"]\ncontrol = \"127.0.0.1:0\"\n[plugin.shm]\ncopy_threads = 2\n{lines}",
            directory.display()
        );
        std::fs::write(&config, text).unwrap();
        let child = Command::new(HOST).arg("--config").arg(&config).args(flags).stdin(Stdio::null()).spawn();
        Self(child.unwrap())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            signal(self.0.id(), "TERM");
            self.0.wait().unwrap();
        }
    }
}

pub(super) fn router() -> (Cluster, String) {
    let flags = ["--role", "router", "--executor", "synthetic", "--control", "127.0.0.1:0"];
    let flags = flags.map(str::to_owned).to_vec();
    let cluster =
        Cluster::start(&Start { program: Path::new(HOST), flags, config: String::new(), workers: 0 });
    let control = cluster.greeting.rsplit(' ').next().unwrap().to_owned();
    (cluster, control)
}

#[test]
fn parts_started_by_hand_serve_and_a_worker_that_does_not_fit_does_no_harm() {
    let plugins = plugin_files::directory(&["shm"]);
    let (cluster, control) = router();
    let start = |role: &str, flags: &[&str]| Worker::start(plugins.path(), role, &control, flags);
    let odd = start("prefill", &["--name=odd", "--page-size=32"]);
    let decode = start("decode", &["--name=taker"]);
    cluster.wait("both to register", || cluster.workers().len() == 2);

    // Without another worker the pair is refused, with both values in the error, and every process goes on.
    let error = cluster.generate(&[1, 2, 3], 4).unwrap_err();
    assert!(error.contains("503") && error.contains("32") && error.contains("16"), "{error}");
    let health = cluster.health().unwrap();
    let refused = health["refused_pairs"].to_string();
    assert!(refused.contains("page_tokens is 32 on prefill and 16 on decode"), "{health}");

    let fitting = start("prefill", &["--name=fitting"]);
    cluster.wait("an answer", || cluster.generate(&[1, 2, 3], 4).is_ok());
    for prompt in [vec![5; 40], vec![6; 17]] {
        let answer = cluster.generate(&prompt, 6).unwrap();
        assert_eq!(answer.tokens.len(), 6);
        assert!(answer.transferred_bytes > 0);
    }
    cluster.wait("all to be there", || cluster.workers().len() == 3);
    cluster.wait("all pages to be free", || cluster.all_free());
    drop((odd, decode, fitting));
}

#[test]
fn two_prefill_workers_share_one_decode_worker() {
    let plugins = plugin_files::directory(&["shm"]);
    let (cluster, control) = router();
    let start = |role: &str, flags: &[&str]| Worker::start(plugins.path(), role, &control, flags);
    let workers =
        [start("prefill", &["--name=p0"]), start("prefill", &["--name=p1"]), start("decode", &["--name=d0"])];
    cluster.wait("all to register", || cluster.workers().len() == 3);
    let prompts: Vec<Vec<u32>> = (0..24).map(|i| (0..20 + i).map(|t| (t * 7 + i) % 256).collect()).collect();
    let ask = || -> Vec<_> {
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                prompts.iter().map(|prompt| scope.spawn(|| cluster.generate(prompt, 8).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    assert_eq!(ask(), ask());
    for worker in cluster.workers() {
        let metrics = cluster.metrics(&worker);
        assert!(metrics["host_requests_finished_total"] > 0.0, "{} was never used", worker.name);
    }
    cluster.wait("all pages to be free", || cluster.all_free());
    drop(workers);
}

#[test]
fn an_answer_that_ends_in_a_stop_string_still_says_what_was_moved() {
    let plugins = plugin_files::directory(&["shm"]);
    let (cluster, control) = router();
    let workers = [
        Worker::start(plugins.path(), "prefill", &control, &["--name=p"]),
        Worker::start(plugins.path(), "decode", &control, &["--name=d"]),
    ];
    cluster.wait("both to register", || cluster.workers().len() == 2);
    let ask = |stop: Option<&str>| -> serde_json::Value {
        let body = serde_json::json!({
            "input_ids": vec![9; 40],
            "sampling_params": { "max_new_tokens": 12, "temperature": 0, "stop": stop },
        });
        let (status, text) = cluster.post("/generate", &body.to_string()).unwrap();
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    };
    let whole = ask(None);
    let text = whole["text"].as_str().unwrap();
    let stop = &text[5..7];
    let stopped = ask(Some(stop));
    assert!(stopped["text"].as_str().unwrap().len() < text.len(), "{stopped}");
    for field in ["transferred_bytes", "transfer_plugin"] {
        assert_eq!(stopped["meta_info"][field], whole["meta_info"][field], "{field}: {stopped}");
    }
    cluster.wait("all pages to be free", || cluster.all_free());
    drop(workers);
}

#[tokio::test]
async fn a_worker_that_refuses_a_handshake_tells_no_endpoint() {
    let plugins = plugin_files::directory(&["shm"]);
    let (cluster, control) = router();
    let _prefill = Worker::start(plugins.path(), "prefill", &control, &["--name=prefill"]);
    cluster.wait("the worker to register", || cluster.workers().len() == 1);
    let health = cluster.health().unwrap();
    let address = health["workers"][0]["address"].as_str().unwrap().to_owned();
    let stranger =
        WorkerInfo { instance: 7, name: "x".into(), role: "prefill".into(), ..WorkerInfo::default() };
    let mut client = WorkerClient::connect(address).await.unwrap();
    let far = stranger.clone();
    let request = HandshakeRequest { from: Some(stranger), floor: 0, to: 0 };
    let reply = client.handshake(request).await.unwrap().into_inner();
    assert!(!reply.accepted && reply.worker.is_none(), "{reply:?}");
    assert!(reply.message.contains("KV goes from prefill to decode"), "{reply:?}");
    let far = WorkerInfo { role: "decode".into(), protocol: 90, protocol_oldest: 80, ..far };
    let request = HandshakeRequest { from: Some(far), floor: 0, to: 0 };
    let reply = client.handshake(request).await.unwrap().into_inner();
    assert!(!reply.accepted && reply.message.contains("80 to 90"), "{reply:?}");
}

//! Prefix-aware routing with real processes: a router, two prefill and two decode workers, KV over shared memory. With every
//! policy, answers are those of one aggregated worker.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::plugin_files;
use host_wire::proto::FollowCacheRequest;
use host_wire::proto::worker_client::WorkerClient;
use serde_json::{Value, json};

const HOST: &str = env!("CARGO_BIN_EXE_host");
const POOL_PAGES: &str = "256";

/// A worker process, ended with the test.
struct Worker(Child);

impl Worker {
    fn start(plugins: &Path, role: &str, name: &str, router: &str) -> Self {
        let mut command = Command::new(HOST);
        command.args(["--role", role, "--name", name, "--router", router, "--executor", "synthetic"]);
        command.args(["--pool-pages", POOL_PAGES, "--prefill-radix-cache", "--decode-radix-cache"]);
        command.arg("--plugins-dir").arg(plugins);
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
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

fn router(control: &str, policy: &str) -> Cluster {
    let flags =
        ["--role", "router", "--executor", "synthetic", "--control", control, "--router-policy", policy];
    let flags = flags.map(str::to_owned).to_vec();
    Cluster::start(&Start { program: Path::new(HOST), flags, config: String::new(), workers: 0 })
}

fn aggregated() -> Cluster {
    let flags = ["--role", "aggregated", "--executor", "synthetic"].map(str::to_owned).to_vec();
    Cluster::start(&Start { program: Path::new(HOST), flags, config: String::new(), workers: 1 })
}

/// A router and its four workers.
struct Fleet {
    router: Cluster,
    control: String,
    workers: Vec<Worker>,
    plugins: tempfile::TempDir,
}

impl Fleet {
    fn start(policy: &str) -> Self {
        let plugins = plugin_files::directory(&["shm"]);
        // A fixed port, which a later router binds again.
        let router = router(&host_tests::ports::unused().to_string(), policy);
        let control = router.greeting.rsplit(' ').next().unwrap().to_owned();
        let names = [("prefill", "p0"), ("prefill", "p1"), ("decode", "d0"), ("decode", "d1")];
        let start = |(role, name): (&str, &str)| Worker::start(plugins.path(), role, name, &control);
        let workers = names.into_iter().map(start).collect();
        let fleet = Self { router, control, workers, plugins };
        fleet.whole();
        fleet
    }

    /// Waits until all four workers are live and the router follows their caches.
    fn whole(&self) {
        self.has(4);
    }

    /// Waits until `count` workers are live and the router follows their caches. A worker that missed a heartbeat gets no request.
    fn has(&self, count: usize) {
        let follows = self.policy() == "prefix";
        self.router.wait("the workers to be there", || {
            let is_there = |worker: &&Value| {
                worker["state"] == "live" && (worker["cache"]["followed"] == true || !follows)
            };
            self.health().iter().filter(is_there).count() == count
        });
    }

    /// Waits for all four workers, then sends a request.
    fn ask(&self, prompt: &[u32], count: u32) -> Served {
        self.whole();
        ask(&self.router, prompt, count)
    }

    fn health(&self) -> Vec<Value> {
        self.router.health().map(|health| health["workers"].as_array().unwrap().clone()).unwrap_or_default()
    }

    fn policy(&self) -> String {
        self.router.health().unwrap()["routing"]["policy"].as_str().unwrap().to_owned()
    }

    fn of(&self, worker: &str) -> Value {
        self.health().into_iter().find(|each| each["name"] == worker).unwrap_or_default()
    }

    /// Number of pages of a worker that the router's index has.
    fn known(&self, worker: &str) -> u64 {
        self.of(worker)["cache"]["known_pages"].as_u64().unwrap_or(0)
    }

    /// Waits until the index has as many pages of each worker as the worker has cached.
    fn settle(&self) {
        self.router.wait("the index to equal the caches", || {
            self.router.workers().iter().all(|worker| {
                let cached = self.router.metrics(worker).get("host_kv_pages{state=\"cached\"}").copied();
                cached == Some(self.known(&worker.name) as f64)
            })
        });
    }

    /// Ends the router and starts another at the same control address.
    fn restart_router(&mut self, policy: &str) {
        let address = self.control.trim_start_matches("http://").to_owned();
        assert_eq!(self.router.interrupt(), Some(0));
        self.router = router(&address, policy);
        self.whole();
    }

    fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.router.get("/metrics").unwrap();
        let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }
}

#[derive(Debug)]
struct Served {
    tokens: Vec<u32>,
    prefill: String,
    decode: String,
    cached: u64,
}

fn ask_with(cluster: &Cluster, prompt: &[u32], count: u32, more: &Value) -> Served {
    let mut body = json!({
        "input_ids": prompt,
        "sampling_params": { "max_new_tokens": count, "temperature": 0, "ignore_eos": true },
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (status, text) = cluster.post("/generate", &body.to_string()).unwrap();
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let tokens = answer["output_ids"].as_array().unwrap();
    let meta = &answer["meta_info"];
    let name = |field: &str| meta[field].as_str().unwrap_or_default().to_owned();
    Served {
        tokens: tokens.iter().map(|token| token.as_u64().unwrap() as u32).collect(),
        prefill: name("prefill_worker"),
        decode: name("decode_worker"),
        cached: meta["cached_tokens"].as_u64().unwrap(),
    }
}

fn ask(cluster: &Cluster, prompt: &[u32], count: u32) -> Served {
    ask_with(cluster, prompt, count, &json!({}))
}

fn conversation(number: u32) -> Vec<u32> {
    (0..480).map(|token| (token * 7 + number * 31 + token / 50 * number) % 200).collect()
}

#[test]
fn each_turn_goes_to_the_workers_that_have_the_conversation() {
    let (fleet, whole) = (Fleet::start("prefix"), aggregated());
    let mut conversations: Vec<Vec<u32>> = (0..6).map(conversation).collect();
    let mut homes: Vec<Option<(String, String)>> = vec![None; conversations.len()];
    for turn in 1..=3 {
        for (number, (tokens, home)) in conversations.iter_mut().zip(&mut homes).enumerate() {
            // Every second conversation uses a namespace, which is part of a page's name.
            let namespace = json!({ "extra_key": if number % 2 == 0 { "" } else { "team" } });
            fleet.whole();
            let served = ask_with(&fleet.router, tokens, 20, &namespace);
            assert_eq!(served.tokens, ask(&whole, tokens, 20).tokens);
            println!(
                "turn {turn}: {} + {}, {} of {} cached",
                served.prefill,
                served.decode,
                served.cached,
                tokens.len()
            );
            let here = (served.prefill, served.decode);
            if let Some(home) = home {
                assert_eq!(*home, here, "turn {turn}");
                assert!(served.cached as usize >= tokens.len() / 2, "turn {turn}");
            }
            *home = Some(here);
            tokens.extend(&served.tokens);
            tokens.extend((0..20).map(|token| (token * 11 + turn) % 200));
        }
        fleet.settle();
    }
    let used: BTreeSet<&str> = homes.iter().flatten().flat_map(|(p, d)| [p.as_str(), d.as_str()]).collect();
    assert_eq!(used.len(), 4, "conversations are spread: {homes:?}");
    // A request with `no_cache` adds no pages to the index either.
    let known = ["p0", "p1", "d0", "d1"].map(|name| fleet.known(name));
    fleet.whole();
    let probe = ask_with(&fleet.router, &conversation(77), 2, &json!({ "no_cache": true }));
    fleet.settle();
    assert_eq!((probe.cached, ["p0", "p1", "d0", "d1"].map(|name| fleet.known(name))), (0, known));
    // The router expected about as many cached tokens as workers found.
    let (expected, found) = (
        fleet.metric("host_expected_cached_prompt_tokens_total"),
        fleet.metric("host_cached_prompt_tokens_total"),
    );
    assert!(found > 0.0 && (0.9..1.1).contains(&(expected / found)), "expected {expected}, found {found}");
    fleet.router.wait("all requests to end", || fleet.router.all_free());
}

#[test]
fn a_dead_workers_pages_leave_the_index_and_its_conversations_move_on() {
    let (mut fleet, whole) = (Fleet::start("prefix"), aggregated());
    let prompt = conversation(1);
    let first = fleet.ask(&prompt, 20);
    fleet.settle();
    assert!(fleet.known(&first.decode) > 0 && fleet.known(&first.prefill) > 0);
    let at = if first.decode == "d0" { 2 } else { 3 };
    fleet.workers[at].kill();
    fleet.router.wait("its pages to leave the index", || {
        fleet.known(&first.decode) == 0 && fleet.of(&first.decode)["cache"]["followed"] == false
    });
    fleet.has(3);
    let again = ask(&fleet.router, &prompt, 20);
    assert_ne!(again.decode, first.decode);
    assert_eq!((&again.tokens, &again.prefill), (&first.tokens, &first.prefill), "prefill still has it");
    assert_eq!(again.tokens, ask(&whole, &prompt, 20).tokens);
    // A new process of the same name begins without pages, and the router follows its cache again.
    fleet.workers[at] = Worker::start(fleet.plugins.path(), "decode", &first.decode, &fleet.control);
    fleet.whole();
    assert_eq!(fleet.known(&first.decode), 0);
    fleet.settle();
}

#[test]
fn a_router_that_starts_anew_learns_everything_from_snapshots() {
    let mut fleet = Fleet::start("prefix");
    let prompt = conversation(1);
    // More events than the workers remember, over small pools: a router that starts later must get snapshots.
    for number in 0..150 {
        fleet.ask(&conversation(100 + number), 1);
    }
    let first = fleet.ask(&prompt, 20);
    fleet.settle();
    let known = |fleet: &Fleet| ["p0", "p1", "d0", "d1"].map(|name| fleet.known(name));
    let before = known(&fleet);
    assert!(before.iter().all(|pages| *pages > 0), "{before:?}");
    fleet.restart_router("prefix");
    fleet.router.wait("the index to be what it was", || known(&fleet) == before);
    assert_eq!(fleet.metric("host_router_cache_snapshots_total"), 4.0);
    let second = fleet.ask(&prompt, 20);
    assert_eq!((&second.prefill, &second.decode), (&first.prefill, &first.decode));
    assert!(second.cached >= 400, "{second:?}");
    assert_eq!(second.tokens, first.tokens);
    fleet.settle();
    let worker = fleet.router.worker("decode");
    let instance = u64::from_str_radix(&worker.instance, 16).unwrap();
    let refused = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let mut client = WorkerClient::connect(worker.address).await.unwrap();
        client.follow_cache(FollowCacheRequest { instance: instance + 1, after: 0 }).await.unwrap_err()
    });
    assert!(refused.message().contains("this is instance"), "{refused}");
}

#[test]
fn two_routers_over_the_same_workers_know_the_same() {
    let plugins = plugin_files::directory(&["shm"]);
    let routers = [router("127.0.0.1:0", "prefix"), router("127.0.0.1:0", "prefix")];
    let both =
        routers.each_ref().map(|router| router.greeting.rsplit(' ').next().unwrap().to_owned()).join(",");
    let names = [("prefill", "p0"), ("prefill", "p1"), ("decode", "d0"), ("decode", "d1")];
    let workers = names.map(|(role, name)| Worker::start(plugins.path(), role, name, &both));
    let [one, other] = routers.map(|router| Fleet {
        router,
        control: String::new(),
        workers: Vec::new(),
        plugins: tempfile::tempdir().unwrap(),
    });
    [&one, &other].into_iter().for_each(Fleet::whole);
    for number in 0..6 {
        let prompt = conversation(number);
        let first = one.ask(&prompt, 8);
        [&one, &other].into_iter().for_each(Fleet::settle);
        assert_eq!(names.map(|(_, name)| one.known(name)), names.map(|(_, name)| other.known(name)));
        let second = other.ask(&prompt, 8);
        assert_eq!((&second.prefill, &second.decode), (&first.prefill, &first.decode), "{number}");
        assert_eq!(second.tokens, first.tokens);
    }
    drop(workers);
}

#[test]
fn a_burst_that_begins_alike_meets_and_a_session_stays() {
    let fleet = Fleet::start("prefix");
    let base = conversation(3);
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| [base.as_slice(), &[i; 20]].concat()).collect();
    let served: Vec<Served> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            prompts.iter().map(|prompt| scope.spawn(|| ask(&fleet.router, prompt, 4))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let prefills: BTreeSet<&str> = served.iter().map(|served| served.prefill.as_str()).collect();
    assert_eq!(prefills.len(), 1, "nothing of it was cached when they came: {served:?}");
    // Prompts of one session go to the same workers even if they share no prefix. Without a session they would go to each in turn.
    for name in ["one", "two", "three"] {
        let session = json!({ "session_id": name });
        let at: BTreeSet<(String, String)> = (0..4)
            .map(|i| {
                fleet.whole();
                let served = ask_with(&fleet.router, &conversation(name.len() as u32 * 50 + i), 2, &session);
                (served.prefill, served.decode)
            })
            .collect();
        assert_eq!(at.len(), 1, "session {name}: {at:?}");
    }
    assert!(fleet.metric("host_router_sessions_stayed_total") >= 9.0);
}

#[test]
fn every_policy_serves_and_gives_the_same_answers() {
    let (mut fleet, whole) = (Fleet::start("random"), aggregated());
    for policy in ["random", "round-robin", "least-loaded", "prefix"] {
        if policy != "random" {
            fleet.restart_router(policy);
        }
        assert_eq!(fleet.policy(), policy);
        let served: Vec<Served> = (0..24).map(|i| fleet.ask(&conversation(i % 6), 3)).collect();
        for (i, served) in (0..).zip(&served) {
            assert_eq!(served.tokens, ask(&whole, &conversation(i % 6), 3).tokens, "{policy}");
        }
        let used: BTreeSet<&str> =
            served.iter().flat_map(|served| [served.prefill.as_str(), served.decode.as_str()]).collect();
        assert_eq!(used.len(), 4, "{policy}: {served:?}");
        if policy == "round-robin" {
            assert!(served.windows(2).all(|two| two[0].decode != two[1].decode), "{served:?}");
        }
    }
    fleet.router.wait("all requests to end", || fleet.router.all_free());
}

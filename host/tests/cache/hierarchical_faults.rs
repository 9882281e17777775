//! A storage tier that damages, fails, forgets, refuses, delays and hangs, with real workers: every answer is the same as without a
//! cache, and nothing is held afterwards.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;

use host_tests::caches::{RESTORES, TRIES, sum};
use host_tests::cluster::{Cluster, Start, signal};
use host_tests::cuda::OnBoth;
use host_tests::hold::Hold;
use host_tests::plugin_files;

const PAGE_TOKENS: usize = 16;
const ALONE: &[&str] = &["--role", "aggregated", "--prefill-radix-cache"];
const PAIR: &[&str] = &["--decode-radix-cache", "--prefill-radix-cache"];
/// Slow steps, so that an answer takes long enough for a test to act meanwhile.
const STEPS: &str = "[synthetic]\nstep-us = 1000\n";

fn start(flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    computing(&["--executor", "synthetic"].map(str::to_owned), flags, config)
}

/// A server with these flags for its executor.
fn computing(executor: &[String], flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm", "faulty-tier", "hicache-file"]);
    let mut all = executor.to_vec();
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers }), plugins)
}

fn faulty(flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let offload = ["--hierarchical-cache", "--hicache-storage", "faulty-tier"];
    let costs = if config.contains("hang-") { TRIES } else { RESTORES };
    start(&[flags, &offload].concat(), &format!("{STEPS}{costs}[plugin.faulty-tier]\n{config}"))
}

/// Prompts, some with the same beginning.
fn prompts() -> Vec<Vec<u32>> {
    (0..8_u32)
        .map(|number| {
            let shared = (0..5 * PAGE_TOKENS as u32).map(|at| (at * 7 + number % 3) % 200);
            shared.chain((0..40 + number * 9).map(|at| (at * (number + 3) + number) % 200)).collect()
        })
        .collect()
}

fn ask(cluster: &Cluster) -> Vec<Vec<u64>> {
    let prompts = prompts();
    std::thread::scope(|scope| {
        let clients: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| cluster.generate(prompt, 9).unwrap().tokens))
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

fn expected() -> Vec<Vec<u64>> {
    let (plain, _plugins) = start(&["--role", "aggregated"], "");
    ask(&plain)
}

#[test]
fn no_damage_to_stored_pages_reaches_an_answer() {
    let expected = expected();
    let ranks = [PAIR, &["--prefill-tp", "4", "--decode-tp", "2"]].concat();
    for (flags, fault) in
        [(ALONE, "flip"), (PAIR, "truncate"), (PAIR, "foreign"), (&ranks, "flip truncate foreign")]
    {
        let (cluster, _plugins) = faulty(flags, &damage(fault));
        damaged_pages_change_nothing(&cluster, &expected, fault);
    }
}

#[test]
fn no_damage_to_stored_pages_of_a_gpu_reaches_an_answer() {
    let model = OnBoth::new();
    let (alone, _more) = computing(&model.on("cpu"), &["--role", "aggregated"], "");
    let fault = "flip truncate foreign";
    let flags = [PAIR, &["--hierarchical-cache", "--hicache-storage", "faulty-tier"]].concat();
    let config = format!("{RESTORES}[plugin.faulty-tier]\n{}", damage(fault));
    let (cluster, _plugins) = computing(&model.on("cuda"), &flags, &config);
    damaged_pages_change_nothing(&cluster, &ask(&alone), fault);
}

fn damage(fault: &str) -> String {
    format!("faults = {fault:?}\nevery = 3\nseed = 7\n")
}

/// Asks several times, and each time finds only storage, some of whose pages are damaged.
fn damaged_pages_change_nothing(cluster: &Cluster, expected: &[Vec<u64>], fault: &str) {
    for turn in 0..3 {
        assert_eq!(ask(cluster), expected, "{fault} in turn {turn}");
        cluster.await_none("host_storage_queue_pages");
        cluster.flush();
    }
    cluster.await_nothing_held();
    cluster.wait(&format!("pages that {fault} has met"), || {
        cluster.all_storage_pages("read") > 0.0 && cluster.all_storage_pages("damaged") > 0.0
    });
}

#[test]
fn errors_lies_and_refusals_change_no_answer() {
    let expected = expected();
    for flags in [ALONE, PAIR] {
        let config = "faults = \"fail forget lie refuse\"\nevery = 3\nseed = 5\ndelay_ms = 3\n";
        let (cluster, _plugins) = faulty(flags, config);
        let turn = || {
            assert_eq!(ask(&cluster), expected, "with {flags:?}");
            cluster.await_none("host_storage_queue_pages");
            cluster.flush();
        };
        (0..3).for_each(|_| turn());
        // The pages that are read depend on what is computed meanwhile. So it may take more turns until each fault has met a page.
        for end in ["read", "read_failed", "written", "write_refused"] {
            cluster.wait(&format!("pages that end as {end}"), || {
                let met = cluster.all_storage_pages(end) > 0.0;
                if !met {
                    turn();
                }
                met
            });
        }
        cluster.await_nothing_held();
    }
}

#[test]
fn storage_that_hangs_for_ever_costs_a_request_its_deadline_and_nothing_else() {
    let expected = expected();
    for (flags, fault) in
        [(ALONE, "hang-get"), (PAIR, "hang-get"), (PAIR, "hang-exists"), (ALONE, "hang-put")]
    {
        let (cluster, _plugins) = faulty(flags, &format!("faults = {fault:?}\n"));
        assert_eq!(ask(&cluster), expected, "{fault} with {flags:?}");
        if fault != "hang-put" {
            cluster.await_none("host_storage_queue_pages");
        }
        cluster.flush();
        assert_eq!(ask(&cluster), expected, "{fault} with {flags:?}");
        if fault != "hang-put" {
            cluster.wait("the tier to be left alone", || rested(&cluster));
        }
        assert_eq!(ask(&cluster), expected, "{fault} with {flags:?}");
        cluster.wait("all requests to end", || cluster.all_free());
        if fault != "hang-put" {
            cluster.await_none("host_hicache_slots_pinned");
            cluster.await_none("host_hicache_slots{state=\"filling\"}");
        }
    }
}

/// Whether a worker has stopped using the tier for a while, as it does after each deadline that the tier missed.
fn rested(cluster: &Cluster) -> bool {
    let missed = |worker| sum(&cluster.metrics(worker), "host_storage_deadlines_missed_total", "faulty-tier");
    cluster.workers().iter().any(|worker| missed(worker) > 0.0)
}

/// Sends all prompts while `happens` acts on the workers. Each answer must be the right one, and a request without an answer must
/// get a reason.
fn ask_during(cluster: &Cluster, expected: &[Vec<u64>], happens: impl FnOnce()) {
    let prompts = prompts();
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            prompts.iter().map(|prompt| scope.spawn(|| cluster.generate(prompt, 9))).collect();
        happens();
        for (thread, expected) in clients.into_iter().zip(expected) {
            match thread.join().unwrap() {
                Ok(answer) => assert_eq!(answer.tokens, *expected),
                Err(why) => assert!(why.starts_with("50") && why.contains("message"), "{why}"),
            }
        }
    });
}

fn reads(cluster: &Cluster, role: &str) -> f64 {
    let workers = cluster.workers();
    let Some(worker) = workers.iter().find(|worker| worker.role == role) else { return 0.0 };
    let metrics = cluster.metrics(worker);
    let mut reads = metrics
        .iter()
        .filter(|(name, _)| name.starts_with("host_storage_queue_pages") && name.contains("way=\"read\""));
    reads.next().map_or(0.0, |(_, pages)| *pages)
}

#[test]
fn workers_killed_while_pages_are_read_leave_nothing_behind_in_the_others() {
    let expected = expected();
    for role in ["decode", "prefill"] {
        let hold = Hold::new();
        let (cluster, _plugins) = faulty(PAIR, &hold.reads());
        assert_eq!(ask(&cluster), expected);
        cluster.await_none("host_storage_queue_pages");
        cluster.flush();
        let before = cluster.worker(role);
        let held = hold.begin();
        ask_during(&cluster, &expected, || {
            cluster.wait("pages to be read", || reads(&cluster, role) > 0.0);
            signal(cluster.pid(role).unwrap(), "KILL");
            held.end();
        });
        cluster.wait_for_another(&before);
        assert_eq!(ask(&cluster), expected, "after the {role} worker was killed");
        cluster.await_nothing_held();
    }
}

/// Sends a request with a long answer, waits for `until`, and closes the connection before the answer has come.
fn abandon(cluster: &Cluster, prompt: &[u32], until: impl FnMut() -> bool) {
    let body = format!(
        "{{\"input_ids\":{prompt:?},\"sampling_params\":{{\"max_new_tokens\":20000,\"ignore_eos\":true}}}}"
    );
    let address = cluster.url.trim_start_matches("http://");
    let mut client = TcpStream::connect(address).unwrap();
    let head =
        "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ";
    client.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    cluster.wait("a request to get so far", until);
    client.set_nonblocking(true).unwrap();
    let answer = client.peek(&mut [0; 1]).map_err(|error| error.kind());
    assert_eq!(
        answer,
        Err(std::io::ErrorKind::WouldBlock),
        "the request is refused, or its answer is complete"
    );
}

#[test]
fn clients_that_go_away_at_any_moment_and_flushes_leave_nothing_held() {
    let expected = expected();
    for flags in [ALONE, PAIR] {
        let (cluster, _plugins) = faulty(flags, "faults = \"flip fail forget\"\nevery = 6\ndelay_ms = 20\n");
        assert_eq!(ask(&cluster), expected);
        let last = if flags == ALONE { "aggregated" } else { "decode" };
        for (round, prompt) in prompts().iter().enumerate() {
            cluster.await_none("host_storage_queue_pages");
            cluster.flush();
            let others = prompts();
            std::thread::scope(|scope| {
                let others: Vec<_> = others
                    .iter()
                    .skip(round % 2)
                    .step_by(2)
                    .map(|prompt| scope.spawn(|| cluster.generate(prompt, 9)))
                    .collect();
                abandon(&cluster, prompt, || match round % 3 {
                    0 => true,
                    1 => reads(&cluster, last) > 0.0 || cluster.all_storage_pages("read") > 0.0,
                    _ => cluster.metrics(&cluster.worker(last))["host_requests_active"] > 0.0,
                });
                cluster.flush();
                for (thread, expected) in others.into_iter().zip(expected.iter().skip(round % 2).step_by(2)) {
                    assert_eq!(thread.join().unwrap().unwrap().tokens, *expected);
                }
            });
        }
        cluster.await_nothing_held();
        assert_eq!(ask(&cluster), expected, "{flags:?}");
    }
}

#[test]
fn almost_no_host_memory_and_a_store_that_is_taken_away_change_no_answer() {
    let expected = expected();
    let store = tempfile::tempdir().unwrap();
    let directory = store.path().join("pages");
    let config = format!("{STEPS}{RESTORES}[plugin.hicache-file]\ndir = {directory:?}\n");
    let offload = ["--hierarchical-cache", "--hicache-storage", "hicache-file", "--hicache-memory", "96KiB"];
    let (cluster, _plugins) = start(&[PAIR, &offload].concat(), &config);
    for turn in 0..4 {
        assert_eq!(ask(&cluster), expected, "turn {turn}");
        cluster.await_none("host_storage_queue_pages");
        cluster.flush();
        if turn == 1 {
            std::fs::remove_dir_all(&directory).unwrap();
        }
    }
    cluster.await_nothing_held();
}

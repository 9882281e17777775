//! Real workers with the real Mooncake Store. Pages that one process stored another one restores, also with other numbers of ranks.
//! When the pool loses its memory or its master, or misses its deadline, no answer changes, nothing is held, and no request waits
//! for long.

use std::path::Path;
use std::process::Command;

use host_tests::caches::{RESTORES, TRIES};
use host_tests::cluster::{Cluster, Start, runs, signal};
use host_tests::mooncake_pool::Pool;
use host_tests::plugin_files;
use host_tests::program::Ended;

const PAGE_TOKENS: usize = 16;
/// A deadline of the store in milliseconds that no call reaches.
const PATIENT_MS: u64 = 60_000;
/// A deadline in milliseconds that calls reach when the pool has lost its memory or its master. No call reaches it before, even on
/// a busy machine.
const LOSSES_MS: u64 = 20_000;
/// Seconds after which the master forgets a process that died. Until then, reads of its pages fail.
const FORGETS: u32 = 60;
/// Tokens of an answer.
const ANSWER: u32 = 20;
const MODEL: &str = "[synthetic]\nkv-heads = 8\n";
const CACHES: [&str; 5] = [
    "--decode-radix-cache",
    "--prefill-radix-cache",
    "--hierarchical-cache",
    "--hicache-storage",
    "mooncake",
];

fn start(flags: &[&str], plugins: &Path, config: String) -> Cluster {
    let directory = plugins.display().to_string();
    let always = ["--executor", "synthetic", "--plugins-dir", &directory, "--chunk-tokens", "64"];
    let flags: Vec<String> = always.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    let workers = if flags.iter().any(|flag| flag == "aggregated") { 1 } else { 2 };
    Cluster::start(&Start { program: Path::new(env!("CARGO_BIN_EXE_host")), flags, config, workers })
}

/// A prefill and a decode worker that lend so much memory to the pool. Their deadline is never reached.
fn workers(pool: &Pool, plugins: &Path, lent: &str, flags: &[&str]) -> Cluster {
    workers_that(RESTORES, PATIENT_MS, pool, plugins, lent, flags)
}

/// As [`workers`], with these costs of restoring and this deadline of calls into the store, in milliseconds.
fn workers_that(
    costs: &str,
    deadline_ms: u64,
    pool: &Pool,
    plugins: &Path,
    lent: &str,
    flags: &[&str],
) -> Cluster {
    let table = pool.config(&format!("global_segment_size = {lent:?}\nstore_deadline_ms = {deadline_ms}\n"));
    start(&[&CACHES, flags].concat(), plugins, format!("{MODEL}{costs}[plugin.mooncake]\n{table}"))
}

fn prompts() -> Vec<Vec<u32>> {
    let prompt = |length: u32| (0..length).map(|token| (token * 37 + length) % 250).collect();
    [33, 64, 100, 130, 200].map(prompt).to_vec()
}

fn ask(cluster: &Cluster) -> Vec<Vec<u64>> {
    let prompts = prompts();
    std::thread::scope(|scope| {
        let asks: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| cluster.generate(prompt, ANSWER).unwrap().tokens))
            .collect();
        asks.into_iter().map(|ask| ask.join().unwrap()).collect()
    })
}

fn expected(plugins: &Path) -> Vec<Vec<u64>> {
    ask(&start(&["--role", "aggregated"], plugins, MODEL.to_owned()))
}

/// The value of one of the plugin's own metrics.
fn plugin_metric(cluster: &Cluster, role: &str, name: &str) -> f64 {
    cluster.total(role, "host_plugin_", &format!("name=\"{name}\""))
}

fn restored(cluster: &Cluster, role: &str) -> f64 {
    cluster.storage_pages(role, "read")
}

/// Waits until decode has stored the whole pages of all prompts and answers. The last token that was drawn has no KV.
fn await_stored(cluster: &Cluster) {
    let pages = prompts().iter().map(|prompt| (prompt.len() + ANSWER as usize - 1) / PAGE_TOKENS).sum();
    await_stored_by(cluster, "decode", pages);
}

/// Waits until a worker has stored so many pages. If puts failed, asks for everything again, so that their pages are computed and
/// put again. Pages that the worker then reads count as stored.
fn await_stored_by(cluster: &Cluster, role: &str, pages: usize) {
    let mut before = 0.0;
    cluster.wait("whole pages to be stored", || {
        cluster.await_written();
        let (written, read) = (cluster.storage_pages(role, "written"), restored(cluster, role));
        if written >= pages as f64 || written + read - before >= pages as f64 {
            return true;
        }
        before = written + read;
        cluster.flush();
        ask(cluster);
        false
    });
}

/// Waits until nothing is held, by the plugin neither.
fn await_nothing_held(cluster: &Cluster) {
    cluster.await_nothing_held();
    cluster.await_none("host_plugin_gauge{plugin=\"host.mooncake\",name=\"store_pages_held\"}");
    for role in ["prefill", "decode"] {
        assert_eq!(cluster.total(role, "host_integrity_failures_total", ""), 0.0);
    }
}

/// Waits until another process has replaced this worker.
fn await_another(cluster: &Cluster, role: &str, before: &str) {
    cluster.wait("another life", || {
        let workers = cluster.workers();
        workers.iter().any(|worker| worker.role == role && worker.instance != before) && workers.len() == 2
    });
}

/// Runs the conformance kit. Returns its report and the cases that it skipped.
fn kit(pool: &Pool, lent: &str, more: &[&str]) -> (String, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    let deadlines: String = ["connect_timeout", "fence_timeout", "store_deadline"]
        .map(|what| format!("{what}_ms = {PATIENT_MS}\n"))
        .concat();
    let table = format!("global_segment_size = {lent:?}\n{deadlines}");
    std::fs::write(&file, pool.config(&table)).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--patience", "30", "--time-limit", "300", "--plugin-config"])
        .args([&file, &plugin_files::plugin("mooncake")])
        .args(more)
        .output();
    let kit = Ended::from(output.unwrap());
    assert!(kit.status.success(), "{kit}");
    let skipped = kit.stdout.lines().filter_map(|line| line.strip_prefix("skip")?.split_whitespace().next());
    let skipped = skipped.map(str::to_owned).collect();
    (kit.stdout, skipped)
}

#[test]
fn the_whole_conformance_kit_passes_with_both_roles_open() {
    let Some(pool) = Pool::new() else { return };
    let (_master, _owner) = (pool.master(), pool.owner(64));
    let (said, skipped) = kit(&pool, "0", &[]);
    // One machine cannot run the case with several, and a pool cannot list its keys.
    assert_eq!(skipped, ["tier-scan", "transfer-multi-host", "tier-shared"], "{said}");
    for case in ["lifecycle ", "lifecycle-drop", "transfer-data", "tier-data"] {
        assert!(said.lines().any(|line| line.starts_with("pass") && line.contains(case)), "{case}: {said}");
    }
}

#[test]
fn the_tier_cases_of_the_conformance_kit_pass_where_the_worker_itself_lends_the_memory() {
    let Some(pool) = Pool::new() else { return };
    let _master = pool.master();
    let (said, _) = kit(&pool, "64mb", &["--case", "tier-"]);
    assert!(said.contains("tier-data") && said.contains("tier-hot-allocations"), "{said}");
}

#[test]
fn every_arrangement_restores_from_the_pool_and_answers_as_one_worker_alone() {
    let Some(pool) = Pool::new() else { return };
    let plugins = plugin_files::directory(&["shm", "mooncake"]);
    let expected = expected(plugins.path());
    // Once with both roles from the one plugin, and once with another plugin's transfers.
    for (transfer, prefill, decode) in [("mooncake", "1", "1"), ("shm", "4", "2"), ("mooncake", "2", "4")] {
        let _master = pool.master();
        let flags = ["--plugins", transfer, "--prefill-tp", prefill, "--decode-tp", decode];
        let cluster = workers(&pool, plugins.path(), "64mb", &flags);
        assert_eq!(ask(&cluster), expected, "{prefill} to {decode}");
        await_stored(&cluster);
        // From here on only the pool has pages.
        cluster.flush();
        assert_eq!(ask(&cluster), expected, "{prefill} to {decode}, restored");
        await_nothing_held(&cluster);
        let restored: f64 = ["prefill", "decode"].map(|role| restored(&cluster, role)).iter().sum();
        let hits: f64 =
            ["prefill", "decode"].map(|role| plugin_metric(&cluster, role, "store_hits")).iter().sum();
        assert!(
            restored > 0.0 && hits >= restored,
            "{prefill} to {decode}: {restored} pages of {hits} objects"
        );
    }
}

#[test]
fn what_prefill_alone_stored_a_decode_worker_restores_after_a_restart() {
    let Some(pool) = Pool::new() else { return };
    let plugins = plugin_files::directory(&["mooncake"]);
    let expected = expected(plugins.path());
    let (_master, _owner) = (pool.master(), pool.owner(64));
    let table = pool.config(&format!("global_segment_size = \"0\"\nstore_deadline_ms = {PATIENT_MS}\n"));
    let serve = |own: &str| {
        let offload = ["--hierarchical-cache", "--hicache-storage", "mooncake", "--plugins", "mooncake"];
        start(
            &[&[own], &offload[..]].concat(),
            plugins.path(),
            format!("{MODEL}{RESTORES}[plugin.mooncake]\n{table}"),
        )
    };
    let cluster = serve("--prefill-radix-cache");
    assert_eq!(ask(&cluster), expected);
    let pages = prompts().iter().map(|prompt| prompt.len() / PAGE_TOKENS).sum();
    await_stored_by(&cluster, "prefill", pages);
    assert_eq!(cluster.storage_pages("decode", "written"), 0.0);
    drop(cluster);
    let cluster = serve("--decode-radix-cache");
    assert_eq!(ask(&cluster), expected, "restored by decode");
    assert!(restored(&cluster, "decode") > 0.0);
    assert_eq!(restored(&cluster, "prefill"), 0.0);
    await_nothing_held(&cluster);
}

#[test]
fn what_dead_workers_stored_others_restore_with_another_number_of_ranks() {
    let Some(pool) = Pool::new() else { return };
    let plugins = plugin_files::directory(&["shm", "mooncake"]);
    let expected = expected(plugins.path());
    let (_master, _owner) = (pool.master(), pool.owner(64));
    let cluster = workers(&pool, plugins.path(), "0", &["--plugins", "shm", "--prefill-tp", "2"]);
    assert_eq!(ask(&cluster), expected);
    await_stored(&cluster);
    // One worker dies. After its restart it finds all pages that it had stored.
    let before = cluster.worker("decode").instance;
    signal(cluster.pid("decode").unwrap(), "KILL");
    await_another(&cluster, "decode", &before);
    cluster.flush();
    assert_eq!(ask(&cluster), expected, "after the decode worker was killed");
    assert!(restored(&cluster, "decode") > 0.0);
    await_nothing_held(&cluster);
    drop(cluster);
    // The workers that stored the pages are gone, and the new ones have other numbers of ranks.
    let cluster = workers(&pool, plugins.path(), "0", &["--plugins", "shm", "--decode-tp", "4"]);
    assert_eq!(ask(&cluster), expected, "other workers");
    // If one of the two restores a page in time, the other one need not.
    assert!(restored(&cluster, "decode") + restored(&cluster, "prefill") > 0.0);
    await_nothing_held(&cluster);
}

#[test]
fn the_death_of_the_process_that_holds_the_pages_costs_the_cache_and_no_answer() {
    let Some(pool) = Pool::new() else { return };
    let plugins = plugin_files::directory(&["shm", "mooncake"]);
    let expected = expected(plugins.path());
    let (_master, owner) = (pool.master_that_forgets(FORGETS), pool.owner(64));
    let cluster = workers_that(RESTORES, LOSSES_MS, &pool, plugins.path(), "0", &["--plugins", "shm"]);
    assert_eq!(ask(&cluster), expected);
    await_stored(&cluster);
    signal(owner.pid(), "KILL");
    for turn in 0..3 {
        cluster.flush();
        assert_eq!(ask(&cluster), expected, "turn {turn}");
    }
    await_nothing_held(&cluster);
    let failed = ["prefill", "decode"].map(|role| plugin_metric(&cluster, role, "store_get_errors"));
    assert!(failed.iter().sum::<f64>() > 0.0, "{failed:?}");
    // The next owner that lends memory is used.
    let _other = pool.owner(64);
    let before = plugin_metric(&cluster, "decode", "store_stored");
    cluster.wait("pages to be stored with the next owner", || {
        cluster.flush();
        assert_eq!(ask(&cluster), expected);
        plugin_metric(&cluster, "decode", "store_stored") > before
    });
    await_nothing_held(&cluster);
}

#[test]
fn without_its_master_the_pool_is_skipped_and_used_again_when_there_is_one() {
    let Some(pool) = Pool::new() else { return };
    let plugins = plugin_files::directory(&["shm", "mooncake"]);
    let expected = expected(plugins.path());
    let master = pool.master();
    let cluster = workers_that(RESTORES, LOSSES_MS, &pool, plugins.path(), "64mb", &["--plugins", "shm"]);
    assert_eq!(ask(&cluster), expected);
    await_stored(&cluster);
    cluster.wait("the link", || plugin_metric(&cluster, "decode", "store_master_up") == 1.0);
    drop(master);
    for turn in 0..3 {
        cluster.flush();
        assert_eq!(ask(&cluster), expected, "turn {turn} without a master");
    }
    cluster.wait("the workers to notice", || {
        ["prefill", "decode"].into_iter().all(|role| plugin_metric(&cluster, role, "store_master_up") == 0.0)
    });
    // No worker is started here: without a master it would end with an error.
    await_nothing_held(&cluster);
    let _master = pool.master();
    cluster.wait("the link", || {
        ["prefill", "decode"].into_iter().all(|role| plugin_metric(&cluster, role, "store_master_up") == 1.0)
    });
    // The new master knows no pages: they are stored again, and then found.
    let before = restored(&cluster, "decode");
    cluster.wait("pages to be restored again", || {
        cluster.flush();
        assert_eq!(ask(&cluster), expected);
        restored(&cluster, "decode") > before
    });
    await_nothing_held(&cluster);
    assert!(plugin_metric(&cluster, "decode", "store_master_lost") >= 1.0);
    assert!(plugin_metric(&cluster, "decode", "store_master_back") >= 1.0);
}

#[test]
fn a_frozen_peer_costs_a_request_no_more_than_its_deadline_for_storage() {
    let Some(pool) = Pool::new() else { return };
    let plugins = plugin_files::directory(&["shm", "mooncake"]);
    let expected = expected(plugins.path());
    for what in ["owner", "master"] {
        let (master, owner) = (pool.master(), pool.owner(64));
        let cluster = workers_that(TRIES, PATIENT_MS, &pool, plugins.path(), "0", &["--plugins", "shm"]);
        assert_eq!(ask(&cluster), expected);
        await_stored(&cluster);
        let frozen = if what == "owner" { owner.pid() } else { master.pid() };
        cluster.flush();
        signal(frozen, "STOP");
        for turn in 0..3 {
            assert_eq!(ask(&cluster), expected, "turn {turn} with a frozen {what}");
            cluster.flush();
        }
        cluster.wait(&format!("a frozen {what} to be seen in the metrics"), || {
            let missed = |role| cluster.total(role, "host_storage_deadlines_missed_total", "");
            missed("prefill") + missed("decode") > 0.0
        });
        signal(frozen, "CONT");
        assert_eq!(ask(&cluster), expected, "after the {what} was frozen");
        await_nothing_held(&cluster);
    }
}

#[test]
fn the_supervisor_runs_the_master_and_starts_it_again() {
    let Some(pool) = Pool::new() else { return };
    let plugins = plugin_files::directory(&["shm", "mooncake"]);
    // The table says where the master listens and where it finds its libraries.
    let metrics = pool.metrics;
    let more = format!(
        "global_segment_size = \"64mb\"\nmaster_metrics_address = \"{metrics}\"\nstore_deadline_ms = {PATIENT_MS}\n"
    );
    let table = pool.config(&more);
    let companion =
        format!("[companion.mooncake-master]\nprogram = {:?}\n", pool.program().display().to_string());
    let flags = [&CACHES[..], &["--plugins", "shm", "--start-companion", "mooncake-master"]].concat();
    let expected = expected(plugins.path());
    let cluster =
        start(&flags, plugins.path(), format!("{MODEL}{RESTORES}[plugin.mooncake]\n{table}{companion}"));
    assert_eq!(ask(&cluster), expected);
    await_stored(&cluster);
    assert!(std::net::TcpStream::connect(metrics).is_ok(), "the master shows no metrics at {metrics}");
    let master = cluster.pid("mooncake-master").unwrap();
    signal(master, "KILL");
    cluster.wait("another master", || cluster.pid("mooncake-master").is_some_and(|pid| pid != master));
    let before = restored(&cluster, "decode");
    cluster.wait("pages to be restored again", || {
        cluster.flush();
        assert_eq!(ask(&cluster), expected);
        restored(&cluster, "decode") > before
    });
    let master = cluster.pid("mooncake-master").unwrap();
    // The master must end even if the supervisor was killed and cannot end it.
    signal(cluster.supervisor(), "KILL");
    cluster.wait("the master to end", || !runs(master));
}

#[test]
fn host_tier_says_what_the_master_counts_and_what_cannot_be_listed() {
    let Some(pool) = Pool::new() else { return };
    let plugins = plugin_files::directory(&["shm", "mooncake"]);
    let _master = pool.master();
    let cluster = workers(&pool, plugins.path(), "64mb", &["--plugins", "shm"]);
    ask(&cluster);
    await_stored(&cluster);
    let file = plugins.path().join("pool.toml");
    let config = pool.config(&format!("master_metrics_address = \"{}\"\n", pool.metrics));
    std::fs::write(&file, config).unwrap();
    let tier = |command: &str, more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_host"))
            .args(["tier", command, "--plugin", "mooncake", "--plugins-dir"])
            .arg(plugins.path())
            .arg("--plugin-config")
            .arg(&file)
            .args(more)
            .output();
        let ended = Ended::from(output.unwrap());
        (ended.code().unwrap(), ended.stdout, ended.stderr)
    };
    let (code, said, errors) = tier("stat", &["--json"]);
    assert_eq!(code, 0, "{said}{errors}");
    let usage: serde_json::Value = serde_json::from_str(&said).unwrap();
    // `host tier stat` lends no memory itself.
    assert_eq!(usage["capacity"], 2 * (64 << 20), "{usage}");
    assert!(usage["values"].as_u64().unwrap() > 0 && usage["bytes"].as_u64().unwrap() > 0, "{usage}");
    for (command, more) in [("ls", &[][..]), ("verify", &[]), ("prune", &["--all"])] {
        let (code, _, errors) = tier(command, more);
        assert!(code == 2 && errors.contains("host tier stat"), "{command}: {errors}");
    }
}

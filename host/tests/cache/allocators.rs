//! Servers with an allocator plugin: the choice of pages changes no answer. An allocator with invalid answers is disabled, and
//! nothing else is affected.

use std::path::Path;

use host_tests::cluster::{Cluster, Start};
use host_tests::{defect, plugin_files};

const ANSWER: u32 = 120;
/// A pool of 640 tokens: too small for all prompts with their answers at once.
const SHORT: [&str; 6] = ["--pool-pages", "40", "--reserved-decode-tokens", "16", "--chunk-tokens", "64"];

/// 2 layers that see everything and 5 that see 20 tokens: a window page is three pages of the pool.
const WINDOWS: &str = "[synthetic]\nlayers = 7\nsliding-layers = 5\nwindow = 20\n";

fn start(flags: &[&str], plugins: &Path) -> Cluster {
    start_with("", flags, plugins)
}

fn start_with(config: &str, flags: &[&str], plugins: &Path) -> Cluster {
    let directory = plugins.display().to_string();
    let always = ["--executor", "synthetic", "--plugins-dir", &directory];
    let flags: Vec<String> = always.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    let workers = if flags.iter().any(|flag| flag == "aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    Cluster::start(&Start { program, flags, config: config.to_owned(), workers })
}

fn prompts() -> Vec<Vec<u32>> {
    let prompt = |length: u32| (0..length).map(|token| (token * 31 + length) % 250).collect();
    [1, 15, 16, 17, 100, 161, 300, 400].map(prompt).to_vec()
}

/// Asks for all prompts at once.
fn answers(cluster: &Cluster) -> Vec<Vec<u64>> {
    let prompts = prompts();
    std::thread::scope(|scope| {
        let asks: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| cluster.generate(prompt, ANSWER).unwrap().tokens))
            .collect();
        asks.into_iter().map(|ask| ask.join().unwrap()).collect()
    })
}

fn count(cluster: &Cluster, role: &str, name: &str) -> f64 {
    cluster.metrics(&cluster.worker(role))[name]
}

/// The allocators that the workers' logs name.
fn allocators(cluster: &Cluster) -> Vec<String> {
    let lines = cluster.log_lines().into_iter();
    lines.filter_map(|line| Some(line["fields"]["allocator"].as_str()?.to_owned())).collect()
}

#[test]
fn an_allocator_changes_no_answer() {
    let plugins = plugin_files::directory(&["shm", "plain", "swa"]);
    let right = answers(&start(&["--role", "aggregated"], plugins.path()));
    let arrangements: [(&str, &[&str]); 3] = [
        ("aggregated", &["--role", "aggregated", "--prefill-radix-cache"]),
        ("decode", &[]),
        ("decode", &["--decode-radix-cache", "--prefill-radix-cache"]),
    ];
    for allocator in ["plain", "swa"] {
        for (role, flags) in arrangements {
            let cluster = start(&[flags, &SHORT, &["--allocator", allocator]].concat(), plugins.path());
            for round in 0..2 {
                assert_eq!(answers(&cluster), right, "{allocator}, {flags:?}, round {round}");
            }
            cluster.wait("all pages to be free", || cluster.all_free());
            assert!(
                count(&cluster, role, "host_retractions_total") > 0.0,
                "{flags:?}: pages never ran short"
            );
            assert_eq!(count(&cluster, role, "host_allocator_faults_total"), 0.0, "{allocator}, {flags:?}");
            let workers = if role == "aggregated" { 1 } else { 2 };
            assert_eq!(allocators(&cluster), vec![allocator.to_owned(); workers]);
        }
    }
}

#[test]
fn an_allocator_that_answers_nonsense_is_named_and_disabled_and_no_answer_changes() {
    let (plugins, broken) = (plugin_files::directory(&["shm"]), plugin_files::plugin("broken-allocator"));
    let right = answers(&start(&["--role", "aggregated"], plugins.path()));
    let original = std::fs::read(broken).unwrap();
    for (defect, says) in [
        ("hands-out-twice", "plugin \"broken-allocator\" handed out page"),
        ("loses-pages", "plugin \"broken-allocator\" answered WOULD_BLOCK(-4) when it was asked for"),
    ] {
        let directory = plugin_files::directory(&["shm"]);
        defect::with_defect(&original, defect, directory.path());
        for (role, flags) in [("aggregated", &["--role", "aggregated"][..]), ("decode", &[])] {
            let cluster =
                start(&[flags, &SHORT, &["--allocator", "broken-allocator"]].concat(), directory.path());
            for round in 0..3 {
                assert_eq!(answers(&cluster), right, "{defect}, {role}, round {round}");
            }
            cluster.wait("all pages to be free", || cluster.all_free());
            assert_eq!(count(&cluster, role, "host_allocator_faults_total"), 1.0, "{defect}, {role}");
            let log = cluster.log();
            assert!(log.contains("out of service"), "{defect}, {role}: {log}");
            let says = says.replace('"', "\\\"");
            assert!(log.contains(&says), "{defect}, {role}: {log}");
        }
    }
}

/// 2 layers that see everything and 5 that keep a state: a state is three pages of the pool.
const STATES: &str = "[synthetic]\nlayers = 7\nstate-layers = 5\n";

#[test]
fn a_model_with_states_answers_alike_in_every_arrangement() {
    let plugins = plugin_files::directory(&["shm", "plain"]);
    let allocator = ["--page-size", "8", "--allocator", "plain"];
    let roomy = [&["--role", "aggregated", "--pool-pages", "4000"][..], &allocator].concat();
    let right = answers(&start_with(STATES, &roomy, plugins.path()));
    let distinct: std::collections::BTreeSet<_> = right.iter().collect();
    assert_eq!(distinct.len(), right.len(), "answers follow from their prompts");
    let caches = ["--decode-radix-cache", "--prefill-radix-cache"];
    let tiers = [&caches[..], &["--hierarchical-cache", "--hicache-memory", "8MiB"]].concat();
    let ranks = [&caches[..], &["--prefill-tp", "2", "--decode-tp", "1"]].concat();
    let arrangements: [(&str, &[&str]); 6] = [
        ("aggregated", &["--role", "aggregated"]),
        ("aggregated", &["--role", "aggregated", "--prefill-radix-cache"]),
        ("decode", &[]),
        ("decode", &caches),
        ("decode", &tiers),
        ("decode", &ranks),
    ];
    for (role, flags) in arrangements {
        let short = ["--pool-pages", "180", "--reserved-decode-tokens", "16", "--chunk-tokens", "64"];
        let cluster = start_with(STATES, &[flags, &short, &allocator].concat(), plugins.path());
        for round in 0..2 {
            assert_eq!(answers(&cluster), right, "{flags:?}, round {round}");
        }
        cluster.wait("all pages to be free", || cluster.all_free());
        assert!(count(&cluster, role, "host_retractions_total") > 0.0, "{flags:?}: pages never ran short");
        assert_eq!(count(&cluster, role, "host_allocator_faults_total"), 0.0, "{flags:?}");
    }
}

#[test]
fn a_model_with_windows_answers_alike_with_every_allocator_and_division_of_the_pool() {
    let plugins = plugin_files::directory(&["shm", "plain", "swa"]);
    let page = ["--page-size", "8"];
    let roomy = [&["--role", "aggregated", "--pool-pages", "4000"][..], &page].concat();
    let right = answers(&start_with(WINDOWS, &roomy, plugins.path()));
    let caches = ["--decode-radix-cache", "--prefill-radix-cache"];
    // Flags that divide the pool or name an allocator, and the allocator that the workers then have.
    let divisions: [(&[&str], &str); 3] =
        [(&[], "swa"), (&["--swa-full-tokens-ratio", "0.4"], "swa"), (&["--allocator", "plain"], "plain")];
    for (division, allocator) in divisions {
        for (role, flags) in
            [("aggregated", &["--role", "aggregated"][..]), ("decode", &[]), ("decode", &caches)]
        {
            let short = ["--pool-pages", "180", "--reserved-decode-tokens", "16", "--chunk-tokens", "64"];
            let flags = [division, flags, &short, &page].concat();
            let cluster = start_with(WINDOWS, &flags, plugins.path());
            for round in 0..2 {
                assert_eq!(answers(&cluster), right, "{flags:?}, round {round}");
            }
            cluster.wait("all pages to be free", || cluster.all_free());
            assert_eq!(count(&cluster, role, "host_allocator_faults_total"), 0.0, "{flags:?}");
            let workers = if role == "aggregated" { 1 } else { 2 };
            assert_eq!(allocators(&cluster), vec![allocator.to_owned(); workers], "{flags:?}");
        }
    }
}

#[test]
fn an_allocator_that_gives_a_window_pages_of_others_changes_no_answer() {
    let plugins = plugin_files::directory(&["shm", "swa"]);
    let right = answers(&start_with(WINDOWS, &["--role", "aggregated", "--page-size", "8"], plugins.path()));
    let original = std::fs::read(plugin_files::plugin("broken-allocator")).unwrap();
    let directory = plugin_files::directory(&["shm"]);
    defect::with_defect(&original, "hands-out-shared-twice", directory.path());
    for (role, flags) in [("aggregated", &["--role", "aggregated"][..]), ("decode", &[])] {
        let flags = [flags, &["--page-size", "8", "--allocator", "broken-allocator"]].concat();
        let cluster = start_with(WINDOWS, &flags, directory.path());
        for round in 0..2 {
            assert_eq!(answers(&cluster), right, "{role}, round {round}");
        }
        cluster.wait("all pages to be free", || cluster.all_free());
        assert_eq!(count(&cluster, role, "host_allocator_faults_total"), 1.0, "{role}");
        let log = cluster.log();
        assert!(log.contains("plugin \\\"broken-allocator\\\" handed out page"), "{role}: {log}");
    }
}

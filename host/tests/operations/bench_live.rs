//! `host bench live`: workloads on real workers beside their simulation.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;
use serde_json::Value;

const HOST: &str = env!("CARGO_BIN_EXE_host");

/// Runs `host bench live` with these flags. Returns the exit code, what it wrote to both outputs, and its results. The page has those, too.
fn bench(flags: &[&str]) -> (Option<i32>, String, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let html = folder.path().join("page.html");
    let mut command = Command::new(HOST);
    command
        .args(["bench", "live", "--json"])
        .arg(&json)
        .arg("--html")
        .arg(&html)
        .args(flags)
        .env("TMPDIR", folder.path());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let said = [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    let results = std::fs::read_to_string(&json).unwrap_or_default();
    let left: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "results.json" || name == "page.html"), "{left:?}");
    let results: Vec<Value> = serde_json::from_str(&results).unwrap_or_default();
    let page = std::fs::read_to_string(&html).unwrap_or_default();
    assert_eq!(page.matches("\"live_curves\"").count(), results.len(), "{said}");
    (status.code(), said, results)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn workloads_run_on_workers_of_their_own_beside_the_simulation_of_the_same_requests() {
    let dir = plugin_files::directory(&["shm"]);
    let (code, said, results) = bench(&[
        "--plugins-dir",
        dir.path().to_str().unwrap(),
        "--workload",
        "shared,rounds,random",
        "--requests",
        "18",
        "--concurrency",
        "4",
        "--input-tokens",
        "100",
        "--output-tokens",
        "12",
    ]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(results.len(), 3, "{said}");
    // In the rounds, five of six turns find what was said before. The random prompts share nothing. In whatever order the shared
    // ones end, at least three come after the end of one with their beginning: 3 x 2000 of 18 x 2100 tokens.
    for (result, (word, tokens, found)) in
        results.iter().zip([("shared", 12, 0.1), ("rounds", 12, 0.5), ("random", 12, 0.0)])
    {
        let (live, simulated) = (&result["live"], &result["simulated"]);
        assert!(result["name"].as_str().unwrap().starts_with(word), "{result}");
        for side in [live, simulated] {
            assert_eq!(
                (side["requests"]["completed"].clone(), side["requests"]["failed"].clone()),
                (18.into(), 0.into())
            );
            assert_eq!(side["itl_ms"]["count"], 18 * (tokens - 1), "{word}");
            // Each token takes a step of 20 ms. A real client may read the first tokens late, and then several at once.
            assert!(number(&side["ttft_ms"]["p50"]) >= 20.0, "{word}: {side}");
            assert!(number(&side["e2e_ms"]["p50"]) >= 20.0 * f64::from(tokens), "{word}: {side}");
        }
        assert!(number(&live["itl_ms"]["mean"]) > 0.0, "{word}: {live}");
        // With 0.5 ms for each answer.
        assert!(number(&simulated["itl_ms"]["mean"]) >= 20.5, "{word}: {simulated}");
        let prompts = &simulated["prompts"];
        let simulated_found = 1.0 - number(&prompts["computed"]) / number(&prompts["tokens"]);
        for share in [number(&result["live_found"]), simulated_found] {
            assert!(share >= found && (found > 0.0 || share < 0.01), "{word}: {share}");
        }
        assert_eq!(result["cluster"]["workers"].as_array().unwrap().len(), 2);
    }
    assert!(said.contains("TTFT p50, ms") && said.contains("simulated"), "{said}");
}

#[test]
fn a_server_that_runs_is_measured_at_its_url_and_with_the_times_of_a_trace() {
    let flags = ["--role", "aggregated", "--executor", "synthetic", "--prefill-radix-cache"];
    let flags = flags.map(str::to_owned).to_vec();
    let start = Start { program: Path::new(HOST), flags, config: String::new(), workers: 0 };
    let cluster = Cluster::start(&start);
    cluster
        .wait("the worker to be ready", || cluster.health().is_some_and(|health| health["status"] == "ok"));
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    let line = |at: u32| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": 700, \"output_length\": 24, \"hash_ids\": [1, 2]}}\n"
        )
    };
    std::fs::write(&trace, [0, 400, 800].map(line).concat()).unwrap();
    let trace = trace.to_str().unwrap();
    let all = ["--url", &cluster.url, "--workload", "trace", "--trace", trace, "--shorten", "8"];
    let begun = host_wire::clock::now();
    let (code, said, results) = bench(&all);
    // The last request is sent no sooner than this after the first one is due.
    assert!(begun.elapsed() >= Duration::from_millis(800), "{said}");
    assert_eq!(code, Some(0), "{said}");
    let live = &results[0]["live"];
    assert_eq!(
        (live["requests"]["completed"].clone(), live["itl_ms"]["count"].clone()),
        (3.into(), (3 * 2).into())
    );
    assert!(number(&live["duration_s"]) > 0.0 && results[0]["simulated"].is_null(), "{results:?}");

    // One at a time, so that the second and the third prompt find the beginning of the first one, 600 of 700 tokens.
    let sizes =
        ["--prefixes", "1", "--prefix-tokens", "600", "--input-tokens", "100", "--output-tokens", "3"];
    let sent = ["--url", &cluster.url, "--workload", "shared", "--requests", "3", "--concurrency", "1"];
    let (code, said, results) = bench(&[sent, sizes].concat());
    assert_eq!(code, Some(0), "{said}");
    assert!(number(&results[0]["live_found"]) > 0.5, "{results:?}");

    // An answer that the server refuses is a failure with its reason.
    let (code, said, _) = bench(&[
        "--url",
        &cluster.url,
        "--workload",
        "random",
        "--requests",
        "2",
        "--input-tokens",
        "900000",
    ]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("the first failure: ") && said.contains("2 requests failed"), "{said}");
}

#[test]
fn what_cannot_be_measured_is_refused_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    std::fs::write(&trace, "{}\n").unwrap();
    let trace = trace.to_str().unwrap();
    for (flags, expected) in [
        (
            &["--url", "http://127.0.0.1:1", "--tp", "2"][..],
            "give the URL of a server, or flags to start one with",
        ),
        (&["--workload", "trace"], "give the file with the requests as --trace"),
        (&["--trace", trace, "--workload", "trace"], "line 1: missing field"),
        (&["--trace", trace, "--shorten", "3"], "--shorten 3: give a divisor of 512"),
        (&["--role", "decode"], "--role decode answers no requests alone"),
        (&["--rate", "0"], "give a number from 0.01"),
        (&["--workload", "rounds", "--rate", "2"], "--rate: the workload rounds has no use for it"),
        (&["--page-size", "0"], "--page-size"),
    ] {
        let (code, said, _) = bench(flags);
        assert_eq!(code, Some(2), "{flags:?}: {said}");
        assert!(said.contains(expected), "{flags:?}: {said}");
    }
}

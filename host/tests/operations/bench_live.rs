//! `host bench live`: workloads on real workers beside their simulation.

use std::path::Path;
use std::process::{Command, Output};

use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;
use serde_json::Value;

const HOST: &str = env!("CARGO_BIN_EXE_host");

/// Runs `host bench live` with these flags. Returns the exit code, what it wrote to both outputs, and its results.
fn bench(flags: &[&str]) -> (Option<i32>, String, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let mut command = Command::new(HOST);
    command.args(["bench", "live", "--json"]).arg(&json).args(flags).env("TMPDIR", folder.path());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let said = [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    let results = std::fs::read_to_string(&json).unwrap_or_default();
    let left: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "results.json"), "{left:?}");
    (status.code(), said, serde_json::from_str(&results).unwrap_or_default())
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
        "9",
    ]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(results.len(), 3, "{said}");
    // In the rounds, five of six turns find what was said before. The random prompts share nothing.
    for (result, (word, tokens, found)) in
        results.iter().zip([("shared", 40, 0.1), ("rounds", 60, 0.5), ("random", 9, 0.0)])
    {
        let (live, simulated) = (&result["live"], &result["simulated"]);
        assert!(result["name"].as_str().unwrap().starts_with(word), "{result}");
        for side in [live, simulated] {
            assert_eq!(
                (side["requests"]["completed"].clone(), side["requests"]["failed"].clone()),
                (18.into(), 0.into())
            );
            assert_eq!(side["itl_ms"]["count"], 18 * (tokens - 1), "{word}");
            // A step takes 20 ms, and 0.5 ms for each answer.
            assert!(number(&side["itl_ms"]["mean"]) >= 20.5, "{word}: {side}");
            assert!(number(&side["ttft_ms"]["p50"]) >= 20.0, "{word}: {side}");
        }
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
    let (code, said, results) = bench(&all);
    assert_eq!(code, Some(0), "{said}");
    let live = &results[0]["live"];
    assert_eq!(
        (live["requests"]["completed"].clone(), live["itl_ms"]["count"].clone()),
        (3.into(), (3 * 2).into())
    );
    // The last of the requests was sent 800 ms after the first one was due. The last prompt was answered before.
    assert!(number(&live["duration_s"]) >= 0.4, "{live}");
    assert!(number(&results[0]["live_found"]) > 0.25 && results[0]["simulated"].is_null(), "{results:?}");

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
        (&["--rate", "0"], "give a number above 0"),
        (&["--page-size", "0"], "--page-size"),
    ] {
        let (code, said, _) = bench(flags);
        assert_eq!(code, Some(2), "{flags:?}: {said}");
        assert!(said.contains(expected), "{flags:?}: {said}");
    }
}

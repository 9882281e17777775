//! `host simulate` with generated workloads: what it prints and writes, and what it refuses.

use std::process::Command;

/// Runs `host simulate` with these flags on a pair of workers. Returns the exit code, what it wrote to both outputs, and its report.
fn simulate(flags: &str) -> (Option<i32>, String, serde_json::Value) {
    let folder = tempfile::tempdir().unwrap();
    let (cluster, json) = (folder.path().join("cluster.toml"), folder.path().join("report.json"));
    let pair = ["prefill", "decode"].map(|role| format!("[[workers]]\nrole = '{role}'\nmachine = 'h200'\n"));
    std::fs::write(&cluster, format!("model = 'qwen3-8b'\n{}", pair.concat())).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    command.arg("simulate").args(flags.split_whitespace());
    if !flags.contains("--faults") {
        command.arg("--cluster").arg(&cluster).arg("--json").arg(&json);
    }
    let ended = command.output().unwrap();
    let said = [ended.stdout, ended.stderr].concat();
    let report = std::fs::read(&json).unwrap_or_else(|_| b"null".to_vec());
    (ended.status.code(), String::from_utf8(said).unwrap(), serde_json::from_slice(&report).unwrap())
}

#[test]
fn generated_workloads_are_simulated_with_the_flags_of_bench_live() {
    for (flags, requests) in [
        ("--workload shared --requests 30 --prefixes 2 --prefix-tokens 500 --input-tokens 100", 30),
        ("--workload rounds --turns 200,100 --requests 10 --output-tokens 5", 10),
        ("--workload random --requests 20 --rate 50 --burst 4", 20),
    ] {
        let (code, said, report) = simulate(flags);
        assert_eq!(code, Some(0), "{flags}: {said}");
        assert_eq!(report["requests"]["completed"], requests, "{flags}: {report}");
        assert!(said.contains("times as fast as the clock"), "{flags}: {said}");
    }
}

#[test]
fn goodput_of_a_generated_workload_is_searched_from_its_rate() {
    for (flags, began) in [("--rate 4", "4.00"), ("--burst 3", "1.00")] {
        let (code, said, _) = simulate(&format!("--workload random --requests 40 {flags} --goodput 2000 50"));
        assert_eq!(code, Some(0), "{said}");
        let began = format!("the search began at {began} requests/s");
        assert!(said.contains("goodput: ") && said.contains(&began), "{said}");
    }
}

#[test]
fn flags_without_an_effect_are_refused_with_their_name() {
    for (flags, named) in [
        ("--workload rounds --rate 3", "--rate"),
        ("--workload random --speed 2", "--speed"),
        ("--workload random --burst 2", "--burst"),
        ("--workload random --goodput 2000 50 --tp 2", "--tp"),
        ("--workload random --goodput nan 50", "limits NaN 50"),
        ("--workload random --rate 4 --plan 2000 50 --warm-up 200", "--warm-up 200"),
        ("--workload random --rate 4 --plan 2000 50 --most-devices 1000000000", "--most-devices"),
        ("--workload random --requests 4000000000", "--requests"),
        ("--faults --seeds 1 --tp 2", "--tp"),
        ("--workload random --rate 1e-20", "--rate"),
        ("--workload random --goodput 2000 50 --concurrency 3", "--concurrency"),
        ("--workload random --plan 2000 50", "--rate"),
        ("--workload rounds --plan 2000 50", "--rate"),
        ("--workload random --tp 2", "--plan"),
        ("--workload random --rate 3 --plan 2000 50 --tp 4000000", "--tp"),
        ("--faults --workload random", "--workload"),
        ("--faults --requests 3", "--requests"),
        ("--faults --seeds 1 --goodput 2000 50", "--goodput"),
    ] {
        let (code, said, report) = simulate(flags);
        assert_eq!((code, report), (Some(2), serde_json::Value::Null), "{flags}: {said}");
        assert!(said.contains(named), "{flags}: {said}");
    }
}

//! The metrics of `--target-itl-ms`, with real processes. The core's tests check the target in virtual time, and a benchmark
//! measures it.

use std::path::Path;

use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;

const STEPS: &str = "[synthetic]\nstep-us = 2000\nsequence-us = 100\n";

fn start(flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let mut all = vec!["--executor".to_owned(), "synthetic".to_owned()];
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers: 2 }), plugins)
}

fn answers(cluster: &Cluster) -> Vec<Vec<u64>> {
    let ask = |request: u32| {
        let prompt: Vec<u32> = (0..40 + request).map(|token| (token * 7 + request) % 200).collect();
        cluster.generate(&prompt, 30).unwrap().tokens
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8).map(|request| scope.spawn(move || ask(request))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

#[test]
fn a_target_out_of_reach_is_said_once_and_answers_stay_the_same() {
    let (free, _plugins) = start(&[], STEPS);
    let right = answers(&free);
    assert_eq!(free.metrics(&free.worker("decode"))["host_decode_limit"], 0.0);
    let (paced, _more) = start(&["--target-itl-ms", "0.5"], STEPS);
    assert_eq!(answers(&paced), right);
    assert_eq!(answers(&paced), right);
    let decode = paced.worker("decode");
    // The answer may arrive before its last token is counted.
    paced.wait("all tokens to be counted", || {
        paced.metrics(&decode)["host_between_tokens_seconds_count"] >= 2.0 * 8.0 * 29.0
    });
    let metrics = paced.metrics(&decode);
    assert_eq!((metrics["host_target_itl_out_of_reach"], metrics["host_decode_limit"]), (1.0, 1.0));
    let tokens = metrics["host_between_tokens_seconds_count"];
    assert_eq!(tokens, 2.0 * 8.0 * 29.0, "every token but the first ones has a time");
    assert_eq!(metrics["host_between_tokens_seconds_bucket{le=\"+Inf\"}"], tokens);
    let said = paced.log().matches("not even one request at a time stays under").count();
    assert_eq!(said, 1, "{}", paced.log());
}

#[test]
fn the_file_sets_a_target_and_the_model_learns_what_steps_cost() {
    let config = format!("target-itl-ms = 60000.0\n{STEPS}");
    let (cluster, _plugins) = start(&[], &config);
    answers(&cluster);
    answers(&cluster);
    let metrics = cluster.metrics(&cluster.worker("decode"));
    println!("{metrics:?}");
    assert_eq!(metrics["host_target_itl_out_of_reach"], 0.0);
    assert!(metrics["host_decode_limit"] > 1.0);
    let fixed = metrics["host_step_model_fixed_seconds"] + metrics["host_step_model_sequence_seconds"];
    assert!(fixed > 0.0, "nothing was learned");
    assert!(metrics["host_step_seconds_count"] > 0.0 && metrics["host_step_predicted_seconds"] > 0.0);
}

//! Measures the cost of checking and loading a plugin. Each line has the median and the worst of 40 fresh processes, since a
//! process loads a file only once. The page cache is warm.
//!
//! `cargo bench -p host --bench plugin_loading`

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods, reason = "a benchmark")]

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use host_plugin_api::Opening;
use host_plugins::lock::sha256;
use host_plugins::{Entry, Policy, load_root, open_transfer, preflight};
use host_tests::plugin_files;

const PROCESSES: usize = 40;
const STEPS: [&str; 5] = ["inspect", "hash", "load", "load pinned", "open"];

/// Runs one process: prints the microseconds of each step.
fn one(file: &Path) {
    let mut taken = Vec::new();
    let mut time = |step: &mut dyn FnMut()| {
        let start = Instant::now();
        step();
        taken.push(start.elapsed().as_secs_f64() * 1e6);
    };
    time(&mut || drop(preflight(file, &Policy::default()).unwrap()));
    let mut hash = String::new();
    time(&mut || hash = sha256(file).unwrap());
    let entry = Entry::of_file(file).unwrap();
    time(&mut || assert!(load_root(&entry).is_ok()));
    // For the system's loader the sealed copy is another file, so it is loaded again.
    let mut pinned = entry.clone();
    pinned.pinned = Some(hash.clone());
    time(&mut || assert!(load_root(&pinned).is_ok()));
    let opening = Opening { name: "bench".into(), config: String::new() };
    let mut backend = None;
    time(&mut || backend = Some(open_transfer(&entry, &opening).unwrap()));
    backend.unwrap().shutdown(1000).unwrap();
    println!("{}", taken.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, file] = &arguments[..]
        && flag == "--one"
    {
        return one(Path::new(file));
    }
    // The harness passes `--bench`. `cargo test --benches` does not, and then nothing is measured.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let exe = std::env::current_exe().unwrap();
    println!("{:<10} {:>8} {:<12} {:>10} {:>10}", "plugin", "kB", "step", "median us", "worst us");
    for name in ["null", "shm"] {
        let file = plugin_files::plugin(name);
        let runs: Vec<Vec<f64>> = (0..PROCESSES)
            .map(|_| {
                let output = Command::new(&exe).arg("--one").arg(&file).output().unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                let text = String::from_utf8(output.stdout).unwrap();
                text.split_whitespace().map(|number| number.parse().unwrap()).collect()
            })
            .collect();
        for (step, what) in STEPS.iter().enumerate() {
            let mut times: Vec<f64> = runs.iter().map(|run| run[step]).collect();
            times.sort_by(f64::total_cmp);
            let kilobytes = std::fs::metadata(&file).unwrap().len() / 1000;
            let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
            println!("{name:<10} {kilobytes:>8} {what:<12} {median:>10.0} {worst:>10.0}");
        }
    }
}

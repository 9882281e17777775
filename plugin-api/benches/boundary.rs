//! Measures the cost of the boundary per call: `submit` of a plugin that only adds up its writes, called through the loaded
//! file and called directly, in the same run. The ratio is the result. Nanoseconds depend on the machine and its load.
//!
//! Every backend does more work per write than adding up, so no backend has a worse ratio. Three columns:
//!
//! - *direct*: a function of this program, not inlined, with the plugin's code in it
//! - *loaded*: the same code in a loaded file, called as the ABI is: one indirect call, the check of the poison flag,
//!   the catching of panics
//! - *held*: as the host holds it, behind `Arc<dyn TransferBackend>` and the host's proxy: one more indirect call
//!
//! Ends with exit code 1 when *loaded* or *held* costs more than 5 % over *direct* from 64 writes up.
//!
//! `cargo bench -p host-plugin-api --bench boundary`

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

use host_plugin_api::abi::RSlice;
use host_plugin_api::{NOTIFICATION_BYTES, Opening, PeerId, Submission, Tag, TransferBackend, Write};
use host_plugin_null::NullBackend;
use host_plugins::{Catalog, load_root, open_transfer};
use host_tests::plugin_files;

const REPETITIONS: usize = 60;
/// From this many writes in a call up, *loaded* and *held* may cost at most this many times as much as *direct*.
const GATE: (usize, f64) = (64, 1.05);

#[inline(never)]
fn direct(backend: &NullBackend, submission: &Submission, writes: &[Write]) -> i32 {
    backend.submit(submission, writes)
}

fn main() -> ExitCode {
    // The harness passes `--bench`. `cargo test --benches` does not, and then there is nothing to measure.
    if !std::env::args().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    let opening = Opening { name: "bench".into(), config: String::new() };
    let directory = plugin_files::directory(&["null"]);
    let catalog = Catalog::scan([directory.path()]);
    let entry = catalog.find("null").unwrap();
    let held = open_transfer(entry, &opening).unwrap();
    let loaded = load_root(entry).unwrap().open_transfer(&opening).unwrap();
    let linked = host_plugin_null::open(&opening).unwrap();
    println!(
        "{:>6} {:>10} {:>10} {:>7} {:>10} {:>7}",
        "writes", "direct ns", "loaded ns", "ratio", "held ns", "ratio"
    );
    let mut worst: f64 = 0.0;
    for count in [1, 8, 64, 512, 4096] {
        let writes = vec![Write { length: 4096, ..Write::default() }; count];
        let calls = 2_000_000 / (count + 20);
        let submission = Submission {
            peer: PeerId(1),
            notification_length: 0,
            tag: Tag(1),
            notification: [0; NOTIFICATION_BYTES],
        };
        let mut best = [f64::MAX; 3];
        // Measured in turns, so that a busy moment of the machine affects all three.
        for _ in 0..REPETITIONS {
            let timed = [
                time(calls, || direct(black_box(&linked), black_box(&submission), black_box(&writes))),
                time(calls, || {
                    black_box(&loaded).submit(black_box(&submission), RSlice::from_slice(black_box(&writes)))
                }),
                time(calls, || black_box(&held).submit(black_box(&submission), black_box(&writes))),
            ];
            for (best, time) in best.iter_mut().zip(timed) {
                *best = best.min(time);
            }
        }
        let [direct, loaded, held] = best;
        let (first, second) = (loaded / direct, held / direct);
        println!("{count:>6} {direct:>10.2} {loaded:>10.2} {first:>7.3} {held:>10.2} {second:>7.3}");
        if count >= GATE.0 {
            worst = worst.max(first).max(second);
        }
    }
    let good = worst <= GATE.1;
    let word = if good { "at most" } else { "MORE THAN" };
    println!("from {} writes up: {worst:.3}, {word} {:.2}", GATE.0, GATE.1);
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Nanoseconds per call.
fn time(calls: usize, mut call: impl FnMut() -> i32) -> f64 {
    let start = Instant::now();
    for _ in 0..calls {
        assert_eq!(call(), 0);
    }
    start.elapsed().as_secs_f64() * 1e9 / calls as f64
}

//! What the boundary costs per call: `submit` of a plugin that only adds up its writes, called through the loaded file
//! and called directly, in the same run. The ratio is the result; nanoseconds depend on the machine and its load.
//!
//! `cargo build --release -p host-plugin-null && cargo bench -p host-plugin-api --bench boundary`

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use host::plugins::{Catalog, open_transfer};
use host_plugin_api::{NOTIFICATION_BYTES, Opening, PeerId, Submission, Tag, TransferBackend, Write};

const REPETITIONS: usize = 60;

fn main() {
    // The harness passes `--bench`; `cargo test --benches` does not, and then there is nothing to measure.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let opening = Opening { name: "bench".into(), config: String::new() };
    let exe = std::env::current_exe().unwrap();
    let profile = exe.parent().and_then(Path::parent).unwrap();
    let catalog = Catalog::scan([profile]);
    let loaded = open_transfer(catalog.find("null").unwrap(), &opening).unwrap();
    let direct = host_plugin_null::open(&opening).unwrap();
    println!("{:>6} {:>12} {:>12} {:>8}", "writes", "direct ns", "loaded ns", "ratio");
    for count in [1, 8, 64, 512] {
        let writes = vec![Write { length: 4096, ..Write::default() }; count];
        let calls = 2_000_000 / (count + 20);
        let submission = Submission {
            peer: PeerId(1),
            notification_length: 0,
            tag: Tag(1),
            notification: [0; NOTIFICATION_BYTES],
        };
        let (mut best_direct, mut best_loaded) = (f64::MAX, f64::MAX);
        // Taken in turns, so that a busy moment hits both.
        for _ in 0..REPETITIONS {
            best_direct =
                best_direct.min(time(calls, || direct.submit(black_box(&submission), black_box(&writes))));
            best_loaded =
                best_loaded.min(time(calls, || loaded.submit(black_box(&submission), black_box(&writes))));
        }
        println!("{count:>6} {best_direct:>12.2} {best_loaded:>12.2} {:>8.3}", best_loaded / best_direct);
    }
}

/// Nanoseconds per call.
fn time(calls: usize, mut call: impl FnMut() -> i32) -> f64 {
    let start = Instant::now();
    for _ in 0..calls {
        assert_eq!(call(), 0);
    }
    start.elapsed().as_secs_f64() * 1e9 / calls as f64
}

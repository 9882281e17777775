//! Connections over the real Mooncake leave nothing behind. In a process of its own, whose threads and descriptors it counts.

use host_plugin_api::*;
use host_test_peer::*;
use host_tests::alone::in_a_process_of_its_own;
use host_tests::{mooncake, plugin_files};

const BYTES: usize = 1 << 16;

#[test]
fn instances_leave_no_thread_and_no_descriptor_behind_whether_they_are_shut_down_or_dropped() {
    let Some(config) = mooncake::config() else { return };
    in_a_process_of_its_own(|| {
        let directory = plugin_files::directory(&["mooncake"]);
        let config = format!("{config}connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n");
        let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
        let connected = |end: bool| {
            let receiver = Worker::open(directory.path(), "mooncake", "decode", BYTES, &config);
            let sender = Worker::open(directory.path(), "mooncake", "prefill", BYTES, &config);
            let peer = sender.backend.connect("decode", &receiver.backend.endpoint().unwrap()).unwrap();
            let write = Write {
                source_region: sender.region,
                target_region: receiver.region,
                length: 64,
                target_generation: 1,
                ..Write::default()
            };
            assert_eq!(sender.backend.submit(&submission(peer, 1, b"n"), &[write]), 0);
            assert_eq!(sender.completion().status, 0);
            if end {
                sender.backend.shutdown(60_000).unwrap();
                receiver.backend.shutdown(60_000).unwrap();
            }
        };
        // Python and Mooncake have threads of their own from the first on.
        connected(true);
        let before = (count("task"), count("fd"));
        for round in 0..6 {
            connected(round % 2 == 0);
        }
        // What was dropped ends a moment later.
        wait("all threads and descriptors to go", || {
            let now = (count("task"), count("fd"));
            (now.0 <= before.0 && now.1 <= before.1).then_some(())
        });
    });
}

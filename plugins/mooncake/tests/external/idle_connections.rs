//! Idle connections to the real Mooncake's engines keep no peer out for long. In a process of its own, whose sockets it looks for.

use std::collections::BTreeSet;
use std::net::TcpStream;

use host_plugin_api::*;
use host_test_peer::*;
use host_tests::alone::in_a_process_of_its_own;
use host_tests::{mooncake, plugin_files};

const BYTES: usize = 1 << 16;

/// The ports on which this process listens.
fn listening() -> BTreeSet<u16> {
    let links = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let own: BTreeSet<String> = links.map(|link| link.display().to_string()).collect();
    let tables = ["tcp", "tcp6"]
        .map(|table| std::fs::read_to_string(format!("/proc/self/net/{table}")).unwrap_or_default());
    let port = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (words.get(1)?, words.get(3)?, words.get(9)?);
        let listens = *state == "0A" && own.contains(&format!("socket:[{inode}]"));
        u16::from_str_radix(local.rsplit(':').next()?, 16).ok().filter(|_| listens)
    };
    tables.iter().flat_map(|table| table.lines().filter_map(port)).collect()
}

/// Opens a connection to every port that this process listens on.
fn connect_idle() -> Vec<TcpStream> {
    listening().into_iter().map(|port| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect()
}

#[test]
fn idle_connections_delay_messages_and_ends_by_seconds_at_most() {
    let Some(config) = mooncake::config() else { return };
    in_a_process_of_its_own(|| {
        let directory = plugin_files::directory(&["mooncake"]);
        let config = format!("{config}connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n");
        let receiver = Worker::open(directory.path(), "mooncake", "decode", BYTES, &config);
        let sender = Worker::open(directory.path(), "mooncake", "prefill", BYTES, &config);
        let write = Write {
            source_region: sender.region,
            target_region: receiver.region,
            length: 64,
            target_generation: 1,
            ..Write::default()
        };
        // At both fronts, before they have heard of each other.
        let fronts = connect_idle();
        assert!(fronts.len() >= 2, "{fronts:?}");
        let peer = sender.backend.connect("decode", &receiver.backend.endpoint().unwrap()).unwrap();
        // At the fronts, the inbound endpoint and the link.
        let all = connect_idle();
        assert!(all.len() >= 2 * fronts.len(), "{all:?}");
        for tag in 1..=3 {
            assert_eq!(sender.backend.submit(&submission(peer, tag, b"n"), &[write]), 0);
            assert_eq!(sender.completion().status, 0);
            assert_eq!(receiver.notification().kind, NotificationKind::ARRIVED);
        }
        // A fence waits for the end of engines at whose ports there are idle connections.
        let all = (connect_idle(), all);
        sender.backend.disconnect(peer).unwrap();
        let all = (connect_idle(), all);
        sender.backend.shutdown(60_000).unwrap();
        receiver.backend.shutdown(60_000).unwrap();
        drop(all);
    });
}

//! The NIXL plugin over the real NIXL, between processes on loopback: bytes arrive before their notification, and fences
//! hold whatever the peer does.

use host_plugin_api::*;
use host_test_peer::Worker;
use host_test_peer::between_processes::{self, Setup};
use host_tests::{nixl, plugin_files};

const BYTES: usize = 4 << 20;

fn config() -> Option<String> {
    nixl::config().map(|config| format!("{config}connect_timeout_ms = 60000\n"))
}

fn with(test: fn(&Setup<'_>)) {
    let Some(config) = config() else { return };
    let directory = plugin_files::directory(&["nixl"]);
    test(&Setup { directory: directory.path(), plugin: "nixl", config });
}

#[test]
fn a_library_that_is_not_nixl_is_refused_with_the_functions_it_lacks() {
    let directory = plugin_files::directory(&["nixl"]);
    let other = plugin_files::plugin("null");
    let catalog = host_plugins::Catalog::scan([directory.path()]);
    let config = format!("library = {:?}", other.display().to_string());
    let opening = Opening { name: "n".into(), config };
    let refused = host_plugins::open_transfer(catalog.find("nixl").unwrap(), &opening);
    let text = refused.err().unwrap().to_string();
    assert!(text.contains("nixl_capi_create_xfer_req") && text.contains("1.5.1"), "{text}");
}

#[test]
fn by_default_every_socket_listens_on_loopback_only() {
    let Some(config) = config() else { return };
    let directory = plugin_files::directory(&["nixl"]);
    let worker = Worker::open(directory.path(), "nixl", "decode", BYTES, &config);
    let peer = Worker::open(directory.path(), "nixl", "prefill", BYTES, &config);
    peer.backend.connect("decode", &worker.backend.endpoint().unwrap()).unwrap();
    let links = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()?.to_str().map(str::to_owned));
    let ours: Vec<String> = links
        .filter_map(|link| link.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned))
        .collect();
    let mut listening = 0;
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if fields[3] == "0A" && ours.iter().any(|inode| inode == fields[9]) {
                listening += 1;
                let loopback = fields[1].starts_with("0100007F:") || fields[1].starts_with(&"0".repeat(24));
                assert!(loopback, "{line}");
            }
        }
    }
    assert!(
        listening >= 6,
        "two fronts, a link, an inbound endpoint and two presences listen, but {listening} sockets were found"
    );
}

#[test]
fn scattered_writes_are_in_another_process_when_their_completion_or_notification_is_seen() {
    with(between_processes::scattered_writes_are_in_another_process_when_their_completion_or_notification_is_seen);
}

#[test]
fn a_sender_killed_in_mid_transfer_is_reported_lost_and_leaves_nothing_behind() {
    with(between_processes::a_sender_killed_in_mid_transfer_is_reported_lost_and_leaves_nothing_behind);
}

#[test]
fn nothing_lands_after_a_disconnect_although_the_peer_keeps_writing() {
    with(between_processes::nothing_lands_after_a_disconnect_although_the_peer_keeps_writing);
}

#[test]
fn nothing_lands_after_a_deregistration_although_the_peer_keeps_writing() {
    with(between_processes::nothing_lands_after_a_deregistration_although_the_peer_keeps_writing);
}

#[test]
fn a_stopped_sender_is_fenced_without_its_help_and_lands_nothing_when_it_goes_on() {
    with(between_processes::a_stopped_sender_is_fenced_without_its_help_and_lands_nothing_when_it_goes_on);
}

#[test]
fn a_receiver_killed_in_mid_transfer_ends_every_submission_and_its_successor_is_reached() {
    with(between_processes::a_receiver_killed_in_mid_transfer_ends_every_submission_and_its_successor_is_reached);
}

#[test]
fn writes_to_a_stopped_receiver_settle_only_when_it_says_so_or_is_dead() {
    with(between_processes::writes_to_a_stopped_receiver_settle_only_when_it_says_so_or_is_dead);
}

#[test]
fn broken_connections_to_a_stopped_receiver_prove_nothing() {
    with(between_processes::broken_connections_to_a_stopped_receiver_prove_nothing);
}

#[test]
fn endpoints_that_are_stale_or_damaged_do_no_harm() {
    with(between_processes::endpoints_that_are_stale_or_damaged_do_no_harm);
}

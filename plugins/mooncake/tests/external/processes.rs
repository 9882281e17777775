//! The Mooncake plugin over the real Mooncake, between processes on loopback: bytes arrive before their notification, and
//! fences hold whatever the peer does.

use std::sync::OnceLock;

use host_test_peer::between_processes::{self, Setup};
use host_tests::{mooncake, plugin_files};

/// One directory for all tests of this process: each copy of the plugin would start a Python of its own, and a process has
/// room for one.
fn with(test: fn(&Setup<'_>)) {
    static ONE: OnceLock<tempfile::TempDir> = OnceLock::new();
    let Some(config) = mooncake::config() else { return };
    let config = format!("{config}connect_timeout_ms = 60000\n");
    let directory = ONE.get_or_init(|| plugin_files::directory(&["mooncake"])).path();
    test(&Setup { directory, plugin: "mooncake", config });
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
fn endpoints_that_are_stale_or_damaged_do_no_harm() {
    with(between_processes::endpoints_that_are_stale_or_damaged_do_no_harm);
}

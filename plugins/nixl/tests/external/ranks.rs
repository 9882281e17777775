//! Several instances of the NIXL plugin in each of two processes, one for each rank: all write to all of the other side at
//! once, and end in order.

use host_plugin_api::*;
use host_test_peer::process::Role;
use host_test_peer::ranks::{SLICE, Side};
use host_test_peer::{Remote, Worker};
use host_tests::{nixl, plugin_files};

#[test]
fn four_ranks_on_either_side_write_to_each_other_all_at_once_and_end_in_order() {
    let Some(config) = nixl::config() else { return };
    let directory = plugin_files::directory(&["nixl"]);
    let config = format!("{config}connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n");
    for threads in ["none", "further", "all"] {
        let config = format!("{config}progress_threads = {threads:?}\n");
        let ours = Side::open(directory.path(), "nixl", "prefill", &config);
        let mut theirs = Remote::of(Role::Ranks, directory.path(), &["nixl", "decode", &config]);
        let endpoints = theirs.answer();
        theirs.say(&format!("write {}", ours.endpoints()));
        ours.write_all(&endpoints);
        assert_eq!(theirs.answer(), "written");
        ours.settle("decode");
        assert_eq!(theirs.ask("settle prefill"), "settled");
        // The other side ends while this side is connected to it. This side ends after it.
        assert_eq!(theirs.ask("end"), "ended");
        assert!(theirs.process.wait().unwrap().success());
        assert_eq!(ours.ranks[0].notification().kind, NotificationKind::PEER_LOST);
        ours.end();
    }
}

#[test]
fn memory_of_a_device_is_refused_with_what_is_missing() {
    let Some(config) = nixl::config() else { return };
    let directory = plugin_files::directory(&["nixl"]);
    let refused = |config: &str| {
        let worker = Worker::open(directory.path(), "nixl", "decode", SLICE, config);
        let device = Memory {
            address: Address::of(worker.memory.address().as_ptr()),
            length: SLICE as u64,
            kind: MemoryKind::VRAM,
            device: 3,
            fd: -1,
            generation: 1,
            fd_offset: 0,
        };
        let error = worker.backend.register(&device).unwrap_err();
        assert_eq!(error.code, ErrorCode::UNSUPPORTED, "{error}");
        error.message
    };
    // By default a peer on the same machine would write past this process.
    let said = refused(&config);
    assert!(said.contains("device 3") && said.contains("UCX_TLS=^sm,cuda_ipc"), "{said}");
    let said = refused(&format!("{config}transports = \"tcp\"\n"));
    assert!(said.contains("device 3") && said.contains("CUDA"), "{said}");
}

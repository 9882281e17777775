//! Two copies of the Mooncake plugin in one process, as two files with the same content are: they start one Python between them.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "plugin_support/fixture.rs"]
mod fixture;
#[path = "plugin_support/mooncake.rs"]
mod mooncake;
#[path = "plugin_support/peer.rs"]
mod peer;
#[path = "plugin_support/skip.rs"]
mod skip;

use std::path::PathBuf;
use std::process::Command;
use std::sync::Barrier;

use peer::*;

const BYTES: usize = 1 << 16;
/// Processes in which both start at once: without a lock about one in two dies.
const TRIES: usize = 6;
/// Names the folders of both copies, for the other process.
const FOLDERS: &str = "MOONCAKE_COPIES";

#[test]
#[ignore = "the other process of the test below"]
fn child() {
    let Some(folders) = std::env::var_os(FOLDERS) else { return };
    let config = mooncake::config().unwrap();
    let folders: Vec<PathBuf> = std::env::split_paths(&folders).collect();
    let both = Barrier::new(folders.len());
    let open = |folder: &PathBuf| {
        both.wait();
        Worker::open(folder, "mooncake", &folder.file_name().unwrap().to_string_lossy(), BYTES, &config)
    };
    let workers: Vec<Worker> = std::thread::scope(|scope| {
        let opening: Vec<_> = folders.iter().map(|folder| scope.spawn(|| open(folder))).collect();
        opening.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    // And both can work with it.
    let [sender, receiver] = &workers[..] else { panic!("two copies") };
    let peer = sender.backend.connect("receiver", &receiver.backend.endpoint().unwrap()).unwrap();
    assert_eq!(sender.backend.submit(&submission(peer, 1, b"n"), &[]), 0);
    assert_eq!(sender.completion().status, 0);
    println!("both work");
}

#[test]
fn two_copies_in_one_process_that_start_at_once_share_one_python() {
    if mooncake::config().is_none() {
        return;
    }
    let copies = [(); 2].map(|()| fixture::directory(&["mooncake"]));
    let folders = std::env::join_paths(copies.iter().map(tempfile::TempDir::path)).unwrap();
    for attempt in 0..TRIES {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "child", "--nocapture"])
            .env(FOLDERS, &folders)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let said = text.concat();
        assert!(
            output.status.success() && said.contains("both work"),
            "attempt {attempt}: {}: {said}",
            output.status
        );
    }
}

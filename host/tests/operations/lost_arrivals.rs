//! A transfer plugin that works but loses arrivals: the log names the plugin and the peer, and the request goes on.

use std::path::Path;

use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;
use serde_json::Value;

/// Sends one request while the plugin has the fault that `setting` turns on. The log must say `says`, and the request must go on.
fn stalled(setting: &str, says: &str) {
    let folder = tempfile::tempdir().unwrap();
    let told = folder.path().join("told");
    let plugins = plugin_files::directory(&["corrupting"]);
    let flags =
        ["--plugins", "corrupting", "--executor", "synthetic", "--transfer-timeout", "1", "--plugins-dir"];
    let mut flags = flags.map(str::to_owned).to_vec();
    flags.extend([plugins.path().display().to_string(), "--staging".to_owned(), "never".to_owned()]);
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let config = format!("[plugin.corrupting]\nflip_write = 0\n{setting} = {told:?}\n");
    let cluster = Cluster::start(&Start { program, flags, config, workers: 2 });
    let prompt: Vec<u32> = (0..160).map(|token| token * 3 % 200).collect();
    let before = cluster.generate(&prompt, 8).unwrap();
    let other: Vec<u32> = prompt.iter().map(|token| token + 1).collect();

    std::fs::write(&told, "").unwrap();
    let line = |line: &Value| {
        let message = line["fields"]["message"].as_str().unwrap_or_default();
        message.contains(says) && line["fields"]["plugin"] == "corrupting"
    };
    let during = std::thread::scope(|scope| {
        let request = scope.spawn(|| cluster.generate(&other, 8));
        cluster.wait("the log to name plugin and peer", || cluster.log_lines().iter().any(line));
        // A failure is ignored: the plugin may have removed the file itself.
        drop(std::fs::remove_file(&told));
        request.join().unwrap()
    });
    let decode = cluster.worker("decode").instance;
    let lines = cluster.log_lines();
    let named = lines.iter().find(|of| line(of)).unwrap();
    assert_eq!(named["fields"]["peer"], decode.as_str(), "{named}");
    let page = include_str!("../../../docs/plugins/debugging.md");
    let quoted = format!("`{}`", named["fields"]["message"].as_str().unwrap_or_default());
    assert!(page.contains(&quoted), "the page does not quote {quoted}");
    assert_eq!(during.unwrap().tokens.len(), 8, "the request was tried again");
    let stalled = cluster.metrics(&cluster.worker("prefill"))["host_transfers_stalled_total"];
    assert!(stalled >= 1.0, "{stalled} transfers were given up");
    assert_eq!(cluster.generate(&prompt, 8).unwrap().tokens, before.tokens);
    cluster.wait("all pages to be free", || cluster.all_free());
}

#[test]
fn a_notification_that_is_lost_ends_the_transfer_and_names_plugin_and_peer() {
    stalled("lose_file", "a notification may be lost");
}

#[test]
fn a_write_that_never_ends_has_the_peer_cut_off_and_names_plugin_and_peer() {
    // The pages arrive, so the request itself ends well.
    stalled("hold_file", "has ended: it is cut off");
}

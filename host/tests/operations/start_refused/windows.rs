//! Sliding layers, and the allocators of their pages.

use std::process::Command;

use host_tests::plugin_files;

use super::refused;

#[test]
fn windows_that_cannot_be_are_refused_with_the_way_out() {
    let directory = plugin_files::directory(&["shm", "swa"]);
    let plugins = directory.path().display().to_string();
    for (synthetic, flags, says) in [
        ("window = 5", &[][..], "[synthetic] sliding-layers and window belong together"),
        ("sliding-layers = 1", &[], "[synthetic] sliding-layers and window belong together"),
        ("sliding-layers = 4\nwindow = 5", &[], "sliding-layers is 4: with layers = 4 it must be 1 to 3"),
        (
            "sliding-layers = 2\nwindow = 5",
            &["--layer-groups", "2"],
            "sliding layers or states, whose pages are sent whole",
        ),
        (
            "layers = 7\nsliding-layers = 5\nwindow = 200",
            &["--kv-memory", "950271"],
            "holds 240 tokens, too few for one request of 256: give at least 950272 bytes",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("host.toml");
        std::fs::write(&config, format!("[synthetic]\n{synthetic}\n")).unwrap();
        let config = config.display().to_string();
        let common = ["--executor", "synthetic", "--plugins-dir", &plugins, "--config", &config];
        refused(&[&common[..], flags].concat(), &[says]);
    }
}

#[test]
fn an_allocator_that_cannot_be_is_refused_with_the_reason() {
    let directory = plugin_files::directory(&["shm", "plain"]);
    let place = directory.path().display().to_string();
    let cases: [(&[&str], &[&str]); 5] = [
        (&["--allocator", "nosuch"], &["no plugin is named \"nosuch\"", "plain, shm"]),
        (&["--allocator", "shm"], &["--allocator shm", "hands out no pages", "its role is transfer"]),
        (&["--swa-full-tokens-ratio", "0"], &["--swa-full-tokens-ratio is 0", "above 0 and at most 1"]),
        (&["--swa-full-tokens-ratio", "NaN"], &["--swa-full-tokens-ratio is NaN", "above 0 and at most 1"]),
        (
            &["--swa-full-tokens-ratio", "0.5"],
            &["WindowRatio needs SlidingWindow", "left out for a model without any"],
        ),
    ];
    for (flags, says) in cases {
        for role in [&[][..], &["--role", "decode"], &["--role", "aggregated"]] {
            refused(&[&["--executor", "synthetic", "--plugins-dir", &place], role, flags].concat(), says);
        }
    }
}

#[test]
fn a_model_with_windows_is_refused_without_an_allocator_for_them_and_told_what_would_do() {
    let windows = "[synthetic]\nlayers = 7\nsliding-layers = 5\nwindow = 20\n";
    let needs = "SlidingWindow needs window, because layers with a window have pages of their own";
    let cases: [(&[&str], &[&str], &[&str]); 3] = [
        (&["shm"], &[], &[needs, "put one that does into a directory of --plugins-dir"]),
        (&["shm", "plain"], &[], &[needs, "use instead: --allocator plain"]),
        (
            &["shm", "plain"],
            &["--allocator", "plain", "--swa-full-tokens-ratio", "0.5"],
            &["the allocator plain has no setting full_tokens_ratio", "use --allocator swa"],
        ),
    ];
    for (plugins, flags, says) in cases {
        let directory = plugin_files::directory(plugins);
        let config = directory.path().join("host.toml");
        std::fs::write(&config, windows).unwrap();
        let (place, config) = (directory.path().display().to_string(), config.display().to_string());
        let always = ["--executor", "synthetic", "--plugins-dir", &place, "--config", &config];
        for role in [&[][..], &["--role", "decode"], &["--role", "aggregated"]] {
            refused(&[&always, role, flags].concat(), says);
        }
        // `host plugins check` gives the same message without starting a server.
        let output = Command::new(env!("CARGO_BIN_EXE_host"))
            .args(["plugins", "check"])
            .args([&always[..], flags].concat())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{plugins:?}: {said}");
        for part in says {
            assert!(said.contains(part), "{plugins:?} does not say {part:?}: {said}");
        }
    }
}

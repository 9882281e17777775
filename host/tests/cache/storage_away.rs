//! A storage tier that is away when a worker is started again: the other processes go on, and the worker serves when the tier is
//! back.

use std::path::Path;

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::plugin_files;

#[test]
fn a_tier_that_is_away_at_a_restart_ends_nothing_and_is_used_when_it_is_back() {
    let plugins = plugin_files::directory(&["shm", "hicache-file"]);
    let root = tempfile::tempdir().unwrap();
    let (here, away) = (root.path().join("mounted"), root.path().join("away"));
    std::fs::create_dir(&here).unwrap();
    let directory = plugins.path().display().to_string();
    let flags = [
        "--executor",
        "synthetic",
        "--plugins-dir",
        &directory,
        "--decode-radix-cache",
        "--prefill-radix-cache",
        "--hierarchical-cache",
        "--hicache-storage",
        "hicache-file",
    ];
    let cluster = Cluster::start(&Start {
        program: Path::new(env!("CARGO_BIN_EXE_host")),
        flags: flags.map(str::to_owned).to_vec(),
        config: format!("[plugin.hicache-file]\ndir = \"{}\"\n", here.join("pages").display()),
        workers: 2,
    });
    let prompt: Vec<u32> = (0..200).collect();
    let before = cluster.generate(&prompt, 5).unwrap().tokens;

    let (router, decode) = (cluster.pid("router"), cluster.pid("decode"));
    std::fs::rename(&here, &away).unwrap();
    signal(cluster.pid("prefill").unwrap(), "KILL");
    cluster.wait("the restarted worker to be refused twice", || {
        cluster.log().matches("refuses the configuration that it ran with before").count() >= 2
    });
    assert_eq!((cluster.pid("router"), cluster.pid("decode")), (router, decode));

    std::fs::rename(&away, &here).unwrap();
    cluster.wait("two workers", || cluster.workers().len() == 2);
    assert_eq!(cluster.generate(&prompt, 5).unwrap().tokens, before);
    assert_eq!((cluster.pid("router"), cluster.pid("decode")), (router, decode));
}

//! A check whether Mooncake is there loads nothing of it.

#![allow(clippy::unwrap_used)]

use std::process::Command;

fn loaded() -> String {
    std::fs::read_to_string("/proc/self/maps").unwrap()
}

/// The only test of this process.
#[test]
fn a_check_loads_neither_the_library_nor_python() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libtransfer_engine.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake/transfer_engine.rs");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command.args(["--edition=2024", "--crate-type=cdylib", "--crate-name=transfer_engine", "-Cpanic=abort"]);
    assert!(command.arg("-o").arg(&file).arg(source).status().unwrap().success());
    host_plugin_mooncake::check("transfer", &format!("library = {:?}", file.display().to_string())).unwrap();
    // The check looks for the wheel, whether it is there or not.
    let wheel = host_plugin_mooncake::check("transfer", "backend = \"python\"");
    println!("the wheel: {wheel:?}");
    let loaded = loaded();
    for name in ["transfer_engine", "libpython", "mooncake/", "ibverbs"] {
        assert!(!loaded.lines().any(|line| line.contains(name) && line.contains(".so")), "{name} was loaded");
    }
}

//! Records the compiler's version, which plugins carry in their manifest for people to read.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().ok();
    let version = version.and_then(|o| String::from_utf8(o.stdout).ok()).unwrap_or_default();
    let number = version.split_whitespace().nth(1).unwrap_or("unknown");
    println!("cargo::rustc-env=HOST_PLUGIN_RUSTC={number}");
    let target = std::env::var("TARGET").unwrap_or_else(|_| "unknown".into());
    println!("cargo::rustc-env=HOST_PLUGIN_TARGET={target}");
}

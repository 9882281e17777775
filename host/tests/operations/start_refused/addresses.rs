//! Addresses that cannot be reached, or that are taken.

use std::process::Command;

use host_tests::plugin_files;

use super::refused;

#[test]
fn addresses_that_others_cannot_reach_are_refused_with_the_way_out() {
    let worker = ["--executor", "synthetic", "--role", "decode"];
    let cases: [(&[&str], &[&str]); 11] = [
        (&["--router", "nonsense"], &["--router \"nonsense\"", "http://127.0.0.1:8001"]),
        (&["--router", "https://127.0.0.1:1"], &["http://"]),
        (&["--router", "http://127.0.0.1:1,nonsense"], &["--router \"nonsense\""]),
        (&["--router", "http://127.0.0.1:1,"], &["--router \"\""]),
        (&["--router", "http://127.0.0.1:1,http://127.0.0.1:1"], &["twice"]),
        (&["--router", "http://127.0.0.1"], &["names no port"]),
        (&["--router", "http://127.0.0.1:0"], &["names no port"]),
        (&["--router", "http://127.0.0.1:1/v1"], &["after the port"]),
        (&["--control", "0.0.0.0:0"], &["--control 0.0.0.0", "one of this machine's own"]),
        (&["--control", "[::]:0"], &["--control ::", "one of this machine's own"]),
        (
            &["--router", "http://192.0.2.1:8001"],
            &["192.0.2.1", "--control 127.0.0.1", "for example --control"],
        ),
    ];
    for (flags, says) in cases {
        refused(&[&worker[..], flags].concat(), says);
    }
}

#[test]
fn a_taken_port_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let directory = plugin_files::directory(&["shm"]);
    let plugins = directory.path().display().to_string();
    let flags = ["--executor", "synthetic", "--plugins-dir", &plugins, "--port", &port];
    let output = Command::new(env!("CARGO_BIN_EXE_host")).args(flags).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(&port) && said.contains("--port"), "{said}");
}

#[test]
fn sockets_that_were_not_handed_down_are_not_taken() {
    let router = ["--role", "router", "--executor", "synthetic", "--listen-fds"];
    for (numbers, says) in [
        ("3,3", "--listen-fds: 3 cannot be both sockets"),
        ("3", "two sockets are handed down"),
        ("3,4,5", "two sockets are handed down"),
        ("0,1", "0 is not a handed-down socket"),
        // What the program itself opens, and what is not open.
        ("3,4", "3 is not a handed-down socket"),
        ("100000,4", "100000 is not a handed-down socket"),
    ] {
        refused(&[&router[..], &[numbers]].concat(), &[says]);
    }
}

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
fn a_control_plane_that_strangers_reach_needs_a_way_to_know_its_own() {
    let ways = ["--cluster-secret FILE", "--cluster-certs DIR", "--insecure-control"];
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "0123456789abcdef0123456789abcdef").unwrap();
    std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let (secret, missing) = (secret.display().to_string(), folder.path().join("certs").display().to_string());
    let socket = format!("unix:{}", folder.path().join("a.sock").display());
    let router = ["--executor", "synthetic", "--role", "router"];
    let worker = ["--executor", "synthetic", "--role", "decode"];
    let cases: [(&[&str], &[&str], &[&str]); 10] = [
        (&router, &["--control", "192.0.2.7:8001"], &ways),
        (&router, &["--control", "0.0.0.0:0"], &ways),
        (&worker, &["--control", "192.0.2.7:0", "--router", "http://192.0.2.1:8001"], &ways),
        (&router, &["--cluster-secret", &secret, "--cluster-certs", &missing], &["give one of them"]),
        (&router, &["--cluster-certs", &missing], &["key.pem cannot be read"]),
        (&router, &["--control", &socket, "--cluster-secret", &secret], &["known by the system"]),
        (&worker, &["--router", "https://127.0.0.1:1"], &["--cluster-secret", "http://"]),
        (&worker, &["--router", "http://127.0.0.1:1", "--cluster-secret", &secret], &["write https://"]),
        (&worker, &["--router", &socket], &["--control unix:PATH"]),
        (&worker, &["--control", &socket, "--router", "http://127.0.0.1:1"], &["Unix socket"]),
    ];
    for (role, flags, says) in cases {
        refused(&[role, flags].concat(), says);
    }
    let secret = ["--executor", "synthetic", "--cluster-secret", &secret];
    refused(&secret, &["--cluster-secret needs --role"]);
    refused(&[&secret[..], &["--role", "aggregated"]].concat(), &["--cluster-secret needs --router"]);
}

#[test]
fn an_address_for_operators_that_strangers_reach_needs_keys() {
    let router = ["--executor", "synthetic", "--role", "router", "--control", "127.0.0.1:0"];
    for at in ["0.0.0.0:0", "192.0.2.7:9000", "[::]:0"] {
        let says = [at, "--api-keys FILE", "unix:PATH"];
        refused(&[&router[..], &["--admin", at]].concat(), &says);
        refused(&["--executor", "synthetic", "--admin", at], &says);
    }
    let worker = ["--executor", "synthetic", "--role", "decode", "--admin", "127.0.0.1:0"];
    refused(&worker, &["--admin is for processes with an HTTP API", "--metrics"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    refused(&[&router[..], &["--admin", &taken]].concat(), &[&taken, "change --admin"]);
}

#[test]
fn a_certificate_of_the_api_that_cannot_be_shown_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let made = |name: &str| {
        let folder = folder.path().join(name).display().to_string();
        let command = ["certs", "server", &folder, "--name", "localhost"];
        assert!(Command::new(env!("CARGO_BIN_EXE_host")).args(command).status().unwrap().success());
        (format!("{folder}/cert.pem"), format!("{folder}/key.pem"))
    };
    let ((cert, key), (_, other_key)) = (made("a"), made("b"));
    let copied = |from: &str, name: &str, mode: u32| {
        let to = folder.path().join(name);
        std::fs::copy(from, &to).unwrap();
        std::fs::set_permissions(&to, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        to.display().to_string()
    };
    let (open, no_key) = (copied(&key, "open.pem", 0o644), copied(&cert, "no-key.pem", 0o600));
    let missing = folder.path().join("none").display().to_string();
    let router = ["--executor", "synthetic", "--role", "router", "--control", "127.0.0.1:0"];
    let cases: [(&[&str], &[&str]); 6] = [
        (&["--tls-cert", &cert], &["--tls-cert and --tls-key go together"]),
        (&["--tls-cert", &missing, "--tls-key", &key], &[&missing, "cannot be read"]),
        (&["--tls-cert", &key, "--tls-key", &key], &[&key, "it holds no certificate"]),
        (&["--tls-cert", &cert, "--tls-key", &no_key], &[&no_key, "no private key"]),
        (
            &["--tls-cert", &cert, "--tls-key", &other_key],
            &[&other_key, "not the key of the certificate", &cert],
        ),
        (&["--tls-cert", &cert, "--tls-key", &open], &[&open, "chmod 600"]),
    ];
    for (flags, says) in cases {
        refused(&[&router[..], flags].concat(), says);
        refused(&[&["--executor", "synthetic"], flags].concat(), says);
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
        ("3,4,5 --admin 127.0.0.1:0", "3 is not a handed-down socket"),
        ("3,4 --admin 127.0.0.1:0", "three sockets are handed down"),
        ("0,1", "0 is not a handed-down socket"),
        // Descriptors that the program itself opened, and one that is not open.
        ("3,4", "3 is not a handed-down socket"),
        ("100000,4", "100000 is not a handed-down socket"),
    ] {
        let flags: Vec<&str> = router.into_iter().chain(numbers.split(' ')).collect();
        refused(&flags, &[says]);
    }
}

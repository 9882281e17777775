//! The other process of tests that load plugins, see `host_test_peer::process`.

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    host_test_peer::process::be(&arguments);
}

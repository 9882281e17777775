//! Two copies of the Mooncake plugin in one process, as two files with the same content are: they start one Python between them.

use host_test_peer::process::{Role, command, said};
use host_tests::{mooncake, plugin_files};

/// How many processes start both copies at once. Without a lock about one process in two dies.
const TRIES: usize = 6;

#[test]
fn two_copies_in_one_process_that_start_at_once_share_one_python() {
    let Some(config) = mooncake::config() else { return };
    let config = format!("{config}connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n");
    let copies = [(); 2].map(|()| plugin_files::directory(&["mooncake"]));
    for attempt in 0..TRIES {
        let mut both = command(Role::AtOnce);
        both.args(["mooncake", &config]).args(copies.iter().map(tempfile::TempDir::path));
        assert_eq!(said(&format!("attempt {attempt}"), &mut both), "both work");
    }
}

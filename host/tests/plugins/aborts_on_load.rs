//! A plugin file that ends its process while it is loaded.

use std::process::Command;

use host_tests::plugin_files;

/// A constructor that aborts runs before any check is possible, so another process loads the file.
#[test]
fn a_file_that_aborts_while_it_is_loaded_ends_one_case_of_the_kit() {
    let file = plugin_files::plugin("malformed");
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--case", "load"])
        .arg(&file)
        .env("MALFORMED", "aborts on load")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("crash    load"), "{said}");
}

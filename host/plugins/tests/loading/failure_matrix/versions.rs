//! Plugins of other versions of the ABI, older, newer and forked.

use std::path::PathBuf;

use host_test_peer::process::{Role, command, said};
use host_tests::{plugin_files, variant};

use super::{check, load};

/// Changes that append a method and a field of the root.
const APPENDED: &[variant::Change<'_>] = &[
    ("Cargo.toml", "version = \"0.2.", "version = \"0.2.99"),
    (
        "src/abi.rs",
        "    #[sabi(last_prefix_field)]\n    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()>;\n}\n\n/// A transfer backend",
        "    #[sabi(last_prefix_field)]\n    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()>;\n    /// New.\n    fn appended(&self) -> i32 {\n        1\n    }\n}\n\n/// A transfer backend",
    ),
    (
        "src/abi/root.rs",
        "    pub check_config: ROption<CheckConfig>,\n}\n\nimpl RootModule",
        "    pub check_config: ROption<CheckConfig>,\n    /// New.\n    #[sabi(missing_field(default))]\n    pub appended: ROption<CheckConfig>,\n}\n\nimpl RootModule",
    ),
    (
        "src/abi/root.rs",
        "attach, check_config }.leak_into_prefix()",
        "attach, check_config, appended: ROption::RNone }.leak_into_prefix()",
    ),
];

/// Plugins of other versions of the ABI, built here from a changed copy of the API.
#[test]
fn changed_types_are_named_in_one_line_and_appended_ones_are_allowed() {
    let rows: [(&str, &[variant::Change<'_>], &[&str]); 5] = [
        ("unchanged", &[], &["opened from its place, api 0.2."]),
        (
            "a field widened",
            &[
                (
                    "src/transfer.rs",
                    "    pub length: u32,\n    /// Generation",
                    "    pub length: u64,\n    /// Generation",
                ),
                ("src/transfer.rs", "size_of::<Write>() == 32", "size_of::<Write>() == 40"),
            ],
            &["layout |", "Write", "length", "u64", "build it again"],
        ),
        (
            "a method inserted",
            &[
                (
                    "src/abi.rs",
                    "    fn disconnect(&self, peer: PeerId) -> AbiResult<()>;\n    /// See [`TransferBackend::submit`]",
                    "    fn disconnect(&self, peer: PeerId) -> AbiResult<()>;\n    /// New.\n    fn inserted(&self) -> i32;\n    /// See [`TransferBackend::submit`]",
                ),
                (
                    "src/abi/guard.rs",
                    "    fn submit(&self, submission: &Submission, writes: RSlice",
                    "    fn inserted(&self) -> i32 {\n        1\n    }\n    fn submit(&self, submission: &Submission, writes: RSlice",
                ),
            ],
            &["layout |", "inserted", "build it again"],
        ),
        (
            "a method and a root field appended by a newer plugin",
            APPENDED,
            &["opened from its place, api 0.2.99"],
        ),
        (
            "no layouts to check",
            &[("src/abi/root.rs", "constructor, CheckTypeLayout::Yes)", "constructor, CheckTypeLayout::No)")],
            &["no_layout |", "no type layouts to check"],
        ),
    ];
    for (name, changes, says) in rows {
        let file: PathBuf = variant::null_with(&name.replace(' ', "-"), changes);
        let directory = tempfile::tempdir().unwrap();
        std::fs::copy(file, directory.path().join("plugin.so")).unwrap();
        check(name, &load(name, directory.path(), &[]), says);
    }
}

/// The host may be the newer side: the golden file was built from the first version that is kept.
#[test]
#[cfg(target_arch = "x86_64")]
fn what_was_appended_since_may_be_missing_in_an_older_plugin() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/null-0.2.0-x86_64.so");
    let directory = tempfile::tempdir().unwrap();
    std::fs::copy(golden, directory.path().join("plugin.so")).unwrap();
    check("an older plugin", &load("golden", directory.path(), &[]), &["opened from its place, api 0.2.0"]);
}

/// The output of processes that open these files one after the other. The processes must end by themselves.
fn open_all(files: &[&str]) -> String {
    said(&format!("{files:?}"), command(Role::Each).args(files))
}

/// The layout check remembers all plugins of a process. Fields that one plugin appended must not exclude another plugin.
#[test]
#[cfg(target_arch = "x86_64")]
fn older_newer_and_equal_plugins_live_in_one_process_in_whatever_order_they_come() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/null-0.2.0-x86_64.so");
    let newer = variant::null_with("a-method-and-a-root-field-appended-by-a-newer-plugin", APPENDED);
    let (newer, equal) = (newer.display().to_string(), plugin_files::plugin("null").display().to_string());
    let (newer, equal) = (newer.as_str(), equal.as_str());
    for order in
        [[golden, equal, newer], [newer, golden, equal], [equal, newer, golden], [newer, equal, golden]]
    {
        let said = open_all(&order);
        let settled = said.lines().filter(|line| *line == "settled 1").count();
        assert!(settled == 3, "{order:?}: {said}");
    }
}

/// Two plugins extend the API independently, each in its own way. The first one wins, although the host knows neither extension.
#[test]
fn the_second_of_two_forks_of_the_api_is_refused_with_what_both_appended() {
    let one = variant::null_with("a-method-and-a-root-field-appended-by-a-newer-plugin", APPENDED);
    let replacements: Vec<String> =
        APPENDED.iter().map(|(_, _, to)| to.replace("appended", "forked")).collect();
    let forked: Vec<(&str, &str, &str)> =
        APPENDED.iter().zip(&replacements).map(|((file, from, _), to)| (*file, *from, to.as_str())).collect();
    let other = variant::null_with("a-fork", &forked);
    let said = open_all(&[&one.display().to_string(), &other.display().to_string()]);
    check(
        "a fork of the API",
        &said,
        &["settled 1\nforked |", "a plugin that was loaded before", " in one, ", "forked", "appended"],
    );
}

//! `host plugins new` makes crates that build, pass their own tests, and keep the contract, as they are written.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn host(at: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_host")).current_dir(at).args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Where generated crates are built: kept between runs, because most of it is `abi_stable`.
fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(3).expect("tests lie in <target>/<profile>/deps").join("generated-plugins")
}

fn cargo(at: &Path, arguments: &[&str]) {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(at).args(arguments).arg("--offline").env("CARGO_TARGET_DIR", target());
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "cargo {arguments:?} in {}: {}", at.display(), said(&output));
}

#[test]
fn every_role_builds_and_keeps_the_contract_as_generated() {
    let directory = tempfile::tempdir().unwrap();
    for role in ["transfer", "tier", "allocator"] {
        let name = format!("made-up-{role}");
        let api = repository().join("plugin-api");
        let made = host(
            directory.path(),
            &["plugins", "new", &name, "--role", role, "--api", api.to_str().unwrap()],
        );
        assert!(made.status.success(), "{}", said(&made));
        let made_at = directory.path().join(&name);
        // The versions that this repository uses, which are on this machine.
        std::fs::copy(repository().join("Cargo.lock"), made_at.join("Cargo.lock")).unwrap();
        cargo(&made_at, &["build"]);
        cargo(&made_at, &["test"]);
        let file = target().join("debug").join(format!("lib{}.so", name.replace('-', "_")));
        let tested = host(&made_at, &["plugins", "test", file.to_str().unwrap()]);
        assert!(tested.status.success() && said(&tested).contains("\npass"), "{}", said(&tested));
        let inspected = said(&host(&made_at, &["plugins", "inspect", file.to_str().unwrap()]));
        assert!(inspected.contains(&format!("{name} 0.1.0 (com.example.{name})")), "{inspected}");
        for word in ["host_plugin_", "host.test", "@"] {
            let sources = std::fs::read_to_string(made_at.join("src/lib.rs")).unwrap()
                + &std::fs::read_to_string(made_at.join("plugin.toml")).unwrap()
                + &std::fs::read_to_string(made_at.join("Cargo.toml")).unwrap();
            let sources = sources.replace("host_plugin_api", "");
            assert!(!sources.contains(word), "{word:?} was left in the crate for {role}");
        }
    }
}

#[test]
fn outside_of_a_checkout_the_crate_brings_the_api_along_and_builds() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("host");
    let built = Path::new(env!("CARGO_BIN_EXE_host"));
    // The file system of temporary files may be another one.
    std::fs::hard_link(built, &program).or_else(|_| std::fs::copy(built, &program).map(drop)).unwrap();
    let run = |at: &Path, arguments: &[&str]| {
        let output = Command::new(&program).current_dir(at).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        said(&output)
    };
    let told = run(directory.path(), &["plugins", "new", "far-away", "--role", "transfer"]);
    assert!(told.contains("against the API in its folder plugin-api"), "{told}");
    let made_at = directory.path().join("far-away");
    let licence = std::fs::read(repository().join("LICENSE-APACHE")).unwrap();
    assert_eq!(std::fs::read(made_at.join("plugin-api/LICENSE-APACHE")).unwrap(), licence);
    std::fs::copy(repository().join("Cargo.lock"), made_at.join("Cargo.lock")).unwrap();
    cargo(&made_at, &["build"]);
    cargo(&made_at, &["test"]);
    let file = target().join("debug/libfar_away.so");
    let tested = run(&made_at, &["plugins", "test", file.to_str().unwrap()]);
    assert!(tested.contains("\npass"), "{tested}");
}

#[test]
fn nothing_is_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("mine");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("Cargo.toml"), "precious").unwrap();
    let output = host(directory.path(), &["plugins", "new", "mine", "--role", "tier"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("mine is not empty, and nothing is overwritten"), "{}", said(&output));
    assert_eq!(std::fs::read_to_string(folder.join("Cargo.toml")).unwrap(), "precious");
    assert!(!folder.join("src").exists());

    std::fs::write(directory.path().join("file"), "").unwrap();
    let output = host(directory.path(), &["plugins", "new", "mine", "--role", "tier", "--path", "file"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn names_and_apis_that_cannot_be_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    for (arguments, says) in [
        (&["Acme", "--role", "tier"][..], "\"Acme\" cannot be a plugin's name"),
        (&["../acme", "--role", "tier"], "cannot be a plugin's name"),
        (&["fn", "--role", "tier"], "means something else in Rust"),
        (&["acme", "--role", "database"], "invalid value 'database'"),
        (
            &["acme", "--role", "tier", "--api", "nowhere"],
            "neither the folder of host-plugin-api nor a version",
        ),
    ] {
        let output = host(directory.path(), &[&["plugins", "new"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(said(&output).contains(says), "{arguments:?}: {}", said(&output));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "{arguments:?} made something");
    }
}

#[test]
fn the_api_is_a_path_in_a_checkout_and_a_version_elsewhere() {
    let directory = tempfile::tempdir().unwrap();
    let dependency = |folder: &str| {
        let text = std::fs::read_to_string(directory.path().join(folder).join("Cargo.toml")).unwrap();
        text.lines().find(|line| line.starts_with("host-plugin-api = ")).unwrap().to_owned()
    };
    let at = |folder: &str| directory.path().join(folder).display().to_string();
    let output = host(repository(), &["plugins", "new", "a", "--role", "tier", "--path", &at("a")]);
    assert!(output.status.success(), "{}", said(&output));
    let path = std::fs::canonicalize(repository().join("plugin-api")).unwrap();
    assert_eq!(dependency("a"), format!("host-plugin-api = {{ path = \"{}\" }}", path.display()));
    let output = host(directory.path(), &["plugins", "new", "b", "--role", "tier", "--api", "0.1"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(dependency("b"), "host-plugin-api = \"0.1\"");
}

//! `host plugins new` makes crates that build, pass their own tests and keep the contract without changes. So do its projects in C
//! and C++.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use host_tests::wait::until;

/// Arguments to test a plugin that must pass, on a machine that may stand still for seconds.
const TEST: [&str; 4] = ["plugins", "test", "--patience", "30"];

pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn host(at: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_host")).current_dir(at).args(arguments).output().unwrap()
}

pub fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The folder in which generated crates are built. It is kept between runs, because most of the build is `abi_stable`.
pub fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(3).expect("tests lie in <target>/<profile>/deps").join("generated-plugins")
}

pub fn cargo(at: &Path, arguments: &[&str]) {
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
        // The same versions of crates as in this repository, because these are on this machine.
        std::fs::copy(repository().join("Cargo.lock"), made_at.join("Cargo.lock")).unwrap();
        cargo(&made_at, &["build"]);
        cargo(&made_at, &["test"]);
        let file = target().join("debug").join(format!("lib{}.so", name.replace('-', "_")));
        let tested = host(&made_at, &[&TEST[..], &[file.to_str().unwrap()]].concat());
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

/// Whether a program can be called.
fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

fn builds(at: &Path, program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    // Flags of a `make` that runs these tests must not reach this one.
    let output = command.current_dir(at).args(arguments).env_remove("MAKEFLAGS").output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?} in {}: {}", at.display(), said(&output));
    assert!(!said(&output).contains("warning"), "{program} in {}: {}", at.display(), said(&output));
}

/// All files in a folder and its subfolders.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn every_role_in_c_and_in_cpp_builds_and_keeps_the_contract_as_generated() {
    let directory = tempfile::tempdir().unwrap();
    for (role, language) in
        ["transfer", "tier", "allocator"].iter().flat_map(|role| [(role, "c"), (role, "cpp")])
    {
        let name = format!("made-up-{role}-{language}");
        let made = host(directory.path(), &["plugins", "new", &name, "--role", role, "--lang", language]);
        assert!(made.status.success(), "{}", said(&made));
        let made_at = directory.path().join(&name);
        for file in files(&made_at) {
            let text = std::fs::read_to_string(&file).unwrap();
            let is_word =
                |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_uppercase() || c == '_');
            let left = text.split('@').find(|part| is_word(part));
            assert_eq!(left, None, "a word was left in {}", file.display());
            let path = repository().to_str().unwrap();
            assert!(!text.contains(path), "{} names the checkout", file.display());
        }
        let file = made_at.join("build").join(format!("lib{}.so", name.replace('-', "_")));
        let keeps_the_contract = || {
            let tested = host(&made_at, &[&TEST[..], &[file.to_str().unwrap()]].concat());
            assert!(tested.status.success() && said(&tested).contains("\npass"), "{}", said(&tested));
        };
        builds(&made_at, "make", &["CC=gcc", "CXX=g++", "WARNINGS=-Werror"]);
        keeps_the_contract();
        let inspected = said(&host(&made_at, &["plugins", "inspect", file.to_str().unwrap()]));
        assert!(inspected.contains(&format!("{name} 0.1.0 (com.example.{name})")), "{inspected}");
        if has("clang") && has("clang++") {
            builds(&made_at, "make", &["clean"]);
            builds(&made_at, "make", &["CC=clang", "CXX=clang++", "WARNINGS=-Werror"]);
        }
        if has("cmake") {
            builds(&made_at, "make", &["clean"]);
            builds(&made_at, "cmake", &["-S", ".", "-B", "build"]);
            builds(&made_at, "cmake", &["--build", "build"]);
            keeps_the_contract();
        }
    }
}

#[test]
fn outside_of_a_checkout_the_crate_brings_the_api_along_and_builds() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("host");
    let built = Path::new(env!("CARGO_BIN_EXE_host"));
    // Copies the program if the folder for temporary files is on another file system.
    std::fs::hard_link(built, &program).or_else(|_| std::fs::copy(built, &program).map(drop)).unwrap();
    let run = |at: &Path, arguments: &[&str]| {
        // The system refuses to run a copy while a child that another test forked still has it open for writing.
        let output = until("the copy to run", || {
            match Command::new(&program).current_dir(at).args(arguments).output() {
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => Err(error),
                output => Ok(output.unwrap()),
            }
        });
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
    let tested = run(&made_at, &[&TEST[..], &[file.to_str().unwrap()]].concat());
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
        (&["acme", "--role", "tier", "--lang", "zig"], "invalid value 'zig'"),
        (&["acme", "--role", "tier", "--lang", "c", "--api", "0.1"], "those in C and C++ get the headers"),
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

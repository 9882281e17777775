//! The workflow of a plugin's repository: it builds with the oldest compiler, runs the conformance kit, and releases signed files.

/// Path of the workflow in the repository.
pub const FILE: &str = ".github/workflows/ci.yml";

const HEAD: &str = include_str!("ci/head.yml.template");
const RUST: &str = include_str!("ci/rust.yml.template");
const NATIVE: &str = include_str!("ci/native.yml.template");
const TAIL: &str = include_str!("ci/tail.yml.template");

/// The build tool of a plugin.
pub enum Build<'a> {
    /// Cargo, with this compiler or a newer one.
    Rust(&'a str),
    /// make
    Make,
}

/// The workflow of a plugin of this name.
pub fn workflow(name: &str, build: &Build<'_>) -> String {
    // Released files are built by the oldest compiler.
    let (steps, built, released) = match build {
        Build::Rust(oldest) => (RUST, "target/release", *oldest),
        Build::Make => (NATIVE, "build", "gcc"),
    };
    [HEAD, steps, TAIL]
        .concat()
        .replace("@RUST@", released)
        .replace("@RELEASED@", released)
        .replace("@BUILT@", built)
        .replace("@NAME@", name)
        .replace("@CRATE@", &name.replace('-', "_"))
}

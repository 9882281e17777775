//! Plugins in C and C++: projects for make and cmake with the API's headers. They need neither Rust nor a checkout.

use super::ci::{self, Build};
use super::{Role, Source};

/// The language of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// C11
    C,
    /// C++17
    Cpp,
}

macro_rules! template {
    ($file:literal) => {
        include_str!(concat!("c/", $file))
    };
}

macro_rules! header {
    ($file:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../plugin-api/include/", $file))
    };
}

/// Files of every project, with placeholders.
const COMMON: &[Source] = &[
    ("plugin.toml", template!("plugin.toml.template")),
    ("CMakeLists.txt", template!("CMakeLists.txt.template")),
    ("Makefile", template!("Makefile.template")),
    ("README.md", template!("README.md.template")),
];

/// The text for a manifest without a configuration: an example in comments.
const NO_CONFIG: &str = r#"# [config.depth]
# type = "integer"    # string, integer, float, boolean, array or table
# default = 64
# doc = "What it means.""#;

const TIER_CONFIG: &str = r#"[config.slots]
type = "integer"    # string, integer, float, boolean, array or table
default = 512
doc = "Values that fit, 1 to 65536.""#;

/// A role's example: its entries for the manifest, and its source in C and in C++.
struct Example {
    role: &'static str,
    description: &'static str,
    capabilities: &'static str,
    config: &'static str,
    c: &'static str,
    cpp: &'static str,
}

const TRANSFER: Example = Example {
    role: "transfer",
    description: "Copies pages between instances in one process",
    capabilities: r#""page_writes", "arrival_notification", "settled""#,
    config: NO_CONFIG,
    c: template!("transfer.c"),
    cpp: template!("transfer.cpp"),
};

const TIER: Example = Example {
    role: "tier",
    description: "Keeps pages in memory",
    capabilities: r#""settled", "scan""#,
    config: TIER_CONFIG,
    c: template!("tier.c"),
    cpp: template!("tier.cpp"),
};

const ALLOCATOR: Example = Example {
    role: "allocator",
    description: "Hands out pages from one free list for each component",
    capabilities: r#""window", "state""#,
    config: NO_CONFIG,
    c: template!("allocator.c"),
    cpp: template!("allocator.cpp"),
};

/// Paths and texts of all files of a new project.
pub(super) fn files(name: &str, role: Role, dialect: Dialect) -> Vec<(&'static str, String)> {
    let example = match role {
        Role::Transfer => TRANSFER,
        Role::Tier => TIER,
        Role::Allocator => ALLOCATOR,
    };
    let is_cpp = dialect == Dialect::Cpp;
    let of = |c: &'static str, cpp: &'static str| if is_cpp { cpp } else { c };
    // A tier in C++ gets its threads from `host_tier.hpp`.
    let has_threads = is_cpp && matches!(role, Role::Tier);
    let krate = name.replace('-', "_");
    let words = [
        ("@NAME@", name),
        ("@CRATE@", krate.as_str()),
        ("@ROLE@", example.role),
        ("@DESCRIPTION@", example.description),
        ("@CAPABILITIES@", example.capabilities),
        ("@CONFIG@", example.config),
        ("@THREADS@", if has_threads { "own" } else { "none" }),
        ("@SOURCE@", of("plugin.c", "plugin.cpp")),
        ("@LANGUAGE@", of("C", "CXX")),
        ("@LANGUAGE_NAME@", of("C", "C++")),
        ("@STANDARD@", of("11", "17")),
        ("@STD@", of("c11", "c++17")),
        ("@COMPILER@", of("CC", "CXX")),
        ("@FLAGS@", of("CFLAGS", "CXXFLAGS")),
    ];
    let filled = |text: &str| words.iter().fold(text.to_owned(), |text, (word, by)| text.replace(word, by));
    let mut files: Vec<(&'static str, String)> =
        COMMON.iter().map(|(file, text)| (*file, filled(text))).collect();
    files.push((ci::FILE, ci::workflow(name, &Build::Make)));
    files.push((".gitignore", "/build\n".to_owned()));
    files.push((of("src/plugin.c", "src/plugin.cpp"), of(example.c, example.cpp).to_owned()));
    files.push(("include/host_plugin.h", header!("host_plugin.h").to_owned()));
    if is_cpp {
        files.push(("include/host_plugin.hpp", header!("host_plugin.hpp").to_owned()));
    }
    if has_threads {
        files.push(("include/host_tier.hpp", header!("host_tier.hpp").to_owned()));
    }
    files
}

//! `host plugins new`: writes a crate, or a project in C or C++, that builds and passes `host plugins test` without changes.
//!
//! The sources in Rust are those of `examples/tcp-transfer` and of the plugins in `tests/plugins/{map,plain}`, under another name.
//! Those in C and C++ are in `new/c`. The tests of this command compile all of them.
//!
//! A tier and a transfer backend are built on a kit. The crate gets the kit from the same place as the API: from the checkout, or
//! as a folder.

mod api;
mod carried;
mod ci;
mod name;
mod native;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};

use crate::cli::Refused;
use crate::cli::output::say;
use api::Api;
use carried::Carried;
use native::Dialect;

/// What to make.
#[derive(Args, Debug)]
pub struct New {
    /// The plugin's name: what users write in --plugins, and the crate's name
    name: String,
    /// What the plugin does
    #[arg(long)]
    role: Role,
    /// What to write it in
    #[arg(long, value_enum, default_value = "rust")]
    lang: Language,
    /// The folder to make [default: NAME, here]
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
    /// The crate host-plugin-api, for Rust: the folder that it lies in, or a version [default: that of this checkout, else a copy
    /// in the new crate]
    #[arg(long, value_name = "PATH-OR-VERSION")]
    api: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Role {
    /// Moves KV pages between workers
    Transfer,
    /// Keeps KV pages that left the accelerator
    Tier,
    /// Hands out pages of the KV pools
    Allocator,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Language {
    /// Rust, built with cargo
    Rust,
    /// C11, built with make or cmake
    C,
    /// C++17, built with make or cmake
    Cpp,
}

/// Path and text of a file of the crate.
type Source = (&'static str, &'static str);

/// The plugin that a role's crate is made of.
struct Template {
    role: &'static str,
    /// The name of this plugin, which the new name replaces.
    name: &'static str,
    /// The name of its crate in its tests.
    krate: &'static str,
    id: &'static str,
    manifest: &'static str,
    sources: &'static [Source],
    /// The kit that it needs beside the API.
    kit: Option<&'static Carried>,
    /// How to use the plugin after it is built.
    usage: &'static str,
}

macro_rules! repository {
    ($file:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../", $file))
    };
}

const CARGO: &str = include_str!("new/Cargo.toml.template");
const FORMAT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../rustfmt.toml"));
const README: &str = include_str!("new/README.md.template");

/// What follows in every manifest.
const CONFIG: &str = r#"
# A key of the configuration that users write under [plugin.@NAME@]. The host refuses keys that are not declared here.
# [config.depth]
# type = "integer"    # string, integer, float, boolean, array or table
# default = 64
# doc = "What it means."
"#;

const TRANSFER: Template = Template {
    role: "transfer",
    name: "tcp",
    krate: "host_tcp_transfer",
    id: "com.example.tcp",
    manifest: repository!("examples/tcp-transfer/plugin.toml"),
    sources: &[
        ("src/lib.rs", repository!("examples/tcp-transfer/src/lib.rs")),
        ("src/endpoint.rs", repository!("examples/tcp-transfer/src/endpoint.rs")),
        ("src/receiver.rs", repository!("examples/tcp-transfer/src/receiver.rs")),
        ("src/sender.rs", repository!("examples/tcp-transfer/src/sender.rs")),
        ("tests/moves_bytes.rs", repository!("examples/tcp-transfer/tests/moves_bytes.rs")),
    ],
    kit: Some(&carried::TRANSFER_KIT),
    usage: "
To serve with it, put it into a directory and name it:

    host plugins install target/debug/lib@CRATE@.so --plugins-dir plugins
    host --plugins @NAME@ --plugins-dir plugins --executor synthetic
",
};

const TIER: Template = Template {
    role: "tier",
    name: "map",
    krate: "host_plugin_map",
    id: "host.test.map",
    manifest: repository!("tests/plugins/map/plugin.toml"),
    sources: &[
        ("src/lib.rs", repository!("tests/plugins/map/src/lib.rs")),
        ("tests/keeps_values.rs", repository!("tests/plugins/map/tests/keeps_values.rs")),
    ],
    kit: Some(&carried::TIER_KIT),
    usage: "",
};

const ALLOCATOR: Template = Template {
    role: "allocator",
    name: "plain",
    krate: "host_plugin_plain",
    id: "host.test.plain",
    manifest: repository!("tests/plugins/plain/plugin.toml"),
    sources: &[
        ("src/lib.rs", repository!("tests/plugins/plain/src/lib.rs")),
        ("tests/takes_and_gives_back.rs", repository!("tests/plugins/plain/tests/takes_and_gives_back.rs")),
    ],
    kit: None,
    usage: "",
};

impl New {
    /// Writes the crate or project, and prints the next steps. Refused if a file would be overwritten.
    pub fn run(self) -> anyhow::Result<()> {
        let Self { name, role, lang, path, api } = self;
        name::check(&name).map_err(Refused)?;
        let directory = path.unwrap_or_else(|| PathBuf::from(&name));
        match lang {
            Language::Rust => rust(&name, role, &directory, api.as_deref()),
            Language::C => native(&name, role, &directory, api.as_deref(), Dialect::C),
            Language::Cpp => native(&name, role, &directory, api.as_deref(), Dialect::Cpp),
        }
    }
}

/// Writes a crate.
fn rust(name: &str, role: Role, directory: &Path, api: Option<&str>) -> anyhow::Result<()> {
    let api = api.map_or_else(|| Ok(Api::here()), Api::of).map_err(Refused)?;
    let template = match role {
        Role::Transfer => TRANSFER,
        Role::Tier => TIER,
        Role::Allocator => ALLOCATOR,
    };
    // A kit may need a newer compiler than the API, never an older one.
    let rust = template.kit.unwrap_or(&carried::API).rust_version().context("a carried manifest")?;
    free(directory)?;
    for (file, text) in template.files(name, &api, &rust) {
        write(&directory.join(file), &text)?;
    }
    let of_kit = api.dependency_of_kit();
    for carried in template.carried(&api) {
        let api = (carried.name != carried::API.name).then_some(&of_kit);
        for (file, text) in carried.files(api).context("a carried manifest")? {
            write(&directory.join(carried.folder).join(file), &text)?;
        }
    }
    let program = program();
    let file = format!("target/debug/lib{}.so", name.replace('-', "_"));
    say!("made {}, which plays the role {}, against {api}", directory.display(), template.role);
    say!("");
    say!("next:");
    say!("    cd {}", directory.display());
    say!("    cargo test                       # its own tests, more of which are yours to write");
    say!("    cargo build");
    say!("    {program} plugins test {file}");
    say!("");
    say!("The first lines of src/lib.rs say which part to make yours. plugin.toml wants your id.");
    if let Api::Path(_) | Api::Carried = api {
        let version = Api::published();
        say!(
            "Where the API comes from a registry, Cargo.toml reads: host-plugin-api = {}",
            version.dependency()
        );
    }
    Ok(())
}

/// Writes a project in C or C++.
fn native(
    name: &str,
    role: Role,
    directory: &Path,
    api: Option<&str>,
    dialect: Dialect,
) -> anyhow::Result<()> {
    if api.is_some() {
        let text = "--api names the crate that plugins in Rust depend on: those in C and C++ get the headers";
        return Err(Refused(text.to_owned()).into());
    }
    free(directory)?;
    for (file, text) in native::files(name, role, dialect) {
        write(&directory.join(file), &text)?;
    }
    let program = program();
    let file = format!("build/lib{}.so", name.replace('-', "_"));
    say!(
        "made {}, with the headers of API {} in its folder include",
        directory.display(),
        host_plugin_api::VERSION
    );
    say!("");
    say!("next:");
    say!("    cd {}", directory.display());
    say!("    make                             # or cmake -S . -B build && cmake --build build");
    say!("    {program} plugins test {file}");
    say!("");
    say!("The first lines of the file in src say which part to make yours. plugin.toml wants your id.");
    Ok(())
}

/// The name by which this program can be called from another directory.
fn program() -> String {
    let called = std::env::args().next().unwrap_or_default();
    match std::env::current_exe() {
        Ok(program) if called.contains('/') => program.display().to_string(),
        _ => "host".to_owned(),
    }
}

impl Template {
    /// The crates that are written into the new one.
    fn carried(&self, api: &Api) -> Vec<&'static Carried> {
        let own = matches!(api, Api::Carried).then_some(&carried::API);
        own.into_iter().chain(self.kit.filter(|kit| api.kit(kit).is_none())).collect()
    }

    /// The kit's line in `Cargo.toml`.
    fn kit_dependency(&self, api: &Api) -> String {
        let line = |kit: &Carried| {
            let folder = api.kit(kit).map(|folder| folder.display().to_string());
            let folder = folder.unwrap_or_else(|| kit.folder.to_owned());
            format!("# No part of the ABI: take what you need of it.\n{} = {}\n", kit.name, api::at(&folder))
        };
        self.kit.map(line).unwrap_or_default()
    }

    fn files(&self, name: &str, api: &Api, rust: &str) -> Vec<(&'static str, String)> {
        let krate = name.replace('-', "_");
        // They are separate crates. `cargo test` and `cargo clippy` in the new crate leave them out.
        let folders: Vec<_> = self.carried(api).iter().map(|carried| carried.folder).collect();
        let alone = if folders.is_empty() { String::new() } else { format!("exclude = {folders:?}\n") };
        let filled = |text: &str| {
            text.replace("@USE@", self.usage)
                .replace("@NAME@", name)
                .replace("@CRATE@", &krate)
                .replace("@ROLE@", self.role)
                .replace("@RUST@", rust)
                .replace("@ALONE@", &alone)
                .replace("@KIT@", &self.kit_dependency(api))
                .replace("@API@", &api.dependency().to_string())
        };
        let id = format!("id = {:?}", self.id);
        let own =
            format!("id = \"com.example.{name}\"    # yours: a domain that you own, backwards, and the name");
        let manifest = self.manifest.replace(&id, &own);
        let manifest = manifest.replace(&format!("name = \"{}\"", self.name), &format!("name = \"{name}\""));
        let mut files = vec![
            ("Cargo.toml", filled(CARGO)),
            ("README.md", filled(README)),
            ("plugin.toml", manifest + &filled(CONFIG)),
            (ci::FILE, ci::workflow(name, &ci::Build::Rust(rust))),
            (".gitignore", "/target\n".to_owned()),
            ("rustfmt.toml", FORMAT.to_owned()),
        ];
        files.extend(self.sources.iter().map(|(file, text)| (*file, text.replace(self.krate, &krate))));
        files
    }
}

/// Refuses a folder that is not empty.
fn free(directory: &Path) -> anyhow::Result<()> {
    let taken = match std::fs::read_dir(directory) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(Refused(format!("{} cannot be used: {error}", directory.display())).into()),
    };
    if taken {
        let text = format!(
            "{} is not empty, and nothing is overwritten: name another with --path",
            directory.display()
        );
        return Err(Refused(text).into());
    }
    Ok(())
}

fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    let failed = || format!("{} cannot be written", file.display());
    if let Some(parent) = file.parent() {
        std::fs::create_dir_all(parent).with_context(failed)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(file).with_context(failed)?;
    file.write_all(text.as_bytes()).with_context(failed)
}

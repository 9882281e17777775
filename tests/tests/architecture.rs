//! Tests of the dependencies between crates and between modules, and of what the core must not touch.

#![allow(clippy::unwrap_used, reason = "a manifest that cannot be read is a test that fails")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toml::Table;

#[path = "architecture/code.rs"]
mod code;
#[path = "architecture/modules.rs"]
mod modules;
#[path = "architecture/one_at_a_time.rs"]
mod one_at_a_time;

use code::{Code, belongs_to_tests};
use modules::{Arrows, Modules, circle};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn manifest(folder: &str) -> Table {
    let path = root().join(folder).join("Cargo.toml");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Dependencies of a crate's code, on any target. Tests and benchmarks may use more.
fn dependencies(manifest: &Table) -> BTreeSet<String> {
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    let tables = targets.into_iter().flat_map(|targets| targets.values().filter_map(toml::Value::as_table));
    let mut names = BTreeSet::new();
    for table in tables.chain([manifest]) {
        for kind in ["dependencies", "build-dependencies"] {
            if let Some(dependencies) = table.get(kind).and_then(toml::Value::as_table) {
                for (name, value) in dependencies {
                    // A renamed dependency counts under its real name.
                    let real = value.get("package").and_then(toml::Value::as_str).unwrap_or(name);
                    names.insert(real.to_owned());
                }
            }
        }
    }
    names
}

/// The folders of this workspace's crates.
fn members() -> Vec<String> {
    let workspace = manifest(".");
    let members = workspace["workspace"]["members"].as_array().unwrap().iter();
    let members = members.map(|member| member.as_str().unwrap());
    let members = members.flat_map(|member| match member.strip_suffix("/*") {
        Some(folder) => folders(folder),
        None => vec![member.to_owned()],
    });
    members.collect()
}

/// The crates of this workspace by their names.
fn ours() -> BTreeSet<String> {
    members().iter().map(|member| package(member)).collect()
}

fn folders(parent: &str) -> Vec<String> {
    let entries = fs::read_dir(root().join(parent)).unwrap();
    let folders = entries.map(|entry| entry.unwrap().path()).filter(|path| path.join("Cargo.toml").exists());
    folders.map(|path| format!("{parent}/{}", path.file_name().unwrap().to_string_lossy())).collect()
}

fn sources(folder: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![root().join(folder)];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    assert!(found.len() > 2, "{folder} has {} source files: is it the right folder?", found.len());
    found
}

/// A file's lines of code, with their numbers: no comments, and nothing that only tests are built with.
fn code(path: &Path) -> Vec<(usize, String)> {
    if belongs_to_tests(path) { Vec::new() } else { Code::read(path).lines() }
}

/// Every line of code of a folder in which `wrong` sees something, as `file:line: text`.
fn lines(folder: &str, wrong: impl Fn(&Path, &str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for path in sources(folder) {
        for (number, line) in code(&path) {
            if wrong(&path, &line) {
                found.push(format!("{}:{number}: {}", path.display(), line.trim()));
            }
        }
    }
    found
}

fn allowed(list: &[&str]) -> BTreeSet<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn the_core_depends_on_error_types_and_hashing_alone() {
    assert_eq!(dependencies(&manifest("host/core")), allowed(&["sha2", "thiserror"]));
}

#[test]
fn the_simulated_world_depends_on_the_core_alone() {
    assert_eq!(dependencies(&manifest("host/sim")), allowed(&["host-core"]));
}

#[test]
fn the_core_and_its_simulated_world_reach_for_no_thread_socket_file_or_clock() {
    let forbidden =
        ["thread", "net", "fs", "process", "env", "io", "sync", "time::Instant", "time::SystemTime", "os"];
    let wrong = |_: &Path, line: &str| {
        forbidden.iter().any(|name| {
            line.match_indices(&format!("std::{name}")).any(|(at, found)| {
                !line[at + found.len()..].starts_with(|next: char| next.is_alphanumeric() || next == '_')
            })
        }) || line.contains("std::{")
            || (line.contains("std::time::{") && (line.contains("Instant") || line.contains("SystemTime")))
            || line.contains("async ")
    };
    for folder in ["host/core/src", "host/sim/src", "host/simulate/src"] {
        let found = lines(folder, wrong);
        assert!(found.is_empty(), "{found:#?}");
    }
}

#[test]
fn the_plugin_api_depends_on_nothing_of_the_host() {
    assert_eq!(dependencies(&manifest("plugin-api")), allowed(&["abi_stable"]));
}

#[test]
fn kernels_depend_on_nothing_of_the_host() {
    let (used, ours) = (dependencies(&manifest("kernels")), ours());
    let wrong: Vec<_> = used.intersection(&ours).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn what_judges_ownership_depends_on_the_system_alone() {
    assert_eq!(dependencies(&manifest("ownership")), allowed(&["rustix"]));
}

#[test]
fn the_gguf_reader_depends_on_nothing_of_the_host() {
    assert_eq!(dependencies(&manifest("gguf")), allowed(&["thiserror"]));
}

/// Libraries for plugins, which are no plugins themselves.
const TRANSFER_KIT: &str = "plugins/transfer-kit";
const TIER_KIT: &str = "plugins/tier-kit";

/// The folders of plugins.
fn plugins() -> Vec<String> {
    let mut found = folders("plugins");
    found.retain(|folder| folder != TRANSFER_KIT && folder != TIER_KIT);
    assert!(found.contains(&"plugins/shm".to_owned()), "{found:?}");
    found
}

#[test]
fn the_transfer_kit_depends_on_the_plugin_api_and_the_system_alone() {
    assert_eq!(dependencies(&manifest(TRANSFER_KIT)), allowed(&["host-plugin-api", "rustix"]));
}

#[test]
fn the_tier_kit_depends_on_the_plugin_api_alone() {
    assert_eq!(dependencies(&manifest(TIER_KIT)), allowed(&["host-plugin-api"]));
}

#[test]
fn plugins_depend_on_the_plugin_api_the_kernels_and_the_kits_and_nothing_else_of_the_host() {
    for folder in plugins() {
        let used: BTreeSet<_> = dependencies(&manifest(&folder)).intersection(&ours()).cloned().collect();
        assert!(used.contains("host-plugin-api"), "{folder} does not use the plugin API");
        let libraries = allowed(&[
            "host-plugin-api",
            "host-kernels",
            "host-ownership",
            "host-tier-kit",
            "host-transfer-kit",
        ]);
        let wrong: Vec<_> = used.difference(&libraries).cloned().collect();
        assert!(wrong.is_empty(), "{folder} depends on {wrong:?}");
    }
    // A plugin that is broken on purpose may be built from a real plugin, but depends on no more of the host than a real one.
    for folder in folders("tests/plugins") {
        let (used, ours) = (dependencies(&manifest(&folder)), ours());
        let host: Vec<_> = used
            .intersection(&ours)
            .filter(|name| {
                // `host-plugin-test` is the kit, not a plugin.
                let is_plugin = name.starts_with("host-plugin-") && *name != "host-plugin-test";
                !is_plugin && !ALSO_OF_PLUGINS.contains(&name.as_str())
            })
            .collect();
        assert!(host.is_empty(), "{folder} depends on {host:?}");
    }
}

/// Crates of this workspace that plugins may use beside the API and each other.
const ALSO_OF_PLUGINS: [&str; 3] = ["host-kernels", "host-tier-kit", "host-transfer-kit"];

/// The table of crates in the documentation: the folder of each crate, and the crates of this workspace that it may depend on. A
/// crate may depend on those in rows above it alone.
fn documented() -> Vec<(String, BTreeSet<String>)> {
    let path = root().join("docs/internals/README.md");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut rows: Vec<(String, BTreeSet<String>)> = Vec::new();
    for line in text.lines() {
        let cells: Vec<&str> = line.trim_matches(['|', ' ']).split(" | ").collect();
        let [folder, _, under] = cells[..] else { continue };
        let Some(folder) = folder.strip_prefix('`').and_then(|folder| folder.strip_suffix('`')) else {
            continue;
        };
        if folder.contains('*') {
            continue;
        }
        let above = |named: &dyn Fn(&str) -> bool| -> BTreeSet<String> {
            rows.iter().filter(|(folder, _)| named(folder)).map(|(folder, _)| package(folder)).collect()
        };
        let mut may = BTreeSet::new();
        // Names in backticks are crates of others.
        for word in
            under.split(", ").filter(|word| !word.starts_with('`') && *word != "nothing of this workspace")
        {
            let name = if word == "plugin API" { "plugin-api" } else { word };
            let except = name.strip_prefix("all of the above but ");
            let found = above(&|folder| {
                let last = folder.rsplit('/').next();
                name == "all of the above" || except.map_or(last == Some(name), |except| last != Some(except))
            });
            assert!(!found.is_empty(), "{folder} may depend on {word}, which is no crate above it");
            may.extend(found);
        }
        rows.push((folder.to_owned(), may));
    }
    rows
}

fn package(folder: &str) -> String {
    manifest(folder)["package"]["name"].as_str().unwrap().to_owned()
}

#[test]
fn crates_depend_on_those_alone_that_the_table_of_the_documentation_names() {
    let documented = documented();
    for (folder, under) in &documented {
        let used: BTreeSet<_> = dependencies(&manifest(folder)).intersection(&ours()).cloned().collect();
        let wrong: Vec<_> = used.difference(under).cloned().collect();
        assert!(wrong.is_empty(), "{folder} depends on {wrong:?}");
    }
    let listed: BTreeSet<String> = documented
        .into_iter()
        .map(|(folder, _)| folder)
        .filter(|folder| folder.starts_with("host"))
        .collect();
    let there: BTreeSet<String> = folders("host").into_iter().chain(["host".to_owned()]).collect();
    assert_eq!(there, listed);
}

/// Third parties embed the loader, and run the kit on machines that serve no model.
#[test]
fn the_loader_and_the_kit_need_no_http_no_runtime_and_no_tokenizer() {
    let heavy =
        ["axum", "hyper", "tonic", "prost", "tokio", "tokenizers", "minijinja", "clap", "futures-util"];
    for package in ["host-plugins", "host-conformance", "host-memory"] {
        let mut tree = Command::new(env!("CARGO"));
        tree.args(["tree", "--offline", "--edges", "normal", "--prefix", "none", "--package", package]);
        let output = tree.current_dir(root()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let used: BTreeSet<&str> = text.lines().filter_map(|line| line.split(' ').next()).collect();
        assert!(used.contains(package), "{used:?}");
        let wrong: Vec<_> = heavy.iter().filter(|name| used.contains(**name)).collect();
        assert!(wrong.is_empty(), "{package} is built with {wrong:?}");
    }
}

#[test]
fn no_code_of_the_host_names_a_plugin_except_the_defaults() {
    let mut names = allowed(&["nixl", "mooncake"]);
    for folder in plugins() {
        let path = root().join(&folder).join("plugin.toml");
        let manifest: Table = fs::read_to_string(&path).unwrap().parse().unwrap();
        names.insert(manifest["plugin"]["name"].as_str().unwrap().to_owned());
    }
    assert!(names.contains("shm"), "{names:?}");
    let folders =
        documented().into_iter().map(|(folder, _)| folder).filter(|folder| folder.starts_with("host"));
    let wrong = |path: &Path, line: &str| {
        let default = path.ends_with("host/src/cli/settings/defaults.rs") && line.contains("unwrap_or_else");
        let named = |name: &&String| line.contains(&format!("\"{name}\""));
        names.iter().filter(named).any(|name| !(default && ["shm", "swa"].contains(&name.as_str())))
    };
    let found: Vec<String> = folders.flat_map(|folder| lines(&format!("{folder}/src"), wrong)).collect();
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn the_command_runner_stays_light() {
    let used = dependencies(&manifest("xtask"));
    let light = allowed(&["anyhow", "fastrand", "host-tests", "rustix", "serde_json", "tempfile", "ureq"]);
    assert!(used.is_subset(&light), "{used:?}");
    let fixtures = manifest("tests");
    let always: Vec<_> = fixtures["dependencies"]
        .as_table()
        .unwrap()
        .iter()
        .filter(|(_, value)| value.get("optional").and_then(toml::Value::as_bool) != Some(true))
        .map(|(name, _)| name.as_str())
        .collect();
    let light = ["fastrand", "host-gguf", "serde_json", "tempfile", "ureq"];
    assert!(always.iter().all(|name| light.contains(name)), "{always:?}");
}

/// A dependency that closes a circle and is tolerated until that is mended: the crate, the module around both ends, from, to, and
/// the reason. Other circles through it are not found meanwhile.
type Excuse = (&'static str, &'static str, &'static str, &'static str, &'static str);

const EXCUSED: [Excuse; 4] = [
    (
        "host",
        "cli",
        "plugins",
        "launch",
        "plugins are opened for a launch, and commands about plugins look at the plan of one: the plan is a part of its own",
    ),
    (
        "host",
        "cli",
        "offload",
        "launch",
        "a worker's share of the machine's memory (launch/share.rs) is reckoned with the plan, whose limits check it",
    ),
    ("host", "cli", "staging", "launch", "as for offload"),
    (
        "plugin-api",
        "",
        "abi",
        "services",
        "the layout of a log level is public as services::Level, and nothing of the ABI moves for a test",
    ),
];

/// The modules of a crate: of its library, of its program, or of both.
fn modules(folder: &str) -> Vec<Modules> {
    let roots = ["lib.rs", "main.rs"].map(|name| root().join(folder).join("src").join(name));
    let found: Vec<Modules> =
        roots.iter().filter(|root| root.exists()).map(|root| Modules::read(root)).collect();
    assert!(!found.is_empty(), "{folder} has no source");
    found
}

#[test]
fn the_modules_of_a_crate_form_no_circle() {
    let core = modules("host/core").remove(0).arrows();
    let reaches =
        |parent: &str, from: &str, to: [&str; 3]| to.iter().all(|to| core[parent][from].contains(*to));
    assert!(reaches("", "scheduler", ["cache", "hand_over", "radix"]), "{core:?}: is it read right?");
    assert!(reaches("scheduler", "admission", ["exchange", "job", "stage"]), "{core:?}: is it read right?");

    let (mut wrong, mut unneeded, mut several) = (Vec::new(), EXCUSED.to_vec(), 0);
    for folder in members() {
        for modules in modules(&folder) {
            several += usize::from(modules.count() > 2);
            for (parent, arrows) in modules.arrows() {
                let without = |needed: Option<&Excuse>| {
                    let mut arrows: Arrows = arrows.clone();
                    for excuse in EXCUSED.iter().filter(|excuse| Some(*excuse) != needed) {
                        if (excuse.0, excuse.1) == (&folder, &parent)
                            && let Some(named) = arrows.get_mut(excuse.2)
                        {
                            named.remove(excuse.3);
                        }
                    }
                    circle(&arrows)
                };
                if let Some(way) = without(None) {
                    wrong.push(format!("{folder}, in `crate::{parent}`: {}", way.join(" -> ")));
                }
                unneeded.retain(|excuse| {
                    (excuse.0, excuse.1) != (&folder, &parent) || without(Some(excuse)).is_none()
                });
            }
        }
    }
    assert!(several > 20, "{several} crates have modules: are they read right?");
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(unneeded.is_empty(), "these close no circle any more: {unneeded:#?}");
}

#[test]
fn the_scheduler_and_a_hand_over_reach_for_nothing_behind_the_cache() {
    let behind =
        ["RadixTree", "PrefixLock", "PagePool", "HeldPages", "Hierarchy", "WindowShape", "Quarantine"];
    let names = |line: &str| {
        line.split(|character: char| !character.is_alphanumeric()).any(|word| behind.contains(&word))
    };
    let behind_the_cache = lines("host/core/src/cache", |_, line| names(line));
    assert!(behind_the_cache.len() > 20, "{behind_the_cache:?}: is it read right?");
    let rooms = ["scheduler", "hand_over"];
    let wrong = |path: &Path, line: &str| {
        let core = path.strip_prefix(root().join("host/core/src")).unwrap_or(path).with_extension("");
        rooms.iter().any(|room| core.starts_with(room)) && names(line)
    };
    let found = lines("host/core/src", wrong);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn what_a_role_changes_in_the_scheduler_stands_in_one_file() {
    let looks = |line: &str| ["Role::", "sends_kv", "receives_kv"].iter().any(|word| line.contains(word));
    let in_roles = |path: &Path| path.ends_with("scheduler/roles.rs");
    let of_scheduler = |path: &Path| {
        let core = path.strip_prefix(root().join("host/core/src")).unwrap_or(path).with_extension("");
        core.starts_with("scheduler")
    };
    let found = lines("host/core/src", |path, line| in_roles(path) && looks(line));
    assert!(found.len() > 5, "{found:?}: is it read right?");
    let wrong = lines("host/core/src", |path, line| of_scheduler(path) && !in_roles(path) && looks(line));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn connections_between_processes_are_made_where_peers_are_checked() {
    let opens =
        ["transport::Endpoint", "transport::Server", "Endpoint::from", "Server::builder", "Client::connect("];
    let wrong = |_: &Path, line: &str| opens.iter().any(|way| line.contains(way));
    assert!(lines("host/wire/src/endpoint", wrong).len() >= 3, "are they read right?");
    for folder in ["host/worker/src", "host/front/src", "host/src"] {
        let found = lines(folder, wrong);
        assert!(found.is_empty(), "{found:#?}");
    }
}

/// `cargo xtask test` runs these tests one at a time, because such libraries and programs starve each other.
#[test]
fn tests_with_libraries_and_programs_of_other_projects_are_in_the_group_that_runs_one_at_a_time() {
    let (mut wrong, mut right) = (Vec::new(), 0);
    for folder in ["host/tests", "plugins/mooncake/tests", "plugins/nixl/tests"] {
        for path in sources(folder) {
            let (outside, inside) = one_at_a_time::calls(&Code::read(&path).tokens);
            right += inside.len();
            if one_at_a_time::is_external(path.strip_prefix(root().join(folder)).unwrap()) {
                right += outside.len();
            } else {
                wrong.extend(outside.into_iter().map(|line| format!("{}:{line}", path.display())));
            }
        }
    }
    assert!(right > 30, "{right} calls: are they read right?");
    assert!(wrong.is_empty(), "put these tests into a module named `external`: {wrong:#?}");
}

#[test]
fn arithmetic_is_checked_in_releases_except_in_inner_loops() {
    let release = manifest(".")["profile"]["release"].as_table().unwrap().clone();
    assert_eq!(release.get("overflow-checks").and_then(toml::Value::as_bool), Some(true));
    let packages = release["package"].as_table().unwrap();
    let unchecked = packages
        .iter()
        .filter(|(_, profile)| profile.get("overflow-checks").and_then(toml::Value::as_bool) == Some(false));
    let unchecked: Vec<&str> = unchecked.map(|(name, _)| name.as_str()).collect();
    assert_eq!(unchecked, ["host-executor", "host-kernels"]);
}

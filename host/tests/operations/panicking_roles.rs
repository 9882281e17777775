//! A storage tier and an allocator that panic: messages to operators from a server and from `host tier`. Tests in `host/worker`
//! compare the log of every method with the page.

use std::path::Path;
use std::process::Command;

use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;
use host_tests::program::run_to_end;

const PAGE: &str = include_str!("../../../docs/plugins/debugging.md");

/// Flags of an aggregated server without caches whose pages this plugin allocates.
fn flags(plugins: &Path) -> Vec<String> {
    let flags = ["--executor", "synthetic", "--role", "aggregated", "--allocator", "panicking-roles"];
    let mut flags: Vec<String> = flags.map(str::to_owned).to_vec();
    flags.extend(["--plugins-dir".to_owned(), plugins.display().to_string()]);
    flags
}

#[test]
fn an_allocator_that_panics_is_out_of_service_with_a_line_and_no_answer_changes() {
    let plugins = plugin_files::directory(&["panicking-roles"]);
    let start = |place: &str| {
        let config = format!("[plugin.panicking-roles]\nin = \"{place}\"\n");
        let program = Path::new(env!("CARGO_BIN_EXE_host"));
        Cluster::start(&Start { program, flags: flags(plugins.path()), config, workers: 1 })
    };
    let prompt: Vec<u32> = (0..70).collect();
    let right = start("nowhere").generate(&prompt, 20).unwrap();
    for (place, says) in [
        ("allocator.alloc", "of component 0 that are free (alloc)"),
        ("allocator.free", "of component 0 were given back that it had handed out (free)"),
    ] {
        let cluster = start(place);
        assert_eq!(cluster.generate(&prompt, 20).unwrap(), right, "{place}");
        assert_eq!(cluster.generate(&prompt, 20).unwrap(), right, "{place}");
        cluster.wait("all pages to be free", || cluster.all_free());
        cluster.wait("the line", || cluster.log().contains(says));
        let log = cluster.log();
        let line = log.lines().find(|line| line.contains(says)).unwrap();
        assert!(line.contains("plugin \\\"panicking-roles\\\" answered PANICKED"), "{line}");
        assert!(
            line.contains("out of service") && log.contains(&format!("told to panic in {place}")),
            "{log}"
        );
    }
}

#[test]
fn an_allocator_that_panics_when_it_is_asked_for_its_components_serves_nothing() {
    let plugins = plugin_files::directory(&["panicking-roles"]);
    let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
    host.args(["--port", "0", "--set", "panicking-roles.in=allocator.components"]);
    let ended = run_to_end("host", host.args(flags(plugins.path())));
    assert_eq!(ended.code(), Some(2), "{ended}");
    let said = ended.stderr;
    assert!(said.contains("plugin \"panicking-roles\" answered PANICKED"), "{said}");
    assert!(said.contains("when it was asked for its components"), "{said}");
}

#[test]
fn a_tier_that_panics_is_named_by_check_and_by_the_commands_that_look_into_it() {
    let plugins = plugin_files::directory(&["panicking-roles", "shm"]);
    let host = |arguments: &[&str], place: &str| {
        let set = match arguments[0] {
            "tier" => format!("in={place}"),
            _ => format!("panicking-roles.in={place}"),
        };
        let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
        host.args(arguments).arg("--plugins-dir").arg(plugins.path()).args(["--set", &set]);
        let output = host.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let heading = "\n### The commands of `host tier`\n";
    let section = PAGE.split(heading).nth(1).expect("the page has the heading").split("\n#").next().unwrap();
    let quoted: Vec<&str> =
        section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let mut told = 0;
    for (command, method) in [("ls", "scan"), ("stat", "usage")] {
        let (code, said) = host(&["tier", command, "--plugin", "panicking-roles"], &format!("tier.{method}"));
        assert_eq!(code, Some(1), "{command}: {said}");
        assert!(said.contains(&format!("told to panic in tier.{method}")), "{command}: {said}");
        let message = quoted.iter().find(|line| said.contains(&line.replace("acme-disk", "panicking-roles")));
        assert!(message.is_some(), "{command}: the page does not quote: {said}");
        told += 1;
    }
    assert_eq!(told, quoted.len(), "the page quotes what is never told: {quoted:?}");
    for (method, says) in [
        ("limits", "plugin \"panicking-roles\" opened, but limits answered PANICKED ("),
        ("register", "plugin \"panicking-roles\" did not register the host memory: PANICKED"),
        ("deregister", "plugin \"panicking-roles\" did not give memory back (deregister): PANICKED"),
    ] {
        let check = [
            "plugins",
            "check",
            "--executor",
            "synthetic",
            "--plugins",
            "shm,panicking-roles",
            "--page-size",
            "16",
        ];
        let (code, said) = host(&check, &format!("tier.{method}"));
        assert!(code == Some(2) && said.contains(says), "{method}: {code:?} {said}");
        assert!(said.contains(&format!("told to panic in tier.{method}")), "{method}: {said}");
    }
}

//! Runs every command in `docs/plugins` and `docs/capacity-planning.md`, in the order of the page, against the program that was
//! just built.
//!
//! Commands are the lines of blocks marked `sh`. A page is one script in a directory of its own. A block marked `sh server` runs in
//! the background until the page ends. `! command` must fail.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use host_tests::skip::skipped;

/// Lines that are left out, because the test has already done what they say.
const DONE_ALREADY: &[(&str, &str)] = &[
    ("cargo build -p host", "the program is built, and others may be running it"),
    ("export PATH=", "the program that was built is on the path"),
];

/// Programs that a machine may lack.
const MAY_BE_MISSING: &[&str] = &["gdb", "curl"];

/// Kinds of blocks that hold no commands.
const NO_COMMANDS: &[&str] = &["toml", "rust", "text", "c", "cpp", "mermaid"];

struct Block {
    server: bool,
    lines: Vec<String>,
}

/// The blocks of commands of a page.
fn blocks(page: &str) -> Vec<Block> {
    let (mut found, mut inside): (Vec<Block>, Option<&str>) = (Vec::new(), None);
    for line in page.lines() {
        match (line.strip_prefix("```"), inside) {
            (Some(_), Some(_)) => inside = None,
            (Some(kind), None) => {
                let commands = kind == "sh" || kind == "sh server";
                assert!(commands || NO_COMMANDS.contains(&kind), "a block marked {kind:?}: is it a command?");
                inside = Some(kind);
                if commands {
                    found.push(Block { server: kind == "sh server", lines: Vec::new() });
                }
            }
            (None, Some("sh" | "sh server")) => found.last_mut().unwrap().lines.push(line.to_owned()),
            (None, _) => {}
        }
    }
    assert!(inside.is_none(), "a block does not end");
    found
}

fn is_there(program: &str) -> bool {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|at| at.join(program).is_file())
}

/// The page as a script, with `port` for the server's.
fn script(page: &str, port: u16) -> String {
    let mut text = String::from("set -eu\n");
    for block in blocks(page) {
        for line in block.lines.iter().filter(|line| !line.trim().is_empty()) {
            let line = line.replace("8000", &port.to_string());
            let quoted = line.replace('\'', "'\\''");
            writeln!(text, "echo '$ {quoted}'").unwrap();
            let missing = MAY_BE_MISSING.iter().find(|p| line.starts_with(**p) && !is_there(p));
            if let Some((_, why)) = DONE_ALREADY.iter().find(|(start, _)| line.starts_with(start)) {
                writeln!(text, "echo '(left out: {why})'").unwrap();
            } else if let Some(program) = missing {
                skipped(&format!("`{line}` of docs/plugins: {program} is not installed"));
            } else if block.server {
                // Waits until the server answers. A server that ends is an error.
                writeln!(
                    text,
                    "{line} > server.log 2>&1 &\nserver=$!\ntrap 'kill $server; wait $server || true' EXIT"
                )
                .unwrap();
                writeln!(text, "until grep -q 'serving' server.log; do kill -0 $server; sleep 0.05; done")
                    .unwrap();
                // The workers register a moment later.
                if is_there("curl") {
                    let ready = format!("curl -fso /dev/null http://127.0.0.1:{port}/health/ready");
                    writeln!(text, "until {ready}; do kill -0 $server; sleep 0.05; done").unwrap();
                }
            } else if let Some(command) = line.strip_prefix("! ") {
                writeln!(text, "if {command}; then echo 'that should have failed'; exit 1; fi").unwrap();
            } else {
                writeln!(text, "{line}").unwrap();
            }
        }
    }
    text
}

fn run(page: &Path) {
    let text = std::fs::read_to_string(page).unwrap();
    let port = host_tests::ports::unused().port();
    let directory = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let mut path = vec![program.parent().unwrap().to_owned()];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let test = std::env::current_exe().unwrap();
    let shared = test.ancestors().nth(3).expect("tests lie in <target>/<profile>/deps").join("docs-commands");
    let mut shell = Command::new("bash");
    shell.arg("-c").arg(script(&text, port));
    // Pages that build the program run in the repository.
    shell.current_dir(if text.contains("\ncargo build -p host\n") { repository } else { directory.path() });
    shell.env("PATH", std::env::join_paths(path).unwrap()).env("TMPDIR", directory.path());
    shell.env("API", repository.join("plugin-api"));
    // Results are in the place that the page says. Intermediate files are kept for all pages, because most of them are for
    // `abi_stable`.
    shell
        .env_remove("CARGO_TARGET_DIR")
        .env("CARGO_BUILD_BUILD_DIR", shared)
        .env("CARGO_NET_OFFLINE", "true");
    let output = shell.output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{} does not work as written:\n{said}", page.display());
}

#[test]
fn every_command_of_the_plugin_pages_works_as_written() {
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs/plugins");
    let mut pages: Vec<PathBuf> =
        std::fs::read_dir(pages).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|page| page.extension().is_some_and(|e| e == "md"));
    pages.sort();
    assert!(pages.len() >= 6, "{pages:?}");
    // Pages run one after the other, because each builds a crate.
    for page in pages {
        run(&page);
    }
}

#[test]
fn every_command_of_capacity_planning_works_as_written() {
    run(&Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs/capacity-planning.md"));
}

/// All Rust of a folder.
fn sources(folder: &Path, text: &mut String) {
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn messages_that_the_pages_explain_are_messages_of_the_program() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = std::fs::read_to_string(repository.join("docs/plugins/debugging.md")).unwrap();
    let mut said = String::new();
    sources(&repository.join("host/plugins/src"), &mut said);
    sources(&repository.join("host/conformance/src"), &mut said);
    sources(&repository.join("plugin-api/src"), &mut said);
    let table = page.split("| Message | Cause |").nth(1).unwrap().split("\n\n").next().unwrap();
    let messages: Vec<&str> = table.lines().filter_map(|line| line.split('`').nth(1)).collect();
    assert!(messages.len() > 10, "{messages:?}");
    for message in messages {
        for part in
            message.split("..").map(|part| part.trim().trim_matches(',')).filter(|part| part.len() > 1)
        {
            assert!(said.contains(part.trim()), "no message says {part:?}, of {message:?}");
        }
    }
}

#[test]
fn links_between_the_pages_lead_somewhere() {
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs/plugins");
    for page in std::fs::read_dir(&pages).unwrap().map(|entry| entry.unwrap().path()) {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap();
            assert!(
                link.starts_with("http") || pages.join(file).exists(),
                "{} links to {link}",
                page.display()
            );
        }
    }
}

#[test]
fn a_page_becomes_a_script_that_stops_at_the_first_mistake() {
    let page = "text\n```sh\ntrue\n! false\n```\n    indented\n```text\nfalse\n```\n";
    let made = script(page, 1);
    assert!(
        made.contains("\ntrue\n") && made.contains("if false; then") && !made.contains("indented"),
        "{made}"
    );
    let status =
        |page: &str| Command::new("bash").arg("-c").arg(script(page, 1)).output().unwrap().status.success();
    assert!(status(page));
    assert!(!status("```sh\nfalse\ntrue\n```\n"));
    assert!(!status("```sh\n! true\ntrue\n```\n"));
}

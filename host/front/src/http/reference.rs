//! `docs/api.md` lists every path that is served and every field that is read, and no other.

use std::collections::BTreeSet;

use super::fields::{self, asked};
use super::{fuzzing, paths};

const PAGE: &str = include_str!("../../../../docs/api.md");

/// What stands between backticks in the first cells of the tables below a heading, down to the next of its level.
fn listed(heading: &str) -> BTreeSet<String> {
    let level = heading.split(' ').next().unwrap();
    let mut lines = PAGE.lines().skip_while(|line| *line != heading);
    assert!(lines.next().is_some(), "docs/api.md has no {heading:?}");
    let section = lines.take_while(|line| {
        let hashes = line.split(' ').next().unwrap_or_default();
        !(hashes.starts_with('#') && hashes.len() <= level.len())
    });
    let rows = section.filter(|line| !line.starts_with("| Field"));
    let cells = rows.filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned)).collect()
}

/// The fields that are read of a body.
fn read(endpoint: u8, body: &str) -> BTreeSet<String> {
    asked::take();
    assert!(fuzzing::body(&[&[endpoint], body.as_bytes()].concat()), "{body} is refused");
    // Of objects within the body the fields are listed with these.
    let within = ["stream_options.", "text.", "reasoning."];
    asked::take().into_iter().filter(|name| !within.iter().any(|prefix| name.starts_with(prefix))).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn every_path_is_listed_and_no_other() {
    let served = [paths::of_clients(), paths::of_operators(), paths::of_all()].concat();
    let served: BTreeSet<String> = served.into_iter().map(|(path, _)| path.to_owned()).collect();
    assert_eq!(listed("## Paths"), served);
}

#[test]
fn every_field_of_openais_endpoints_is_listed_and_no_other() {
    let chat = read(1, r#"{"messages": [{"role": "user", "content": "a"}]}"#);
    let completions = read(0, r#"{"prompt": "a"}"#);
    let read: BTreeSet<String> = chat.union(&completions).cloned().collect();
    let mut listed = listed("## Fields");
    assert_eq!(listed.difference(&read).collect::<Vec<_>>(), Vec::<&String>::new(), "listed and not read");
    listed.extend(set(fields::harmless()));
    assert_eq!(read.difference(&listed).collect::<Vec<_>>(), Vec::<&String>::new(), "read and not listed");
    let named = fields::harmless().iter().filter(|name| PAGE.contains(&format!("`{name}`")));
    assert_eq!(named.count(), fields::harmless().len(), "taken and not read: {:?}", fields::harmless());
}

#[test]
fn every_field_of_generate_is_listed_and_no_other() {
    let read = read(2, r#"{"text": "a"}"#);
    let (inner, outer): (BTreeSet<String>, BTreeSet<String>) =
        read.into_iter().partition(|name| name.starts_with("sampling_params."));
    let inner: BTreeSet<String> =
        inner.iter().map(|name| name.trim_start_matches("sampling_params.").to_owned()).collect();
    let mut beside = listed("## Generate");
    beside.extend(listed("### Serving"));
    assert_eq!(outer, beside);
    let of_text = set(&[
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "no_stop_trim",
        "ignore_eos",
        "skip_special_tokens",
        "n",
    ]);
    let mut within = listed("### Sampling");
    within.remove("seed");
    within.extend(of_text);
    within.extend(set(&["sampling_seed", "max_new_tokens"]));
    within.extend(listed("### Structure"));
    within.extend(listed("### Taken only where they change nothing"));
    assert_eq!(inner, within);
}

#[test]
fn every_field_of_responses_is_listed_and_no_other() {
    let mut listed_here = listed("## Responses");
    for heading in ["### Sampling", "### Serving", "### Structure"] {
        listed_here.extend(listed(heading));
    }
    listed_here.extend(set(&["structural_tag", "guided_whitespace_pattern", "return_cached_tokens_details"]));
    let read = read(4, r#"{"input": "a"}"#);
    assert_eq!(
        listed_here.difference(&read).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "listed and not read"
    );
    listed_here.extend(set(fields::harmless()));
    assert_eq!(
        read.difference(&listed_here).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "read and not listed"
    );
}

#[test]
fn every_field_about_tokens_is_listed_and_no_other() {
    let mut read_all = read(3, r#"{"messages": [{"role": "user", "content": "a"}]}"#);
    read_all.extend(read(3, r#"{"tokens": [1]}"#));
    assert_eq!(listed("## Tokens"), read_all);
}

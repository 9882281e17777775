//! Tests that links and file names in the documentation lead to files that are there.

#![allow(clippy::unwrap_used, reason = "a page that cannot be read is a test that fails")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// All pages of the repository.
fn pages() -> Vec<PathBuf> {
    let (mut found, mut left) = (Vec::new(), vec![root()]);
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !name.starts_with('.') && name != "target" {
                left.push(path);
            } else if name.ends_with(".md") {
                found.push(path);
            }
        }
    }
    found
}

/// The texts between these marks, outside of blocks of code.
fn between(text: &str, open: &str, close: char) -> Vec<String> {
    let mut fenced = false;
    let prose = text.lines().filter(|line| {
        fenced ^= line.starts_with("```");
        !fenced && !line.starts_with("    ")
    });
    let spans = |line: &str| -> Vec<String> {
        let parts = line.split(open).skip(1);
        parts.filter_map(|part| Some(part.split_once(close)?.0.to_owned())).collect()
    };
    prose.flat_map(spans).collect()
}

/// The name that a heading gets as the target of links.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || [' ', '-', '_'].contains(letter));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let mut wrong = Vec::new();
    let mut links = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for link in between(&text, "](", ')').into_iter().filter(|link| !link.contains("://")) {
            links += 1;
            let (file, part) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            let leads = target.exists()
                && (part.is_empty() || {
                    let text = fs::read_to_string(&target).unwrap();
                    text.lines().any(|line| line.starts_with('#') && anchor(line) == part)
                });
            if !leads {
                wrong.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(links > 50, "{links}");
}

#[test]
fn files_that_pages_name_are_there() {
    let folders: BTreeSet<String> = fs::read_dir(root())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into())
        .collect();
    let mut wrong = Vec::new();
    let mut named = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        if page.ends_with("docs/plugins/first-backend.md") {
            continue;
        }
        for path in text.split('`').skip(1).step_by(2).filter(|path| path.ends_with(".rs")) {
            // Files are named from the repository's root. A bare name like `pool.rs` stands beside such a name and is not
            // checked. The guide to plugins names files of the reader's own crate.
            let first = path.split('/').next().unwrap_or_default();
            if path.contains('/') && folders.contains(first) && !path.contains(['*', '{', '<', ' ']) {
                named += 1;
                if !root().join(path).exists() {
                    wrong.push(format!("{}: {path}", page.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(named > 10, "{named}");
}

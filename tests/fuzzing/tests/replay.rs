//! The part of fuzzing that CI runs, with any compiler: the kept inputs, and thousands made from them.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use host_fuzzing::seeds::{self, Damage};
use host_fuzzing::{TARGETS, Target};

/// Number of inputs that are made from the kept ones of each target.
const MADE: usize = 2000;
const SEED: u64 = 20;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// The kept inputs of a target, by file name.
fn kept(target: Target) -> Vec<(String, Vec<u8>)> {
    let folder = fuzz().join("corpus").join(target.name);
    let mut files: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| (file.display().to_string(), fs::read(file).unwrap())).collect()
}

#[test]
fn the_kept_inputs_begin_with_what_the_products_writers_make() {
    for target in TARGETS {
        let folder = fuzz().join("corpus").join(target.name);
        for (number, bytes) in seeds::of(target.name).iter().enumerate() {
            assert!((target.run)(bytes), "{} refuses its seed {number}", target.name);
            let file = folder.join(format!("seed-{number}"));
            if std::env::var_os("WRITE_CORPUS").is_some() {
                fs::create_dir_all(&folder).unwrap();
                fs::write(&file, bytes).unwrap();
            }
            let is_kept = fs::read(&file).is_ok_and(|kept| kept == *bytes);
            assert!(
                is_kept,
                "{} is not what is written today: WRITE_CORPUS=1 cargo test -p host-fuzzing",
                file.display()
            );
        }
    }
}

#[test]
fn the_kept_inputs_are_read_or_refused() {
    for target in TARGETS {
        let kept = kept(*target);
        assert!(!kept.is_empty());
        for (name, bytes) in kept {
            println!("{name}");
            let _accepted = (target.run)(&bytes);
        }
    }
}

#[test]
fn inputs_made_from_the_kept_ones_are_read_or_refused() {
    println!("seed {SEED}");
    let mut damage = Damage::seeded(SEED);
    for target in TARGETS {
        let kept = kept(*target);
        let made = (0..MADE).filter(|number| {
            let (name, base) = &kept[damage.below(kept.len())];
            println!("{number}: {name}");
            (target.run)(&damage.damaged(base))
        });
        let accepted = made.count();
        println!("{}: {accepted} of {MADE} were accepted", target.name);
    }
}

#[test]
fn each_target_is_a_binary_of_the_crate_that_gives_it_to_the_fuzzer() {
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
    let names = manifest.lines().filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    let binaries: BTreeSet<&str> = names.filter(|name| *name != "host-fuzz").collect();
    let targets: BTreeSet<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(binaries, targets);
    let folders = fs::read_dir(fuzz().join("corpus")).unwrap();
    let folders: BTreeSet<String> =
        folders.map(|folder| folder.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(folders.iter().map(String::as_str).collect::<BTreeSet<_>>(), targets);
}

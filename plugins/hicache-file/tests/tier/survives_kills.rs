//! Other processes that are killed while they store, that store the same pages, or that read what others delete.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use host_plugin_api::StorageTier;
use host_plugin_api::tier::{FOUND, STORED};

use super::world::{self, World, seeded, wait_until};

const LENGTH: usize = 20_000;
/// More than any test stores.
const CONFIG: &str = "segment_mib = 1\nsize_limit_mib = 256\nfsync = 'never'";

/// This program again, as another process that runs the test `child`.
fn started(dir: &Path, what: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["survives_kills::child", "--exact", "--nocapture"])
        .env("TIER_CHILD", what)
        .env("TIER_DIR", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Not a test of its own: the part that the other processes run.
#[test]
fn child() {
    let Ok(what) = std::env::var("TIER_CHILD") else { return };
    let dir = std::env::var("TIER_DIR").unwrap();
    let (what, first) = what.split_once(' ').unwrap();
    let first: u64 = first.parse().unwrap();
    let mut world = World::new(Path::new(&dir), 1 << 20, CONFIG);
    let mut out = std::io::stdout();
    match what {
        // Stores eight at a time until it is killed, and says after each batch how far it came. It stops before
        // anything has to be evicted.
        "store" => {
            for batch in 0..20 {
                let numbers: Vec<u64> = (0..8).map(|n| first + batch * 8 + n).collect();
                let ended = world.put(&numbers, LENGTH, 0);
                assert!(ended.iter().all(|status| *status == STORED), "{ended:?}");
                writeln!(out, "stored {}", first + batch * 8 + 8).unwrap();
            }
            std::io::stdin().lock().read_line(&mut String::new()).unwrap();
        }
        // Stores a thousand, and then reads them until it is told to end.
        "same" => {
            for batch in 0..25 {
                let numbers: Vec<u64> = (0..40).map(|n| first + batch * 40 + n).collect();
                let ended = world.put(&numbers, LENGTH, 0);
                assert!(ended.iter().all(|status| *status == STORED), "{ended:?}");
            }
            writeln!(out, "stored 1000").unwrap();
            let (mut line, mut input) = (String::new(), std::io::stdin().lock());
            input.read_line(&mut line).unwrap();
            world.close();
            writeln!(out, "closed 1").unwrap();
        }
        // Reads a hundred over and over. Panics when bytes are wrong.
        "read" => loop {
            let numbers: Vec<u64> = (0..40).map(|n| first + n).collect();
            let found = world.found(&numbers, LENGTH);
            writeln!(out, "found {found}").unwrap();
        },
        _ => panic!("{what}"),
    }
}

/// The number after this word, in the first line that has it.
fn said(reader: &mut impl BufRead, word: &str) -> u64 {
    for line in reader.by_ref().lines() {
        let line = line.unwrap();
        // The harness writes into the same stream.
        if let Some((_, number)) = line.rsplit_once(&format!("{word} ")) {
            return number.trim().parse().unwrap();
        }
    }
    panic!("the child ended without saying {word}");
}

#[test]
fn a_process_killed_while_it_stores_loses_nothing_it_was_told_is_stored_and_nothing_is_wrong() {
    let mut random = seeded();
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged = Vec::new();
    for round in 0..12 {
        let first = round * 1_000_000;
        let mut storing = started(dir.path(), &format!("store {first}"));
        let mut reader = BufReader::new(storing.stdout.take().unwrap());
        let mut last = first;
        for _ in 0..=random.u64(..6) {
            last = said(&mut reader, "stored");
        }
        // Kills the process at some moment of what it stores next.
        std::thread::sleep(std::time::Duration::from_micros(random.u64(..3000)));
        storing.kill().unwrap();
        storing.wait().unwrap();
        acknowledged.extend(first..last);
        let mut world = World::new(dir.path(), 4 << 20, CONFIG);
        for numbers in acknowledged.chunks(100) {
            assert_eq!(world.found(numbers, LENGTH), numbers.len(), "round {round}");
        }
        // `found` panics when another page that is there has wrong bytes.
        let more: Vec<u64> = (last..last + 200).collect();
        world.found(&more, LENGTH);
        wait_until("what the dead process left open is sealed", || {
            let open = world::files(dir.path(), ".dat").into_iter().filter(|file| {
                file.metadata()
                    .is_ok_and(|data| data.len() == 1 << 20 && !is_sealed(&file.with_extension("idx")))
            });
            open.count() == 0
        });
        world.close();
    }
}

fn is_sealed(index: &Path) -> bool {
    let bytes = std::fs::read(index).unwrap_or_default();
    bytes.len() > 64 && bytes[bytes.len() - 16] == 2
}

#[test]
fn two_processes_that_store_the_same_pages_both_have_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut children = [started(dir.path(), "same 0"), started(dir.path(), "same 0")];
    let mut readers: Vec<_> =
        children.iter_mut().map(|child| BufReader::new(child.stdout.take().unwrap())).collect();
    for reader in &mut readers {
        assert_eq!(said(reader, "stored"), 1000);
    }
    // A third process sees the pages while both still write their segments.
    let mut world = World::new(dir.path(), 4 << 20, CONFIG);
    let numbers: Vec<u64> = (0..1000).collect();
    for chunk in numbers.chunks(100) {
        assert_eq!(world.found(chunk, LENGTH), chunk.len());
    }
    assert_eq!(world.tier.usage().unwrap().values, 1000);
    for (child, reader) in children.iter_mut().zip(&mut readers) {
        drop(child.stdin.take());
        said(reader, "closed");
        assert!(child.wait().unwrap().success());
    }
    // A delete takes both copies: those in sealed segments at once, the others when this process learns that their
    // segment is sealed.
    let last: Vec<u64> = vec![5, 500, 999];
    assert_eq!(world.delete(&last), [FOUND; 3]);
    assert_eq!(world.found(&last, LENGTH), 0);
    wait_until("no process finds them any more", || {
        World::new(dir.path(), 1 << 20, &format!("{CONFIG}\nread_only = true")).found(&last, LENGTH) == 0
    });
    assert_eq!((world.found(&last, LENGTH), world.tier.usage().unwrap().values), (0, 997));
}

#[test]
fn what_was_deleted_of_a_living_process_stays_deleted_when_it_dies() {
    let dir = tempfile::tempdir().unwrap();
    let mut storing = started(dir.path(), "same 0");
    let mut reader = BufReader::new(storing.stdout.take().unwrap());
    said(&mut reader, "stored");
    let mut world = World::new(dir.path(), 4 << 20, CONFIG);
    let last: Vec<u64> = (990..1000).collect();
    assert_eq!(world.found(&last, LENGTH), 10);
    let unsealed = || world::files(dir.path(), ".idx").iter().filter(|index| !is_sealed(index)).count();
    assert!(unsealed() > 0, "the last are in a segment that is being written");
    assert_eq!(world.delete(&last[2..]), [FOUND; 8]);
    storing.kill().unwrap();
    storing.wait().unwrap();
    wait_until("what the dead process left open is sealed", || unsealed() == 0);
    // Sealing reads the segment again, so its last records become known.
    wait_until("its last record is known", || world.tier.usage().unwrap().values == 992);
    assert_eq!(world.found(&last, LENGTH), 2);
    world.close();
    let mut world = World::new(dir.path(), 4 << 20, CONFIG);
    assert_eq!((world.found(&last, LENGTH), world.tier.usage().unwrap().values), (2, 992));
}

#[test]
fn what_another_process_reads_may_be_deleted_and_evicted_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let config = "segment_mib = 1\nsize_limit_mib = 6\nfsync = 'never'";
    let mut world = World::new(dir.path(), 4 << 20, config);
    let numbers: Vec<u64> = (0..40).collect();
    world.put_all(&numbers, LENGTH);
    let mut reading = started(dir.path(), "read 0");
    let mut reader = BufReader::new(reading.stdout.take().unwrap());
    while said(&mut reader, "found") < 40 {}
    // Evicts segments that are being read.
    for batch in 1..20 {
        let others: Vec<u64> = (batch * 1000..batch * 1000 + 50).collect();
        world.put_all(&others, LENGTH);
        world.delete(&others[..10]);
        said(&mut reader, "found");
    }
    // The reader's segment stays because of its hits, or it is evicted. Either way no byte was wrong, or the child had ended.
    for _ in 0..20 {
        said(&mut reader, "found");
    }
    reading.kill().unwrap();
    reading.wait().unwrap();
}

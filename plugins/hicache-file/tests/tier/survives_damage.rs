//! Files that are damaged, cut or torn give misses and errors, never wrong bytes.

use std::os::unix::fs::FileExt;
use std::path::Path;

use host_plugin_api::ErrorCode;
use host_plugin_api::tier::{FOUND, MISSING};

use super::world::{World, can, files, seeded, wait_until};

const ONE: &str = "segment_mib = 32\nsize_limit_mib = 128\nthreads = 1\nfsync = 'never'";

fn flip(file: &Path, at: u64, bit: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    byte[0] ^= 1 << bit;
    file.write_all_at(&byte, at).unwrap();
}

#[test]
fn a_flipped_bit_in_any_byte_of_a_value_is_an_error_once_and_then_a_miss() {
    let mut random = seeded();
    for way in ["io = 'uring'", "io = 'threads'"] {
        for length in [4096, 1000] {
            let dir = tempfile::tempdir().unwrap();
            let config = format!("{ONE}\n{way}");
            if !can(dir.path(), &config) {
                continue;
            }
            let mut world = World::new(dir.path(), length * length, &config);
            // As many pages as a page has bytes. In each page another byte is wrong.
            let numbers: Vec<u64> = (0..length as u64).collect();
            world.put_all(&numbers, length);
            world.close();
            let data = files(dir.path(), ".dat");
            assert_eq!(data.len(), 1);
            for number in &numbers {
                flip(&data[0], number * 4096 + number, random.u64(..8));
            }
            let mut world = World::new(dir.path(), length * length, &config);
            let ended = world.get(&numbers, length, 0);
            assert!(ended.iter().all(|status| *status == ErrorCode::IO.0), "{way} {length}");
            assert!(world.get(&numbers, length, 0).iter().all(|status| *status == MISSING));
            // The pages can be put again, and the damaged ones do not come back.
            world.put_all(&numbers[..10], length);
            world.close();
            let mut world = World::new(dir.path(), length * length, &config);
            assert_eq!(world.found(&numbers, length), 10);
        }
    }
}

#[test]
fn a_flipped_bit_in_any_byte_of_an_index_loses_one_record_at_most_or_the_segment() {
    let mut random = seeded();
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(dir.path(), 1 << 20, ONE);
    let numbers: Vec<u64> = (0..4).collect();
    world.put_all(&numbers, 4096);
    world.close();
    let (index, data) = (&files(dir.path(), ".idx")[0], &files(dir.path(), ".dat")[0]);
    let good = (std::fs::read(index).unwrap(), std::fs::read(data).unwrap());
    assert_eq!(good.0.len(), 64 * 6);
    for at in 0..good.0.len() as u64 {
        std::fs::write(index, &good.0).unwrap();
        std::fs::write(data, &good.1).unwrap();
        flip(index, at, random.u64(..8));
        let mut world = World::new(dir.path(), 1 << 20, ONE);
        // Panics if a byte is wrong.
        let found = world.found(&numbers, 4096);
        let expected = match at / 64 {
            0 => 0,
            5 => 4,
            _ => 3,
        };
        assert_eq!(found, expected, "byte {at}");
    }
}

#[test]
fn a_file_cut_anywhere_keeps_what_lies_before_the_cut() {
    let mut random = seeded();
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(dir.path(), 1 << 20, ONE);
    let numbers: Vec<u64> = (0..64).collect();
    world.put_all(&numbers, 10_000);
    world.close();
    let (index, data) = (files(dir.path(), ".idx").remove(0), files(dir.path(), ".dat").remove(0));
    let good = (std::fs::read(&index).unwrap(), std::fs::read(&data).unwrap());
    let half = good.1.len() / 2;
    for round in 0..40 {
        let cut_data = if round == 0 { half } else { random.usize(..good.1.len()) };
        let cut_index = if round == 1 { good.0.len() / 2 } else { random.usize(..good.0.len()) };
        let (bytes, records) = match round % 3 {
            0 => (cut_data, good.0.len()),
            1 => (good.1.len(), cut_index),
            _ => (cut_data, cut_index),
        };
        for file in files(dir.path(), "") {
            std::fs::remove_file(file).unwrap();
        }
        std::fs::write(&index, &good.0[..records]).unwrap();
        std::fs::write(&data, &good.1[..bytes]).unwrap();
        let whole = (bytes / (3 * 4096)).min((records / 64).saturating_sub(1)).min(64);
        let mut world = World::new(dir.path(), 1 << 20, ONE);
        assert_eq!(world.found(&numbers, 10_000), whole, "{bytes} bytes, {records} of the index");
        // The directory then works like any other.
        world.put_all(&numbers, 10_000);
        assert_eq!(world.found(&numbers, 10_000), 64);
    }
}

#[test]
fn a_file_that_is_cut_under_a_running_tier_gives_errors_and_then_misses() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(dir.path(), 2 << 20, ONE);
    let numbers: Vec<u64> = (0..64).collect();
    world.put_all(&numbers, 16_384);
    let data = std::fs::OpenOptions::new().write(true).open(&files(dir.path(), ".dat")[0]).unwrap();
    data.set_len(32 * 16_384 + 100).unwrap();
    let ended = world.get(&numbers, 16_384, 0);
    let good = ended.iter().filter(|status| **status == FOUND).count();
    let errors = ended.iter().filter(|status| **status == ErrorCode::IO.0).count();
    assert_eq!((good, errors), (32, 32), "{ended:?}");
    assert_eq!(world.get(&numbers, 16_384, 0).iter().filter(|status| **status == MISSING).count(), 32);
}

#[test]
fn pages_that_cannot_be_read_are_written_again_by_the_next_put() {
    for way in ["io = 'uring'", "io = 'threads'"] {
        let dir = tempfile::tempdir().unwrap();
        let config = format!("{ONE}\n{way}");
        if !can(dir.path(), &config) {
            continue;
        }
        let mut world = World::new(dir.path(), 1 << 20, &config);
        let numbers: Vec<u64> = (0..16).collect();
        world.put_all(&numbers, 16_384);
        world.close();
        // A folder in the place of a file: it is opened, and no byte of it can be read.
        let data = files(dir.path(), ".dat").remove(0);
        let mut world = World::new(dir.path(), 1 << 20, &config);
        assert_eq!(world.exists(&numbers), [FOUND; 16]);
        std::fs::remove_file(&data).unwrap();
        std::fs::create_dir(&data).unwrap();
        for _ in 0..2 {
            assert_eq!(world.get(&numbers, 16_384, 0), [ErrorCode::IO.0; 16], "{way}");
        }
        world.put_all(&numbers, 16_384);
        assert_eq!(world.found(&numbers, 16_384), 16, "{way}");
        // These are good, and not written again.
        world.put_all(&numbers, 16_384);
        world.close();
        let written = files(dir.path(), ".dat");
        let written = written.iter().map(|file| file.metadata().unwrap()).filter(|file| file.is_file());
        let bytes: u64 = written.map(|file| file.len()).sum();
        assert_eq!(bytes, 16 * 16_384, "{way}");
    }
}

#[test]
fn names_that_are_not_segments_and_links_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    let mut world = World::new(&ours, 1 << 20, ONE);
    world.put_all(&[1, 2], 4096);
    world.close();
    let mut world = World::new(&theirs, 1 << 20, ONE);
    world.put_all(&[3, 4], 4096);
    world.close();
    // Another process's segment, without its seal, so that a tier that takes it for an orphan would write to it.
    let (index, data) = (files(&theirs, ".idx").remove(0), files(&theirs, ".dat").remove(0));
    let bytes = std::fs::read(&index).unwrap();
    std::fs::write(&index, &bytes[..bytes.len() - 64]).unwrap();
    let long = std::fs::OpenOptions::new().write(true).open(&data).unwrap();
    long.set_len(1 << 20).unwrap();
    let inside = ours.join("tier-v1");
    let link = |file: &Path| inside.join(file.file_name().unwrap());
    std::os::unix::fs::symlink(&index, link(&index)).unwrap();
    std::os::unix::fs::symlink(&data, link(&data)).unwrap();
    std::fs::write(inside.join("README"), "not a segment").unwrap();
    let mut world = World::new(&ours, 1 << 20, ONE);
    assert_eq!(world.found(&[1, 2, 3, 4], 4096), 2);
    world.put_all(&[5], 4096);
    world.close();
    assert_eq!(std::fs::read(&index).unwrap(), &bytes[..bytes.len() - 64]);
    assert_eq!(data.metadata().unwrap().len(), 1 << 20);
    // The tier does not write through a second name of the same file, either.
    std::fs::remove_file(link(&index)).unwrap();
    std::fs::remove_file(link(&data)).unwrap();
    std::fs::hard_link(&index, link(&index)).unwrap();
    std::fs::hard_link(&data, link(&data)).unwrap();
    let mut world = World::new(&ours, 1 << 20, ONE);
    assert_eq!(world.found(&[1, 2, 3, 4], 4096), 2);
    world.close();
    assert_eq!(std::fs::read(&index).unwrap(), &bytes[..bytes.len() - 64]);
    assert!(inside.join("README").is_file());
}

#[test]
fn data_without_an_index_and_an_index_without_a_header_are_cleared_away() {
    let dir = tempfile::tempdir().unwrap();
    World::new(dir.path(), 4096, ONE).close();
    let inside = dir.path().join("tier-v1");
    let file = |n: u64, ending: &str| inside.join(format!("{n:016x}-{n:016x}.{ending}"));
    for (lonely, length) in [(file(1, "dat"), 8192), (file(2, "idx"), 0), (file(3, "idx"), 63)] {
        std::fs::write(lonely, vec![1; length]).unwrap();
    }
    std::fs::write(file(3, "dat"), [1; 8192]).unwrap();
    let world = World::new(dir.path(), 4096, ONE);
    wait_until("the rubbish is gone", || {
        files(dir.path(), ".dat").len() + files(dir.path(), ".idx").len() == 0
    });
    world.close();
}

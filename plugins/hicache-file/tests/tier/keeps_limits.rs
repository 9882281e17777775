//! Size limit, free-space floor, full and read-only file systems, directories that vanish.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use host_plugin_api::ErrorCode;
use host_plugin_api::tier::{FOUND, STORED};

use super::world::{World, files, open, wait_until};

const LENGTH: usize = 65_536;

/// Bytes that the segments take in the directory.
fn taken(dir: &Path) -> u64 {
    let all = [files(dir, ".dat"), files(dir, ".idx")].concat();
    all.iter().filter_map(|file| file.metadata().ok()).map(|data| data.len()).sum()
}

/// Sets a file's modification time to `seconds` seconds ago.
fn age(file: &Path, seconds: u64) {
    let time = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
    std::fs::File::options().write(true).open(file).unwrap().set_modified(time).unwrap();
}

#[test]
fn the_size_limit_holds_at_every_moment_and_what_was_used_longest_ago_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    let config = "segment_mib = 1\nsize_limit_mib = 8\nfsync = 'never'";
    let mut world = World::new(dir.path(), 1 << 20, config);
    let first: Vec<u64> = (0..15).collect();
    world.put_all(&first, LENGTH);
    for batch in 1..40 {
        let numbers: Vec<u64> = (batch * 100..batch * 100 + 15).collect();
        world.put_all(&numbers, LENGTH);
        assert!(taken(dir.path()) <= 8 << 20, "{} bytes are taken", taken(dir.path()));
        // The first pages are used again and again, so they stay.
        assert_eq!(world.found(&first, LENGTH), 15, "after {batch} batches");
    }
    let kept = (1..40).filter(|batch| world.exists(&[batch * 100]) == [FOUND]).count();
    assert!((3..=8).contains(&kept), "{kept} batches of the others are left");
    assert_eq!(world.exists(&[3900]), [FOUND], "the last is there");
    world.close();
}

#[test]
fn the_order_of_eviction_survives_a_restart_and_a_smaller_limit_is_kept_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let config = |limit: u32| format!("segment_mib = 1\nsize_limit_mib = {limit}\nfsync = 'never'");
    let batch = |n: u64| (n * 100..n * 100 + 15).collect::<Vec<u64>>();
    for n in 0..6 {
        let mut world = World::new(dir.path(), 1 << 20, &config(64));
        world.put_all(&batch(n), LENGTH);
        world.close();
    }
    let data = files(dir.path(), ".dat");
    assert_eq!(data.len(), 6);
    for (n, file) in data.iter().enumerate() {
        // The middle ones are the oldest.
        age(file, [100, 200, 600, 500, 300, 400][n]);
    }
    let mut world = World::new(dir.path(), 1 << 20, &config(4));
    wait_until("the limit is kept", || taken(dir.path()) <= 4 << 20);
    let left: Vec<u64> = (0..6).filter(|n| world.found(&batch(*n), LENGTH) == 15).collect();
    assert_eq!(left, [0, 1, 4, 5].map(|n| n as u64).to_vec());
    // A read renews a segment's time: batch 0 becomes the oldest here, and a read makes it younger than batch 1.
    world.close();
    for (n, file) in files(dir.path(), ".dat").iter().enumerate() {
        age(file, 1000 - n as u64);
    }
    let mut world = World::new(dir.path(), 1 << 20, &config(4));
    assert_eq!(world.found(&batch(0), LENGTH), 15);
    world.close();
    let mut world = World::new(dir.path(), 1 << 20, &config(4));
    world.put_all(&batch(7), LENGTH);
    let left: Vec<u64> =
        [0, 1, 4, 5, 7].into_iter().filter(|n| world.found(&batch(*n), LENGTH) == 15).collect();
    assert!(left.contains(&0) && !left.contains(&1) && left.contains(&7), "{left:?}");
}

#[test]
fn instances_that_share_a_directory_keep_the_limit_together_and_learn_of_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let config = "segment_mib = 1\nsize_limit_mib = 8\nfsync = 'never'";
    let mut worlds: Vec<World> = (0..3).map(|_| World::new(dir.path(), 1 << 20, config)).collect();
    for round in 0..10 {
        for at in 0..3 {
            let first = round * 1000 + at as u64 * 100;
            let numbers: Vec<u64> = (first..first + 12).collect();
            // With everything open at once there may be nothing to evict for a moment.
            wait_until("puts go through", || {
                worlds[at].put(&numbers, LENGTH, 0).iter().all(|status| *status == STORED)
            });
            assert!(taken(dir.path()) <= 8 << 20, "{} bytes are taken", taken(dir.path()));
            wait_until("another sees them", || worlds[(at + 1) % 3].exists(&numbers).contains(&FOUND));
        }
    }
    worlds.into_iter().for_each(World::close);
    assert!(taken(dir.path()) <= 8 << 20);
}

#[test]
fn under_the_floor_of_free_space_puts_are_refused_and_gets_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let plain = "segment_mib = 1\nsize_limit_mib = 8\nfsync = 'never'";
    let mut world = World::new(dir.path(), 1 << 20, plain);
    world.put_all(&[1, 2], LENGTH);
    world.close();
    let config = format!("dir = {:?}\nfree_floor_mib = 1073741824\nrefresh_ms = 10\n{plain}", dir.path());
    let tier = host_plugin_hicache_file::open(&host_plugin_api::Opening { name: "floor".into(), config });
    let mut world = World::around(tier.unwrap(), 1 << 20);
    assert_eq!(world.put(&[3], LENGTH, 0), [ErrorCode::NO_RESOURCE.0]);
    world.close();
}

#[test]
fn a_directory_that_vanishes_refuses_puts_and_misses_and_does_not_come_back_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("store");
    let mut world = World::new(&inside, 1 << 20, "segment_mib = 1\nsize_limit_mib = 8");
    world.put_all(&[1, 2, 3], LENGTH);
    std::fs::remove_dir_all(&inside).unwrap();
    wait_until("puts are refused", || world.put(&[4, 5], LENGTH, 0).iter().all(|s| *s == ErrorCode::IO.0));
    wait_until("its pages are gone", || world.found(&[1, 2, 3], LENGTH) == 0);
    std::fs::create_dir(&inside).unwrap();
    assert_eq!(world.put(&[6], LENGTH, 0), [ErrorCode::IO.0]);
    world.close();
    assert_eq!(std::fs::read_dir(&inside).unwrap().count(), 0);
}

#[test]
fn directories_that_others_may_write_and_links_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real"), dir.path().join("link"));
    let config = "segment_mib = 1\nsize_limit_mib = 8";
    open(&real, config).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode(&real), mode(&real.join("tier-v1"))), (0o700, 0o700));
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let refused = |path: &Path| open(path, config).err().map(|e| e.message).unwrap_or_default();
    assert!(refused(&link).contains("symbolic link"), "{}", refused(&link));
    std::fs::set_permissions(&real, PermissionsExt::from_mode(0o777)).unwrap();
    assert!(refused(&real).contains("every user may write"), "{}", refused(&real));
    std::fs::set_permissions(&real, PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(real.join("tier-v1"), PermissionsExt::from_mode(0o750)).unwrap();
    assert!(refused(&real).contains("closed to others"), "{}", refused(&real));
    std::fs::remove_dir_all(real.join("tier-v1")).unwrap();
    std::os::unix::fs::symlink("/tmp", real.join("tier-v1")).unwrap();
    assert!(refused(&real).contains("cannot open"), "{}", refused(&real));
    assert!(refused(Path::new("/proc/no/such")).contains("cannot make the directory"));
    let group = dir.path().join("group");
    let mut world = World::new(&group, 1 << 20, &format!("{config}\npermissions = 'group'"));
    world.put_all(&[1], LENGTH);
    assert_eq!((mode(&group.join("tier-v1")), mode(&files(&group, ".dat")[0])), (0o770, 0o660));
    let mut world = World::new(&real.with_file_name("mine"), 1 << 20, config);
    world.put_all(&[1], LENGTH);
    assert_eq!(mode(&files(&real.with_file_name("mine"), ".idx")[0]), 0o600);
}

#[test]
fn where_anybody_may_make_names_the_pages_must_be_this_users_own() {
    let parent = tempfile::tempdir().unwrap();
    let (dir, config) = (parent.path().join("shared"), "segment_mib = 1\nsize_limit_mib = 8");
    std::fs::create_dir(&dir).unwrap();
    std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o1777)).unwrap();
    open(&dir, config).unwrap();
    let group = format!("{config}\npermissions = 'group'");
    open(&dir, &group).unwrap();
    if std::os::unix::fs::chown(dir.join("tier-v1"), Some(12345), None).is_err() {
        return println!("SKIPPED: only root can give a directory away");
    }
    for config in [config, &group] {
        let refused = open(&dir, config).err().map(|e| e.message).unwrap_or_default();
        assert!(refused.contains("belongs to user 12345"), "{refused}");
    }
    std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
    open(&dir, &group).unwrap();
}

#[test]
fn a_read_only_instance_serves_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = "segment_mib = 1\nsize_limit_mib = 8";
    let mut world = World::new(dir.path(), 1 << 20, config);
    world.put_all(&[1, 2], LENGTH);
    world.close();
    let before = (taken(dir.path()), files(dir.path(), "").len());
    let mut world = World::new(dir.path(), 1 << 20, &format!("{config}\nread_only = true"));
    assert_eq!(world.found(&[1, 2], LENGTH), 2);
    assert_eq!(world.put(&[3], LENGTH, 0), [ErrorCode::UNSUPPORTED.0]);
    assert_eq!(world.delete(&[1]), [ErrorCode::UNSUPPORTED.0]);
    assert_eq!(world.found(&[1, 2], LENGTH), 2);
    world.close();
    assert_eq!((taken(dir.path()), files(dir.path(), "").len()), before);
}

#[test]
fn a_segment_that_is_full_keeps_no_descriptor_and_what_was_written_is_read_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(dir.path(), 1 << 20, "segment_mib = 1\nsize_limit_mib = 64\nfsync = 'never'");
    let numbers: Vec<u64> = (0..300).collect();
    for numbers in numbers.chunks(15) {
        world.put_all(numbers, LENGTH);
    }
    let inside = dir.path().join("tier-v1");
    let open = || {
        let all =
            std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fd.unwrap().path().read_link().ok());
        all.filter(|file| file.starts_with(&inside) && file.extension().is_some_and(|e| e == "dat")).count()
    };
    assert!(files(dir.path(), ".dat").len() >= 19);
    wait_until("only what is being written is open", || open() <= 2);
    assert!(numbers.chunks(15).all(|numbers| world.found(numbers, LENGTH) == 15));
}

#[test]
fn a_segment_of_unknown_state_is_not_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let config = |limit: u32| format!("segment_mib = 1\nsize_limit_mib = {limit}\nfsync = 'never'");
    for n in 0..6 {
        let mut world = World::new(dir.path(), 1 << 20, &config(64));
        world.put_all(&(n * 100..n * 100 + 15).collect::<Vec<_>>(), LENGTH);
        world.close();
    }
    for (n, file) in files(dir.path(), ".dat").iter().enumerate() {
        age(file, 1000 - n as u64);
    }
    // A second name of an index: the tier does not open such an index.
    let oldest = files(dir.path(), ".idx").remove(0);
    std::fs::hard_link(&oldest, dir.path().join("another name")).unwrap();
    let world = World::new(dir.path(), 1 << 20, &config(4));
    wait_until("the limit is kept", || taken(dir.path()) <= 4 << 20);
    assert!(oldest.is_file() && files(dir.path(), ".idx").len() == 4, "{:?}", files(dir.path(), ".idx"));
    world.close();
}

/// Runs the test `inside` in a mount namespace of its own, after these commands.
fn in_namespace(dir: &Path, what: &str, commands: &str) {
    let script =
        format!("set -e; cd {:?}; {commands}; exec \"$0\" keeps_limits::inside --exact --nocapture", dir);
    let output = Command::new("unshare")
        .args(["-rm", "bash", "-c", &script])
        .arg(std::env::current_exe().unwrap())
        .env("TIER_INSIDE", what)
        .env("TIER_DIR", dir)
        .output();
    let Ok(output) = output else { return println!("SKIPPED {what}: there is no unshare") };
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if said.contains("INSIDE") {
        assert!(output.status.success() && said.contains("INSIDE DONE"), "{said}");
    } else {
        println!("SKIPPED {what}: no mounts here: {said}");
    }
}

#[test]
fn a_full_file_system_refuses_puts_by_name_evicts_what_it_can_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    in_namespace(dir.path(), "full", "mkdir m; mount -t tmpfs -o size=8m,mode=700 tmpfs m");
}

#[test]
fn no_more_is_evicted_than_is_needed_while_others_hold_what_is_gone() {
    for what in ["held", "held under the floor"] {
        let dir = tempfile::tempdir().unwrap();
        in_namespace(dir.path(), what, "mkdir m; mount -t tmpfs -o size=8m,mode=700 tmpfs m");
    }
}

#[test]
fn a_file_system_that_is_read_only_is_refused_with_the_reason_and_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(&dir.path().join("m"), 1 << 20, "segment_mib = 1\nsize_limit_mib = 8");
    world.put_all(&[1, 2], LENGTH);
    world.close();
    in_namespace(dir.path(), "read-only", "mount --bind m m; mount -o remount,bind,ro m");
}

/// Not a test of its own: the part that runs in a mount namespace.
#[test]
fn inside() {
    let Ok(what) = std::env::var("TIER_INSIDE") else { return };
    let dir = std::path::PathBuf::from(std::env::var("TIER_DIR").unwrap()).join("m");
    println!("INSIDE");
    let config = "segment_mib = 1\nsize_limit_mib = 64\nfsync = 'never'";
    match what.as_str() {
        "full" => {
            let mut world = World::new(&dir, 1 << 20, config);
            // Eight segments do not fit: the oldest go, though the limit is far away.
            for batch in 0..20 {
                let numbers: Vec<u64> = (batch * 100..batch * 100 + 16).collect();
                world.put_all(&numbers, LENGTH);
                assert_eq!(world.found(&numbers, LENGTH), 16);
            }
            assert_eq!(world.exists(&[0]), [0]);
            // Another process fills it.
            let blocks = std::process::Command::new("dd")
                .args(["if=/dev/zero", "bs=1M"])
                .arg(format!("of={}", dir.join("other").display()))
                .output();
            assert!(!blocks.unwrap().status.success(), "dd fills the file system");
            // The space of evicted segments is used at once: no other process has them open.
            for batch in 20..24 {
                let numbers: Vec<u64> = (batch * 100..batch * 100 + 16).collect();
                world.put_all(&numbers, LENGTH);
                assert_eq!(world.found(&numbers, LENGTH), 16);
            }
            let mut stored = 0;
            let (mut refused, mut number) = (0, 100_000);
            // First stored pages are evicted, then puts are refused. No put ends in another way.
            wait_until("puts are refused", || {
                number += 1;
                match world.put(&[number], LENGTH, 0)[0] {
                    STORED => stored += 1,
                    code => {
                        assert_eq!(code, ErrorCode::NO_RESOURCE.0);
                        refused += 1;
                    }
                }
                // Takes the space that eviction frees, so that less and less is free.
                let path = dir.join(format!("more-{number}"));
                let _full = std::fs::write(path, vec![1; 1 << 20]);
                refused > 3
            });
            for file in std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()) {
                if file.is_file() {
                    std::fs::remove_file(file).unwrap();
                }
            }
            wait_until("puts go through again", || world.put(&[7], LENGTH, 0) == [STORED]);
            assert_eq!(world.found(&[7], LENGTH), 1);
            world.close();
        }
        "held" | "held under the floor" => {
            let floor = if what == "held" { "" } else { "\nfree_floor_mib = 1" };
            let config = format!("dir = {dir:?}\nrefresh_ms = 10\n{config}{floor}");
            let config = if what == "held" { format!("{config}\nfree_floor_mib = 0") } else { config };
            let opening = host_plugin_api::Opening { name: "held".into(), config };
            let mut world = World::around(host_plugin_hicache_file::open(&opening).unwrap(), 1 << 20);
            let mut batch = 0;
            let mut put = |world: &mut World| {
                batch += 1;
                let numbers: Vec<u64> = (batch * 100..batch * 100 + 15).collect();
                world.put(&numbers, LENGTH, 0).into_iter().find(|status| *status != STORED)
            };
            while files(&dir, ".dat").len() < 5 {
                assert_eq!(put(&mut world), None);
            }
            // A reader that keeps the files open for a while.
            let hold = |file: &std::path::PathBuf| std::fs::File::open(file).ok();
            let held: Vec<_> = files(&dir, ".dat").iter().filter_map(hold).collect();
            let before = files(&dir, ".dat").len();
            wait_until("puts are refused", || put(&mut world) == Some(ErrorCode::NO_RESOURCE.0));
            let after = files(&dir, ".dat").len();
            assert!(after + 2 >= before && after > 3, "{after} of {before} segments are left");
            drop(held);
            wait_until("puts go through again", || put(&mut world).is_none());
            world.close();
        }
        _ => {
            let error = open(&dir, config).err().unwrap();
            assert!(error.message.contains("Read-only file system"), "{error}");
            let mut world = World::new(&dir, 1 << 20, &format!("{config}\nread_only = true"));
            assert_eq!(world.found(&[1, 2], LENGTH), 2);
            world.close();
        }
    }
    println!("INSIDE DONE");
}

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};

use super::*;

/// A weight file, and a folder that keeps digests of files of any size and age.
struct World {
    folder: tempfile::TempDir,
    known: Known,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("weights"), [7; 4096]).unwrap();
        let directory = Some(folder.path().join("a/cache/host/digests"));
        Self { folder, known: Known { directory, smallest: 1, settled: 0 } }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("weights")
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(self.path()).unwrap()
    }

    fn digest(&self) -> ContentDigest {
        self.known.digest(&self.path(), &self.file()).unwrap()
    }

    /// The digest of the file's content, independent of the entry.
    fn truth(&self) -> ContentDigest {
        content::digest(&self.file(), self.file().metadata().unwrap().len()).unwrap()
    }

    fn entries(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.known.directory.as_ref().unwrap());
        entries.into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
    }

    /// Notes a digest that the file does not have. If it is found later, the file was not read.
    fn note(&self, digest: &ContentDigest) {
        fs::write(&self.entries()[0], Stamp::of(&self.file()).unwrap().line(digest)).unwrap();
    }
}

#[test]
fn a_file_that_did_not_change_is_not_read_again() {
    let world = World::new();
    assert_eq!(world.digest(), world.truth());
    assert_eq!(world.entries().len(), 1);
    world.note(&[5; 32]);
    assert_eq!(world.digest(), [5; 32]);
}

#[test]
fn an_entry_that_other_users_may_write_is_not_believed() {
    let world = World::new();
    let folder = world.known.directory.clone().unwrap();
    for writable in 0..2 {
        let _noted = world.digest();
        world.note(&[5; 32]);
        assert_eq!(world.digest(), [5; 32]);
        let place = if writable == 0 { world.entries()[0].clone() } else { folder.clone() };
        fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(world.digest(), world.truth(), "{}", place.display());
    }
}

#[test]
fn a_file_that_changed_and_got_its_old_size_and_time_back_is_read_again() {
    let world = World::new();
    let before = world.digest();
    world.note(&before);
    let modified = world.file().metadata().unwrap().modified().unwrap();
    // The clock of the file system counts in ticks. The time of the status change differs as soon as a tick has passed.
    let changed = Stamp::of(&world.file()).unwrap().changed;
    while Stamp::of(&world.file()).unwrap().changed == changed {
        world.file().write_all_at(&[8], 100).unwrap();
        world.file().set_modified(modified).unwrap();
    }
    assert_eq!(world.file().metadata().unwrap().modified().unwrap(), modified);
    assert_eq!(world.digest(), world.truth());
    assert_ne!(world.digest(), before);
    assert_eq!(world.entries().len(), 1);
}

#[test]
fn another_file_in_its_place_is_read() {
    let world = World::new();
    let before = world.digest();
    let other = world.folder.path().join("other");
    fs::write(&other, [9; 4096]).unwrap();
    fs::rename(&other, world.path()).unwrap();
    assert_eq!(world.digest(), world.truth());
    assert_ne!(world.digest(), before);
}

#[test]
fn a_damaged_entry_is_ignored_and_replaced() {
    let world = World::new();
    let truth = world.digest();
    let entry = world.entries().remove(0);
    let whole = fs::read(&entry).unwrap();
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        for damaged in [&damaged, &whole[..at]] {
            fs::write(&entry, damaged).unwrap();
            assert_eq!(world.digest(), truth, "{:?}", String::from_utf8_lossy(damaged));
            assert_eq!(fs::read(&entry).unwrap(), whole);
        }
    }
    fs::write(&entry, [&whole[..], b"1"].concat()).unwrap();
    assert_eq!((world.digest(), fs::read(&entry).unwrap()), (truth, whole));
}

#[test]
fn a_directory_that_cannot_be_made_costs_the_reading_alone() {
    let mut world = World::new();
    for directory in [Some(world.path().join("below/a/file")), Some("/proc/none".into()), None] {
        world.known.directory = directory;
        assert_eq!(world.digest(), world.truth());
    }
}

#[test]
fn neither_a_small_file_nor_one_that_was_just_written_is_noted() {
    for (smallest, settled) in [(4097, 0), (4096, 1 << 40)] {
        let mut world = World::new();
        world.known = Known { smallest, settled, ..world.known };
        assert_eq!(world.digest(), world.truth());
        assert_eq!(world.entries(), [] as [PathBuf; 0]);
    }
}

#[test]
fn starts_at_the_same_time_leave_one_whole_entry() {
    let world = World::new();
    let truth = world.truth();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert_eq!(world.digest(), truth);
                    world.entries().into_iter().for_each(|entry| drop(fs::remove_file(entry)));
                }
            });
        }
    });
    assert_eq!(world.digest(), truth);
    let stamp = Stamp::of(&world.file()).unwrap();
    assert_eq!(fs::read_to_string(&world.entries()[0]).unwrap(), stamp.line(&truth));
    assert_eq!(world.entries().len(), 1);
}

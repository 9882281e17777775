//! Kernels are compiled once: the second start finds them in the cache. An entry that it cannot use is compiled again. The tests
//! use a stand-in for a GPU and NVRTC (`host_tests::cuda`) that counts compilations.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use host_kernels::cuda::{Device, SOURCE, Source, digest, exact};
use libloading::os::unix::{Library, RTLD_NOW};
use parking_lot::Mutex;

const COPIES: Source = Source { name: "page_copy.cu", text: SOURCE, options: &[] };

/// How often the stand-in compiles when these sources are loaded with a cache in this folder, each on a newly opened device.
fn compilations(folder: Option<&Path>, sources: &[Source]) -> u64 {
    // The lock lets one test at a time count.
    static DRIVER: LazyLock<Mutex<(Library, PathBuf)>> = LazyLock::new(|| {
        let path = host_tests::cuda::library();
        // SAFETY: our own library, without initialisers.
        Mutex::new((unsafe { Library::open(Some(&path), RTLD_NOW) }.unwrap(), path))
    });
    let driver = DRIVER.lock();
    // SAFETY: as in driver.c.
    let count = || unsafe { driver.0.get::<unsafe extern "C" fn() -> u64>(b"fake_compilations").unwrap()() };
    let before = count();
    for source in sources {
        Device::open_with_cache(0, Some(&driver.1), folder).unwrap().module(source).unwrap();
    }
    count() - before
}

/// The only file of a folder.
fn entry(folder: &Path) -> PathBuf {
    let entries: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries[0].clone()
}

#[test]
fn the_second_start_compiles_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("made").join("when needed");
    let all = [COPIES, exact::SOURCE, digest::SOURCE];
    assert_eq!(compilations(Some(&folder), &all), 3);
    assert_eq!(compilations(Some(&folder), &all), 0);
    let mode = std::fs::metadata(&folder).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700, "what is run as machine code is the user's alone");
    assert_eq!(compilations(None, &all), 3, "no cache");
}

#[test]
fn another_text_and_other_options_are_compiled_for_themselves() {
    let folder = tempfile::tempdir().unwrap();
    let text = digest::SOURCE.text.to_owned() + "\n// changed\n";
    let others = [
        digest::SOURCE,
        Source { options: &["--fmad=false"], ..digest::SOURCE },
        Source { options: &["--fmad=true"], ..digest::SOURCE },
        Source { text: text.leak(), ..digest::SOURCE },
    ];
    assert_eq!(compilations(Some(folder.path()), &others), 4);
    assert_eq!(compilations(Some(folder.path()), &others), 0);
}

#[test]
fn an_entry_that_another_user_may_write_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let allow = |path: &Path, mode: u32| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    assert_eq!(compilations(Some(folder.path()), &[COPIES]), 1);
    let entry = entry(folder.path());
    for (path, open, closed) in [(&*entry, 0o620, 0o600), (folder.path(), 0o703, 0o700)] {
        assert_eq!(compilations(Some(folder.path()), &[COPIES]), 0);
        allow(path, open);
        assert_eq!(compilations(Some(folder.path()), &[COPIES]), 1, "{}", path.display());
        allow(path, closed);
    }
    // In a folder of all users nothing is written, because a name there may be a link to another file.
    allow(folder.path(), 0o777);
    std::fs::remove_file(&entry).unwrap();
    assert_eq!(compilations(Some(folder.path()), &[COPIES]), 1);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    allow(folder.path(), 0o700);
    // A pipe without a writer has no end.
    rustix::fs::mknodat(rustix::fs::CWD, &entry, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    assert_eq!(compilations(Some(folder.path()), &[COPIES]), 1);
}

#[test]
fn a_damaged_entry_is_compiled_again_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(compilations(Some(folder.path()), &[COPIES]), 1);
    let whole = std::fs::read(entry(folder.path())).unwrap();
    for at in (0..whole.len()).step_by(7).chain([whole.len() - 1]) {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        for damaged in [damaged, whole[..at].to_vec()] {
            std::fs::write(entry(folder.path()), damaged).unwrap();
            assert_eq!(compilations(Some(folder.path()), &[COPIES]), 1, "byte {at} of {}", whole.len());
            assert_eq!(std::fs::read(entry(folder.path())).unwrap(), whole);
        }
    }
    assert_eq!(compilations(Some(folder.path()), &[COPIES]), 0);
}

#[test]
fn an_image_that_the_driver_refuses_is_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(compilations(Some(folder.path()), &[COPIES]), 1);
    let mut bytes = std::fs::read(entry(folder.path())).unwrap();
    // Another image with a correct checksum, which the driver refuses.
    let image = bytes.len() - 8 - b"compiled".len();
    bytes.truncate(image);
    bytes.extend(b"for another driver");
    bytes.extend(host_kernels::xxh3::xxh3(&bytes, 0).to_le_bytes());
    std::fs::write(entry(folder.path()), bytes).unwrap();
    assert_eq!(compilations(Some(folder.path()), &[COPIES]), 1);
    assert_eq!(compilations(Some(folder.path()), &[COPIES]), 0);
}

#[test]
fn a_folder_that_cannot_be_written_costs_the_compilation_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a file");
    std::fs::write(&file, "in the way").unwrap();
    assert_eq!(compilations(Some(&file.join("kernels")), &[COPIES]), 1);
    assert_eq!(compilations(Some(&file.join("kernels")), &[COPIES]), 1);
}

use std::os::unix::fs::MetadataExt;

use host_tests::plugin_files;
use host_tests::signing::Publisher;
use tempfile::TempDir;

use super::*;
use crate::Entry;

/// A locked plugin directory that demands signatures, and two builds of the plugin `memory` beside it.
struct Place {
    folder: TempDir,
    old: String,
    new: String,
}

/// Finds the plugin the way that hosts do, and fails unless it is usable.
fn found(directory: &Path, policy: &Policy) -> Entry {
    let catalog = Catalog::scan_with(policy.clone(), [directory]);
    catalog.find("memory").unwrap_or_else(|error| panic!("{error}")).clone()
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let bytes = std::fs::read(plugin_files::plugin("memory")).unwrap();
        std::fs::write(at("old.so"), &bytes).unwrap();
        // The bytes are appended behind the part that is loaded.
        std::fs::write(at("new.so"), [bytes, b"newer".to_vec()].concat()).unwrap();
        let acme = Publisher::new("acme");
        acme.sign(&at("old.so"));
        acme.sign(&at("new.so"));
        std::fs::write(at("keys"), acme.entry("")).unwrap();
        std::fs::create_dir(at("plugins")).unwrap();
        let sha256 = |name| crate::lock::sha256(&at(name)).unwrap();
        let (old, new) = (sha256("old.so"), sha256("new.so"));
        Self { folder, old, new }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn policy(&self) -> Policy {
        Policy { publishers: Some(self.at("keys")), ..Policy::default() }
    }

    fn open(&self) -> Directory {
        Directory::open(&self.at("plugins"), self.policy()).unwrap()
    }

    fn install(&self, name: &str) {
        self.open().install(&self.at(name), LOCKED).unwrap();
    }

    /// The sha256 of the plugin that hosts find.
    fn usable(&self) -> String {
        let entry = found(&self.at("plugins"), &self.policy());
        assert!(entry.pinned.is_some() && entry.signed.is_some(), "{entry:?}");
        entry.pinned.unwrap()
    }

    /// The names of all files in the directory.
    fn files(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.at("plugins")).unwrap();
        let mut files: Vec<String> =
            files.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        files.sort();
        files
    }
}

const LOCKED: Options = Options { force: false, lock: true };

const WITH_THE_ONE_BEFORE: [&str; 5] =
    ["memory.so", "memory.so.minisig", "memory.so.previous", "memory.so.previous.minisig", "plugins.lock"];

/// Ends a change behind each of its steps, as a loss of power would. Checks that hosts find a usable plugin, and repeats the
/// change.
fn ended_behind_each_step(
    before: impl Fn(&Place),
    steps: impl Fn(&Place, &Directory) -> Vec<Step>,
    again: impl Fn(&Place),
) -> usize {
    for done in 0.. {
        let place = Place::new();
        before(&place);
        let was = place.usable();
        let directory = place.open();
        let steps = steps(&place, &directory);
        run(&place.at("plugins"), &steps[..done]).unwrap();
        drop(directory);
        let usable = place.usable();
        assert!(usable == place.old || usable == place.new, "behind step {done} of {steps:?}");
        if usable == was {
            again(&place);
        }
        assert_ne!(place.usable(), was, "behind step {done}, done again");
        // Opening the directory removes temporary files. Other files must not be left over.
        drop(place.open());
        let (files, expected) = (place.files(), WITH_THE_ONE_BEFORE.map(str::to_owned));
        let beyond =
            files.iter().filter(|file| !expected.contains(file) && *file != "memory.so.minisig.next");
        assert_eq!(beyond.count(), 0, "behind step {done}: {files:?}");
        if done == steps.len() {
            assert_eq!(files, expected);
            return done;
        }
    }
    unreachable!("steps end")
}

#[test]
fn an_install_that_ends_behind_any_step_leaves_the_old_plugin_or_the_new_one() {
    let steps = ended_behind_each_step(
        |place| place.install("old.so"),
        |place, directory| directory.prepare_install(&place.at("new.so"), LOCKED).unwrap().0,
        |place| place.install("new.so"),
    );
    assert_eq!(steps, 7);
}

#[test]
fn a_rollback_that_ends_behind_any_step_leaves_the_old_plugin_or_the_new_one() {
    let steps = ended_behind_each_step(
        |place| {
            place.install("old.so");
            place.install("new.so");
        },
        |_, directory| directory.prepare_rollback("memory").unwrap().0,
        |place| drop(place.open().rollback("memory").unwrap()),
    );
    assert_eq!(steps, 8);
}

#[test]
fn going_back_twice_is_where_one_was_and_the_lock_follows() {
    let place = Place::new();
    place.install("old.so");
    assert!(matches!(place.open().rollback("memory"), Err(ChangeError::NoneBefore { .. })));
    place.install("new.so");
    // Installing the same file again does not make it the previous one.
    place.install("new.so");
    assert_eq!(place.files(), WITH_THE_ONE_BEFORE);
    for expected in [&place.old, &place.new] {
        let back = place.open().rollback("memory").unwrap();
        assert_eq!((&back.sha256, &place.usable()), (expected, expected));
        assert_eq!(place.files(), WITH_THE_ONE_BEFORE);
        let lock = Lock::of_directory(&place.at("plugins"), &Policy::default()).unwrap().unwrap();
        let listed: Vec<&str> = lock.plugins.iter().map(|locked| locked.file.as_str()).collect();
        assert_eq!(listed, ["memory.so", "memory.so.previous"]);
    }
}

#[test]
fn a_file_before_that_was_changed_is_not_put_back() {
    let place = Place::new();
    place.install("old.so");
    place.install("new.so");
    let previous = place.at("plugins/memory.so.previous");
    let signed = std::fs::read(&previous).unwrap();
    std::fs::remove_file(&previous).unwrap();
    std::fs::write(&previous, [signed, b"changed".to_vec()].concat()).unwrap();
    let error = place.open().rollback("memory").unwrap_err().to_string();
    assert!(error.contains("acme signed other bytes"), "{error}");
    // Without signatures the lock refuses it, because the lock has the sha256.
    let directory = Directory::open(&place.at("plugins"), Policy::default()).unwrap();
    let error = directory.rollback("memory").unwrap_err().to_string();
    assert!(error.contains("memory.so.previous has sha256"), "{error}");
    assert_eq!(place.usable(), place.new);
}

#[test]
fn a_new_lock_of_all_that_is_there_has_the_files_before_too() {
    let place = Place::new();
    place.install("old.so");
    place.install("new.so");
    std::fs::remove_file(place.at("plugins/plugins.lock")).unwrap();
    let (lock, unusable) = place.open().lock().unwrap();
    assert_eq!((lock.plugins.len(), unusable.len()), (2, 0));
    place.open().rollback("memory").unwrap();
    assert_eq!(place.usable(), place.old);
}

#[test]
fn what_was_not_listed_is_not_listed_for_being_replaced() {
    let place = Place::new();
    place.install("old.so");
    // Replaces the plugin by a file that the lock does not list.
    let target = place.at("plugins/memory.so");
    std::fs::remove_file(&target).unwrap();
    std::fs::write(&target, [std::fs::read(place.at("old.so")).unwrap(), b"not listed".to_vec()].concat())
        .unwrap();
    place.install("new.so");
    let directory = Directory::open(&place.at("plugins"), Policy::default()).unwrap();
    let error = directory.rollback("memory").unwrap_err().to_string();
    assert!(error.contains("memory.so.previous is not listed in"), "{error}");
}

#[test]
fn a_removed_plugin_leaves_nothing_and_the_lock_lists_the_others() {
    let place = Place::new();
    place.install("old.so");
    place.install("new.so");
    let directories = [place.at("plugins")];
    let file = find("memory", &directories).unwrap();
    let node = std::fs::metadata(&file).unwrap().ino();
    let loaded = File::open(&file).unwrap();
    place.open().remove(&file).unwrap();
    assert_eq!(place.files(), ["plugins.lock"]);
    assert!(
        Lock::of_directory(&place.at("plugins"), &Policy::default()).unwrap().unwrap().plugins.is_empty()
    );
    assert_eq!(loaded.metadata().unwrap().ino(), node, "a process that has it keeps it");
    assert!(find("memory", &directories).unwrap_err().to_string().contains("no plugin \"memory\" is in"));
}

#[test]
fn of_several_files_of_a_plugin_none_is_removed_by_its_name() {
    let folder = plugin_files::directory(&["memory"]);
    let at = |name: &str| folder.path().join(name);
    std::fs::copy(at("memory.so"), at("other.so")).unwrap();
    let directories = [folder.path().to_owned()];
    let error = find("memory", &directories).unwrap_err().to_string();
    assert!(error.contains("memory.so, ") && error.contains("other.so"), "{error}");
    // The path of a file names one of the two.
    let other = find(at("other.so").to_str().unwrap(), &directories).unwrap();
    Directory::open(folder.path(), Policy::default()).unwrap().remove(&other).unwrap();
    assert_eq!(find("memory", &directories).unwrap(), at("memory.so"));
    // A file that a side-car names is not removed.
    let target = host_plugin_api::note::BUILT_FOR;
    let names = format!("manifest_version = 1\n[[file]]\ntarget = \"{target}\"\npath = \"memory.so\"\n");
    std::fs::write(at("memory.plugin.toml"), names).unwrap();
    let directory = Directory::open(folder.path(), Policy::default()).unwrap();
    let error = directory.remove(&at("memory.so")).unwrap_err().to_string();
    assert!(error.contains("memory.so is named by") && at("memory.so").is_file(), "{error}");
    // Nor is any file while a side-car cannot be read.
    std::fs::write(at("memory.plugin.toml"), "manifest_version = 9").unwrap();
    let error = directory.remove(&at("memory.so")).unwrap_err().to_string();
    assert!(error.contains("memory.plugin.toml could name the file") && at("memory.so").is_file(), "{error}");
}

#[test]
fn a_first_lock_shuts_nothing_out() {
    let place = Place::new();
    std::fs::copy(plugin_files::plugin("null"), place.at("plugins/null.so")).unwrap();
    let error = place.open().install(&place.at("old.so"), LOCKED).unwrap_err().to_string();
    assert!(error.contains("would shut out null.so") && error.contains("host plugins lock"), "{error}");
    assert_eq!(place.files(), ["null.so"]);
}

#[test]
fn a_file_with_a_large_hole_is_refused_before_it_is_read() {
    let place = Place::new();
    let file = File::options().write(true).open(place.at("old.so")).unwrap();
    file.set_len(32 << 30).unwrap();
    let error = place.open().install(&place.at("old.so"), Options::default()).unwrap_err();
    let text = error.to_string();
    assert!(error.is_refusal() && text.contains("old.so cannot be read: it has 34359738368 bytes"), "{text}");
    assert!(text.contains("may have 1073741824"), "{text}");
    assert_eq!(place.files(), [""; 0]);
}

#[test]
fn what_a_change_left_that_was_ended_is_removed_and_nothing_else() {
    let place = Place::new();
    let left = [".memory.so.new.tmp", ".memory.so.previous.link.tmp", ".plugins.lock.12.tmp"];
    let kept = [".hidden.tmp", "memory.so.tmp", ".memory.so"];
    for name in left.iter().chain(&kept) {
        std::fs::write(place.at("plugins").join(name), "").unwrap();
    }
    drop(place.open());
    let mut kept = kept.map(str::to_owned);
    kept.sort();
    assert_eq!(place.files(), kept);
}

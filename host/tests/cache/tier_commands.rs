//! `host tier ..` on the real program, the real file tier, and real files.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::SystemTime;

use host_memory::SharedMemory;
use host_plugin_api::tier::STORED;
use host_plugin_api::*;
use host_plugins::{Catalog, open_tier};
use host_tests::plugin_files;
use host_tests::wait::until;
use host_worker::seal::{SEAL_BYTES, seal};
use serde_json::Value;

const PAGE: usize = 32 << 10;
/// Deadline of a shutdown that shall succeed.
const LONG_MS: u64 = 60_000;

/// Plugins, and a directory of pages.
struct Place {
    plugins: tempfile::TempDir,
    pages: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self {
            plugins: plugin_files::directory(&["hicache-file", "memory", "shm"]),
            pages: tempfile::tempdir().unwrap(),
        }
    }

    fn config(&self) -> String {
        format!("dir = {:?}\nsegment_mib = 1\nsize_limit_mib = 16\nfree_floor_mib = 0\n", self.pages.path())
    }

    /// Opens the tier as a worker does.
    fn open(&self) -> Arc<dyn StorageTier> {
        let catalog = Catalog::scan([self.plugins.path()]);
        let opening = Opening { name: "worker".into(), config: self.config() };
        open_tier(catalog.find("hicache-file").unwrap(), &opening).unwrap()
    }

    /// Runs the command. Returns the exit code, standard output and standard error.
    fn host(&self, command: &str, more: &[&str]) -> (i32, String, String) {
        let directory = format!("dir={}", self.pages.path().display());
        let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
        host.args(["tier", command, "--plugins-dir"]).arg(self.plugins.path());
        if !more.contains(&"--config") && !more.contains(&"--plugin") {
            host.args(["--plugin", "hicache-file", "--set", &directory]);
        }
        let output = host.args(more).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code().expect("an exit code"), text(&output.stdout), text(&output.stderr))
    }

    /// Prunes until the output is right. A child that another test forked may hold the lock of an ended worker until it calls exec.
    /// The values of that worker stay that long.
    fn prunes(&self, more: &[&str], is_so: impl Fn(&str) -> bool) {
        until("values to be removed", || {
            let (code, said, error) = self.host("prune", &[more, &["--yes"]].concat());
            if code == 0 && is_so(&said) { Ok(()) } else { Err(format!("{code}: {said}{error}")) }
        });
    }

    /// All files with their times and bytes.
    fn files(&self) -> Vec<(PathBuf, SystemTime, Vec<u8>)> {
        let entries = std::fs::read_dir(self.pages.path().join("tier-v1")).unwrap();
        let file = |path: PathBuf| {
            (path.clone(), path.metadata().unwrap().modified().unwrap(), std::fs::read(&path).unwrap())
        };
        let mut files: Vec<_> = entries.map(|entry| file(entry.unwrap().path())).collect();
        files.sort();
        files
    }

    fn file(&self, extension: &str) -> PathBuf {
        let mut files = self.files().into_iter().map(|(path, ..)| path);
        files.find(|path| path.extension().is_some_and(|e| e == extension)).unwrap()
    }
}

fn key(number: u8) -> Key {
    Key([number; 32])
}

/// The value of this key as a worker stores it. Its length is odd for some numbers.
fn value(number: u8) -> Vec<u8> {
    let kv = 0..PAGE - usize::from(number) - SEAL_BYTES;
    sealed(number, kv.map(|at| (at as u8).wrapping_mul(31).wrapping_add(number)).collect())
}

/// Appends the host's seal for this key.
fn sealed(number: u8, mut kv: Vec<u8>) -> Vec<u8> {
    kv.extend(seal(&key(number), &kv));
    kv
}

fn put(tier: &dyn StorageTier, numbers: &[u8]) {
    let memory = SharedMemory::new("put", PAGE * numbers.len()).unwrap();
    let region = tier
        .register(&Memory {
            address: Address::of(memory.address().as_ptr()),
            length: memory.bytes() as u64,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 1,
            fd_offset: 0,
        })
        .unwrap();
    let page = |(at, number): (usize, &u8)| {
        // SAFETY: the tier reads this memory only after the put, which comes later.
        unsafe { memory.write(at * PAGE, &value(*number)) };
        let length = value(*number).len() as u32;
        TierPage { key: key(*number), region, length, offset: (at * PAGE) as u64 }
    };
    let pages: Vec<TierPage> = numbers.iter().enumerate().map(page).collect();
    assert_eq!(tier.put(Tag(1), &pages), 0);
    let (mut done, mut left) = (vec![TierCompletion::default(); 16], pages.len());
    while left > 0 {
        let count = tier.poll(&mut done) as usize;
        assert!(done[..count].iter().all(|done| done.status == STORED), "{done:?}");
        left -= count;
        std::thread::yield_now();
    }
    tier.deregister(region).unwrap();
}

/// A directory with the values 1 to 20, whose worker has shut down.
fn filled() -> Place {
    let place = Place::new();
    let tier = place.open();
    put(&*tier, &(1..=20).collect::<Vec<u8>>());
    tier.shutdown(LONG_MS).unwrap();
    place
}

fn flip(file: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

fn hex(number: u8) -> String {
    format!("{number:02x}").repeat(32)
}

#[test]
fn what_is_stored_is_listed_with_its_bytes_and_looking_changes_no_file() {
    let place = filled();
    let before = place.files();
    let (code, said, error) = place.host("ls", &[]);
    assert_eq!((code, said.lines().count()), (0, 20), "{said}{error}");
    for number in 1..=20 {
        let line = said.lines().find(|line| line.starts_with(&hex(number))).unwrap();
        assert!(line.ends_with(&format!(" {}", value(number).len())), "{line}");
    }
    let (code, said, _) = place.host("ls", &["--limit", "3", "--json"]);
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(
        code == 0 && lines.len() == 3 && lines.iter().all(|line| line["bytes"].as_u64() > Some(8000)),
        "{said}"
    );
    let (_, said, _) = place.host("ls", &["--prefix", "0A"]);
    assert_eq!(said.lines().map(|line| &line[..64]).collect::<Vec<_>>(), [hex(10)]);

    let (code, said, error) = place.host("stat", &["--json", "--set", "size_limit_mib=2048"]);
    let stat: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}{error}"));
    let bytes: usize = (1..=20).map(|number| value(number).len()).sum();
    assert_eq!(
        (code, stat["values"].as_u64(), stat["bytes"].as_u64()),
        (0, Some(20), Some(bytes as u64)),
        "{said}"
    );
    assert_eq!((stat["capacity"].as_u64(), stat["damaged"].as_u64()), (Some(2 << 30), Some(0)), "{said}");
    let (_, said, _) = place.host("stat", &[]);
    assert!(said.contains("values     20\n") && said.contains("10.0 GiB"), "{said}");

    let (code, said, error) = place.host("verify", &[]);
    assert_eq!(code, 0, "{said}{error}");
    assert!(said.contains("good       20 values") && said.contains("damaged    0\n"), "{said}");
    assert!(place.files() == before, "looking changed a file");
}

#[test]
fn a_flipped_byte_is_found_with_its_key_and_nothing_is_removed() {
    let place = filled();
    // Each value starts at a block of 4096 bytes, in the order of the puts. The fourth has number 4.
    flip(&place.file("dat"), 3 * PAGE as u64 + 77);
    let before = place.files();
    let (code, said, error) = place.host("verify", &[]);
    assert_eq!(code, 1, "{said}{error}");
    assert!(said.contains("good       19 values") && said.contains("damaged    1\n"), "{said}");
    assert!(said.contains(&format!("damaged    {}", hex(4))), "{said}");
    assert!(error.contains("host: 1 damaged") && error.contains(".dat is damaged: not served"), "{error}");
    assert!(place.files() == before, "verify changed a file");
    let (code, said, _) = place.host("verify", &["--json"]);
    let counts: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, counts["good"].as_u64(), counts["damaged"].as_u64()), (1, Some(19), Some(1)), "{said}");
    assert_eq!(counts["damaged_keys"], serde_json::json!([hex(4)]));
    // Values that are not selected are not read.
    assert_eq!(place.host("verify", &["--prefix", "05"]).0, 0);
}

#[test]
fn what_no_key_leads_to_any_more_counts_as_damaged() {
    // Values behind the end of a file that was cut are not listed.
    let place = filled();
    let data = std::fs::File::options().write(true).open(place.file("dat")).unwrap();
    data.set_len(10 * PAGE as u64).unwrap();
    let (code, said, error) = place.host("verify", &[]);
    assert!(code == 1 && said.contains("good       10 values"), "{said}{error}");
    assert!(said.contains("and 10 records or files") && error.contains("10 records of"), "{said}{error}");
    let (_, said, _) = place.host("stat", &[]);
    assert!(said.contains("values     10\n") && said.contains("damaged    10, found"), "{said}");
    // If the header of the index is damaged, none of its values has a key.
    let place = filled();
    flip(&place.file("idx"), 3);
    let (code, said, error) = place.host("verify", &[]);
    assert!(
        code == 1 && said.contains("good       0 values") && said.contains("and 1 records or files"),
        "{said}{error}"
    );
}

#[test]
fn prune_removes_what_is_named_and_only_when_it_is_told_to() {
    let place = filled();
    let before = place.files();
    let (code, said, error) = place.host("prune", &["--all"]);
    assert!(
        code == 2 && error.contains("20 values of 639.8 KiB would be removed: say --yes"),
        "{said}{error}"
    );
    assert!(place.files() == before, "it did not wait for --yes");
    place.prunes(&["--prefix", "1"], |said| said.contains("removed 5 values"));
    let (_, said, _) = place.host("ls", &[]);
    assert_eq!(said.lines().filter(|line| line.starts_with('0')).count(), 15);
    assert_eq!(said.lines().count(), 15, "{said}");
    place.prunes(&["--all"], |said| said == "removed 15 values, 479.9 KiB\n");
    let (code, said, _) = place.host("ls", &[]);
    assert_eq!((code, said.as_str()), (0, ""));
    let (code, _, error) = place.host("prune", &["--yes"]);
    assert!(code == 2 && error.contains("--all") && error.contains("--prefix"), "{error}");
}

#[test]
fn commands_and_a_running_worker_leave_each_other_in_peace() {
    let place = filled();
    let worker = place.open();
    put(&*worker, &[30, 31]);
    let (code, said, error) = place.host("verify", &[]);
    assert!(code == 0 && said.contains("good       22 values"), "{said}{error}");
    // Values that the worker is writing now stay, and the command says so.
    place.prunes(&["--all"], |said| {
        said.contains("removed 20 values, 639.8 KiB\n2 are there still or again: a worker")
    });
    let (code, said, error) = place.host("prune", &["--all", "--yes"]);
    assert!(code == 0 && said.contains("removed 0 values, 0 B\n2 are there still"), "{said}{error}");
    put(&*worker, &[32]);
    let (code, said, error) = place.host("verify", &[]);
    assert!(code == 0 && said.contains("good       3 values"), "{said}{error}");
    worker.shutdown(LONG_MS).unwrap();
    place.prunes(&["--all"], |said| said.lines().count() == 1);
}

#[test]
fn a_limit_smaller_than_what_is_there_is_refused_before_anything_is_evicted() {
    let place = Place::new();
    let tier = place.open();
    // 255 values have about 8 MiB.
    put(&*tier, &(1..=255).collect::<Vec<u8>>());
    tier.shutdown(LONG_MS).unwrap();
    let before = place.files();
    let small = ["--set", "segment_mib=1", "--set", "size_limit_mib=4", "--set", "free_floor_mib=0"];
    let (code, _, error) = place.host("prune", &[&small[..], &["--prefix", "01", "--yes"]].concat());
    assert!(code == 2 && error.contains("this configuration allows 4.0 MiB"), "{error}");
    assert!(place.files() == before, "something was evicted");
}

#[test]
fn a_configuration_file_of_the_workers_says_which_tier_and_where() {
    let place = filled();
    let config = place.plugins.path().join("host.toml");
    std::fs::write(
        &config,
        format!("hicache-storage = \"hicache-file\"\n[plugin.hicache-file]\n{}", place.config()),
    )
    .unwrap();
    let (code, said, error) = place.host("stat", &["--config", config.to_str().unwrap()]);
    assert!(code == 0 && said.contains("values     20\n") && said.contains("16.0 MiB"), "{said}{error}");
    std::fs::write(&config, place.config()).unwrap();
    let arguments = ["--plugin", "hicache-file", "--plugin-config", config.to_str().unwrap()];
    let (code, said, error) = place.host("ls", &arguments);
    assert_eq!((code, said.lines().count()), (0, 20), "{error}");
}

#[test]
fn what_cannot_work_is_refused_in_a_sentence() {
    let place = Place::new();
    let nowhere = format!("dir={}", place.pages.path().join("nowhere").display());
    let cases: [(&[&str], &str); 7] = [
        (&["--plugin", "shm"], "plugin \"shm\" is no storage tier"),
        (&["--plugin", "nothing"], "nothing"),
        (&["--plugin", "hicache-file"], "dir is not set"),
        (&["--plugin", "hicache-file", "--set", "dir"], "is not of the form KEY=VALUE"),
        (&["--plugin", "hicache-file", "--set", "dri=/x"], "unknown key \"dri\""),
        (&["--plugin", "hicache-file", "--set", &nowhere], "nowhere"),
        (&["--config", "/nowhere/host.toml"], "cannot be read"),
    ];
    for (arguments, says) in cases {
        let (code, said, error) = place.host("ls", arguments);
        assert!(code == 2 && error.contains(says) && said.is_empty(), "{arguments:?}: {code} {said}{error}");
    }
    assert!(!place.pages.path().join("nowhere").exists(), "looking made a directory");
    // Works with any tier that can list its keys. This one keeps nothing beyond its process.
    let (code, said, error) = place.host("stat", &["--plugin", "memory"]);
    assert!(
        code == 0 && said.contains("values     0\n") && said.contains("(host.test.memory)"),
        "{said}{error}"
    );
}

#[test]
fn a_value_that_the_plugin_calls_good_is_damaged_when_the_hosts_seal_does_not_fit() {
    let plugins = plugin_files::directory(&["faulty-tier"]);
    let values = tempfile::tempdir().unwrap();
    let store = |number: u8, fault: &str, bytes: &[u8]| {
        std::fs::write(values.path().join(format!("{}{fault}", hex(number))), bytes).unwrap();
    };
    let kv = || (0..4096).map(|at| (at as u8).wrapping_mul(7)).collect::<Vec<u8>>();
    store(1, "", &sealed(1, kv()));
    // Padded with zeros to a whole step, like most values.
    store(2, "", &[sealed(2, kv()), vec![0; 240]].concat());
    store(3, "", &[0; 4352]);
    store(4, "", &sealed(5, kv()));
    store(6, "", &sealed(6, kv())[..2000]);
    store(7, ".flip", &sealed(7, kv()));
    store(8, ".fail", &sealed(8, kv()));
    store(9, ".lie", &sealed(9, kv()));
    store(10, "", &[1; 9]);
    let host = |more: &[&str]| {
        let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
        host.args(["tier", "verify", "--plugin", "faulty-tier", "--plugins-dir"]).arg(plugins.path());
        let output =
            host.arg("--set").arg(format!("values_dir={}", values.path().display())).args(more).output();
        let output = output.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, said, error) = host(&[]);
    assert_eq!(code, Some(1), "{said}{error}");
    let line = |number: u8| said.lines().find(|line| line.contains(&hex(number))).unwrap_or_default();
    for (number, word, why) in [
        (1, "", ""),
        (2, "", ""),
        (3, "damaged", "it is all zeros"),
        (4, "damaged", "the host's seal does not fit the bytes"),
        (6, "damaged", "the host's seal does not fit the bytes"),
        (7, "damaged", "the host's seal does not fit the bytes"),
        (8, "unread", &format!("IO: plugin host.test.faulty-tier: page {} cannot be read: the disk", hex(8))),
        (9, "", ""),
        (10, "damaged", "it is shorter than the host's seal"),
    ] {
        assert!(line(number).starts_with(word) && line(number).contains(why), "{number}: {said}{error}");
        assert_eq!(line(number).is_empty(), word.is_empty(), "{number}: {said}");
    }
    for part in ["good       2 values", "missing    1, removed", "damaged    5\n", "unread     1\n"] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    assert!(error.contains("5 damaged, and 1 values could not be read"), "{error}");
    assert!(!format!("{said}{error}").contains("Key("), "{said}{error}");

    let (code, said, _) = host(&["--json"]);
    let all: Value = serde_json::from_str(&said).unwrap();
    let counts = ["good", "missing", "damaged", "unread"].map(|name| all[name].as_u64().unwrap());
    assert_eq!((code, counts), (Some(1), [2, 1, 5, 1]), "{said}");
    assert_eq!(
        (&all["unread_keys"][0]["key"], &all["unread_keys"][0]["code"]),
        (&hex(8).into(), &"IO".into())
    );
    assert_eq!(host(&["--prefix", "01"]).0, Some(0));
    assert_eq!(host(&["--prefix", "no"]).0, Some(2));
}

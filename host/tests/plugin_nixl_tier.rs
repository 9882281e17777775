//! The NIXL plugin as a storage tier, over the real NIXL: what is damaged is never handed out, and what is stored outlives
//! the process that stored it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "plugin_support/fixture.rs"]
mod fixture;
#[path = "plugin_support/nixl.rs"]
mod nixl;
#[path = "plugin_support/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use host::executor::memory::SharedMemory;
use host::plugins::{Catalog, open_tier};
use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::*;

const PAGE: usize = 96 << 10;
/// More than one request takes.
const PAGES: usize = 150;

struct Tier {
    tier: Arc<dyn StorageTier>,
    memory: SharedMemory,
    region: RegionId,
}

/// The plugin, the directory of pages, and the configuration.
struct Place {
    plugins: tempfile::TempDir,
    pages: tempfile::TempDir,
    config: String,
}

fn place(more: &str) -> Option<Place> {
    let library = nixl::config()?;
    let (plugins, pages) = (fixture::directory(&["nixl"]), tempfile::tempdir().unwrap());
    let config = format!("{library}[storage]\ndirectory = {:?}\n{more}", pages.path().display().to_string());
    Some(Place { plugins, pages, config })
}

impl Place {
    fn open(&self) -> Tier {
        let catalog = Catalog::scan([self.plugins.path()]);
        let opening = Opening { name: "tier".into(), config: self.config.clone() };
        let tier = open_tier(catalog.find("nixl").unwrap(), &opening).unwrap();
        let memory = SharedMemory::new("tier", PAGE * PAGES).unwrap();
        let region = tier.register(&Memory {
            address: memory.address().as_ptr() as u64,
            length: (PAGE * PAGES) as u64,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 1,
            fd_offset: 0,
        });
        Tier { region: region.unwrap(), tier, memory }
    }

    /// Every file of a page, in no order.
    fn files(&self) -> Vec<PathBuf> {
        let list = |folder: &Path| {
            let entries = std::fs::read_dir(folder).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
        };
        let folders = list(&self.pages.path().join("nixl-v1"));
        folders.iter().filter(|f| !f.ends_with("tmp")).flat_map(|folder| list(folder)).collect()
    }

    fn unfinished(&self) -> usize {
        std::fs::read_dir(self.pages.path().join("nixl-v1/tmp")).unwrap().count()
    }
}

fn key(page: usize) -> Key {
    let mut key = [7; 32];
    key[0] = page as u8;
    key[24..].copy_from_slice(&(page as u64).to_le_bytes());
    Key(key)
}

fn byte(page: usize, at: usize) -> u8 {
    (page * 31 + at * 7 + at / 251) as u8
}

impl Tier {
    #[allow(clippy::mut_from_ref)]
    fn bytes(&self) -> &mut [u8] {
        // SAFETY: the mapping lives as long as `self`; tests hold one such slice at a time and no batch in flight.
        unsafe { std::slice::from_raw_parts_mut(self.memory.address().as_ptr(), self.memory.bytes()) }
    }

    fn fill(&self) {
        self.bytes().iter_mut().enumerate().for_each(|(at, to)| *to = byte(at / PAGE, at % PAGE));
    }

    fn is_right(&self, page: usize) -> bool {
        let bytes = &self.bytes()[page * PAGE..][..PAGE];
        bytes.iter().enumerate().all(|(at, found)| *found == byte(page, at))
    }

    fn pages(&self, pages: std::ops::Range<usize>) -> Vec<TierPage> {
        let page = |page| TierPage {
            key: key(page),
            region: self.region.0,
            length: PAGE as u32,
            offset: (page * PAGE) as u64,
        };
        pages.map(page).collect()
    }

    /// Statuses of a batch's pages.
    #[allow(clippy::disallowed_methods, reason = "real files take real time")]
    fn finish(&self, code: i32, count: usize) -> Vec<i32> {
        assert_eq!(code, 0);
        let mut ends = vec![None; count];
        let start = std::time::Instant::now();
        while ends.iter().any(Option::is_none) {
            let mut done = [TierCompletion::default(); 16];
            let taken = self.tier.poll(&mut done) as usize;
            for end in &done[..taken] {
                assert!(ends[end.page as usize].replace(end.status).is_none(), "{end:?} came twice");
            }
            assert!(start.elapsed().as_secs() < 20, "waited in vain for a batch");
            std::thread::yield_now();
        }
        ends.into_iter().flatten().collect()
    }

    fn put(&self, pages: std::ops::Range<usize>) -> Vec<i32> {
        let pages = self.pages(pages);
        self.finish(self.tier.put(Tag(1), &pages), pages.len())
    }

    fn get(&self, pages: std::ops::Range<usize>) -> Vec<i32> {
        let pages = self.pages(pages);
        self.finish(self.tier.get(Tag(2), &pages), pages.len())
    }
}

#[test]
fn the_tier_cases_of_the_conformance_kit_pass_buffered_and_direct() {
    for more in ["", "direct = true\n"] {
        let Some(place) = place(more) else { return };
        let file = place.pages.path().join("config.toml");
        std::fs::write(&file, &place.config).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_host"))
            .args(["plugins", "test", "--case", "tier-", "--plugin-config"])
            .args([&file, &fixture::plugin("nixl")])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let skipped: Vec<&str> = said.lines().filter(|line| line.starts_with("skip")).collect();
        assert!(output.status.success() && skipped.len() == 1, "{said}");
        assert!(skipped[0].contains("tier-persistent"), "{said}");
        assert!(said.contains("tier-data") && said.contains("tier-hot-allocations"), "{said}");
    }
}

#[test]
fn what_one_process_stored_the_next_one_finds_whole() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    assert!(tier.put(0..PAGES).iter().all(|status| *status == STORED));
    assert_eq!((place.files().len(), place.unfinished()), (PAGES, 0));
    tier.tier.shutdown(5000).unwrap();
    drop(tier);
    let tier = place.open();
    tier.bytes().fill(0);
    assert!(tier.get(0..PAGES).iter().all(|status| *status == FOUND));
    assert!((0..PAGES).all(|page| tier.is_right(page)));
    let usage = tier.tier.usage().unwrap();
    assert_eq!((usage.values, usage.bytes), (PAGES as u64, (PAGES * PAGE) as u64));
}

#[test]
fn damaged_pages_are_missing_or_an_error_and_never_a_success_and_their_neighbours_are_found() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    let put = |page: usize| assert_eq!(tier.put(page..page + 1), [STORED]);
    (0..12).for_each(put);
    let file = |page: usize| {
        let name: String = key(page).0.iter().map(|byte| format!("{byte:02x}")).collect();
        place.files().into_iter().find(|path| path.to_str().unwrap().contains(&name)).unwrap()
    };
    let edit = |page: usize, edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = std::fs::read(file(page)).unwrap();
        edit(&mut bytes);
        std::fs::write(file(page), bytes).unwrap();
    };
    edit(0, &|bytes| bytes.truncate(PAGE / 2));
    edit(1, &Vec::clear);
    edit(2, &|bytes| bytes.truncate(PAGE + 31));
    edit(3, &|bytes| bytes.push(0));
    edit(4, &|bytes| bytes[PAGE / 3] ^= 1);
    edit(5, &|bytes| bytes[PAGE + 16] ^= 1);
    edit(6, &|bytes| drop(bytes.drain(..4096)));
    std::fs::copy(file(8), file(7)).unwrap();
    tier.bytes().fill(0);
    let ends = tier.get(0..12);
    assert!(ends[..8].iter().all(|status| *status <= 0), "{ends:?}");
    // What says by its size or its trailer that it is damaged touches no memory.
    assert_eq!(ends[..4], [MISSING; 4], "{ends:?}");
    assert!(tier.bytes()[..4 * PAGE].iter().all(|byte| *byte == 0));
    assert_eq!((ends[4], ends[7]), (ErrorCode::IO.0, ErrorCode::IO.0), "{ends:?}");
    assert_eq!(ends[8..], [FOUND; 4]);
    assert!((8..12).all(|page| tier.is_right(page)));
    // They are gone, and can be stored again.
    assert_eq!(tier.get(0..8), [MISSING; 8]);
    tier.fill();
    assert_eq!(tier.put(0..8), [STORED; 8]);
    tier.bytes().fill(0);
    assert_eq!(tier.get(0..8), [FOUND; 8]);
    assert!((0..8).all(|page| tier.is_right(page)));
}

#[test]
fn a_page_of_another_length_is_missing() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    assert_eq!(tier.put(3..4), [STORED]);
    let mut short = tier.pages(3..4);
    short[0].length -= 1;
    assert_eq!(tier.finish(tier.tier.get(Tag(1), &short), 1), [MISSING]);
    assert_eq!(tier.get(3..4), [FOUND]);
}

#[test]
fn what_cannot_be_written_is_an_error_and_leaves_nothing() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    // Where page 2 belongs is a folder, which shows when the page gets its name.
    let name: String = key(2).0.iter().map(|byte| format!("{byte:02x}")).collect();
    std::fs::create_dir(place.pages.path().join(format!("nixl-v1/02/{name}.page"))).unwrap();
    let ends = tier.put(0..6);
    assert!(ends[2] < 0 && ends.iter().filter(|status| **status == STORED).count() == 5, "{ends:?}");
    assert_eq!(place.unfinished(), 0);
}

#[test]
fn a_page_that_the_kernel_refuses_fails_alone_and_the_others_of_its_request_are_found() {
    let Some(place) = place("") else { return };
    let tier = place.open();
    tier.fill();
    assert_eq!(tier.put(0..5), [STORED; 5]);
    tier.bytes().fill(0);
    let protect = |flags| {
        let at = tier.memory.address().as_ptr().wrapping_add(2 * PAGE);
        // SAFETY: whole pages of the mapping, which nobody but the kernel touches while they cannot be written.
        unsafe { rustix::mm::mprotect(at.cast(), PAGE, flags) }.unwrap();
    };
    protect(rustix::mm::MprotectFlags::READ);
    let ends = tier.get(0..5);
    protect(rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE);
    assert_eq!(ends, [FOUND, FOUND, ErrorCode::IO.0, FOUND, FOUND]);
    assert!([0, 1, 3, 4].into_iter().all(|page| tier.is_right(page)));
    assert_eq!(tier.get(0..5), [FOUND; 5]);
}

#[test]
fn check_says_what_is_missing_for_the_tier() {
    let Some(library) = nixl::library() else { return };
    let plugins = fixture::directory(&["nixl"]);
    let catalog = Catalog::scan([plugins.path()]);
    let open = |config: &str| {
        let opening = Opening { name: "t".into(), config: config.into() };
        open_tier(catalog.find("nixl").unwrap(), &opening).err().unwrap().to_string()
    };
    let library = format!("library = {:?}\n", library.display().to_string());
    // Who wants no tier is asked for none.
    let check = |plugin_dir: Option<&Path>, config: &str| {
        let file = plugins.path().join("host.toml");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
        command.args(["plugins", "check", "--executor", "synthetic", "--plugins", "nixl", "--plugins-dir"]);
        command.arg(plugins.path()).args(["--hierarchical-cache", "--decode-radix-cache"]);
        command.args(["--hicache-storage", "nixl"]).arg("--config").arg(file).env_remove("NIXL_PLUGIN_DIR");
        let output = command.envs(plugin_dir.map(|dir| ("NIXL_PLUGIN_DIR", dir))).output().unwrap();
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        (output.status.code().unwrap(), said.concat())
    };
    let table = format!("[plugin.nixl]\n{library}");
    let (code, said) = check(None, &table);
    assert_eq!(code, 0, "{said}");
    // A NIXL whose storage plugin was left out.
    let lacking = plugins.path().join("lacking");
    std::fs::create_dir(&lacking).unwrap();
    std::fs::write(lacking.join("libplugin_UCX.so"), "").unwrap();
    let (code, said) =
        check(Some(&lacking), &format!("{table}[plugin.nixl.storage]\ndirectory = \"/tmp\"\n"));
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("has no libplugin_POSIX.so, but UCX"), "{said}");
    let said = open(&library);
    assert!(said.contains("directory") && said.contains("[plugin.nixl.storage]"), "{said}");
    let said = open(&format!("{library}[storage]\ndirectory = \"/tmp\"\nbackend = \"OBJ\""));
    assert!(said.contains("OBJ") && said.contains("POSIX"), "{said}");
    let said = open(&format!("{library}[storage]\ndirectory = \"/proc/nowhere\""));
    assert!(said.contains("/proc/nowhere cannot hold pages"), "{said}");
}

#[test]
fn a_disk_that_is_full_refuses_puts_by_name_and_takes_them_again_when_it_has_room() {
    if nixl::library().is_none() {
        return;
    }
    let above = tempfile::tempdir().unwrap();
    let script = "set -e; mount -t tmpfs -o size=3m,mode=700 tmpfs \"$NIXL_FULL\"; exec \"$0\" inside --exact --nocapture";
    let output = Command::new("unshare")
        .args(["-Urm", "bash", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .env("NIXL_FULL", above.path())
        .output();
    let Ok(output) = output else { return skip::skipped("there is no unshare") };
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    match said.contains("INSIDE") {
        true => assert!(output.status.success() && said.contains("INSIDE DONE"), "{said}"),
        false => skip::skipped(&format!("nothing can be mounted here: {said}")),
    }
}

/// Not a test of its own: what runs where a small file system is mounted.
#[test]
fn inside() {
    let Some(disk) = std::env::var_os("NIXL_FULL").map(PathBuf::from) else { return };
    println!("INSIDE");
    let mut place = place("").unwrap();
    place.pages = tempfile::tempdir_in(disk).unwrap();
    let library = nixl::config().unwrap();
    place.config =
        format!("{library}[storage]\ndirectory = {:?}\n", place.pages.path().display().to_string());
    let tier = place.open();
    tier.fill();
    let ends = tier.put(0..PAGES);
    let stored = ends.iter().filter(|end| **end == STORED).count();
    let full = ends.iter().filter(|end| **end == ErrorCode::NO_RESOURCE.0).count();
    assert!(stored > 0 && full > 0 && stored + full == PAGES, "{ends:?}");
    assert_eq!((place.files().len(), place.unfinished()), (stored, 0));
    tier.bytes().fill(0);
    let found = tier.get(0..PAGES);
    assert!(found.iter().zip(&ends).all(|(found, end)| (*found == FOUND) == (*end == STORED)), "{found:?}");
    assert!((0..PAGES).all(|page| found[page] != FOUND || tier.is_right(page)));
    place.files().iter().take(2).for_each(|file| std::fs::remove_file(file).unwrap());
    let refused = ends.iter().position(|end| *end != STORED).unwrap();
    tier.fill();
    assert_eq!(tier.put(refused..refused + 1), [STORED]);
    println!("INSIDE DONE");
}

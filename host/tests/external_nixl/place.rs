//! A tier of the NIXL plugin with its own memory and directory.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use host_memory::SharedMemory;
use host_plugin_api::*;
use host_plugins::{Catalog, PluginError, open_tier};
use host_tests::program::Ended;
use host_tests::wait::poll_until;
use host_tests::{nixl, plugin_files};
use host_worker::seal::{SEAL_BYTES, seal};

pub const PAGE: usize = 96 << 10;
/// More than one request takes.
pub const PAGES: usize = 150;

pub struct Tier {
    pub tier: Arc<dyn StorageTier>,
    pub memory: SharedMemory,
    pub region: RegionId,
}

/// The plugin, the directory of pages, and the configuration.
pub struct Place {
    pub plugins: tempfile::TempDir,
    pub pages: tempfile::TempDir,
    pub config: String,
}

pub fn place(more: &str) -> Option<Place> {
    let library = nixl::config()?;
    let (plugins, pages) = (plugin_files::directory(&["nixl"]), tempfile::tempdir().unwrap());
    let config = format!("{library}[storage]\ndirectory = {:?}\n{more}", pages.path().display().to_string());
    Some(Place { plugins, pages, config })
}

impl Place {
    /// Runs the tier cases of the conformance kit with this configuration. Returns the lines of those that it skipped.
    pub fn kit(&self, config: &str) -> Vec<String> {
        let file = self.pages.path().join("config.toml");
        std::fs::write(&file, config).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_host"))
            .args(["plugins", "test", "--patience", "30", "--case", "tier-", "--plugin-config"])
            .args([&file, &plugin_files::plugin("nixl")])
            .output();
        let kit = Ended::from(output.unwrap());
        assert!(kit.status.success(), "{config}: {kit}");
        let cases = ["tier-data", "tier-hot-allocations"];
        assert!(cases.iter().all(|case| kit.stdout.contains(case)), "{kit}");
        kit.stdout.lines().filter(|line| line.starts_with("skip")).map(str::to_owned).collect()
    }

    pub fn open(&self) -> Tier {
        self.try_open().unwrap()
    }

    /// Opens the tier, or returns the error.
    pub fn try_open(&self) -> std::result::Result<Tier, PluginError> {
        let catalog = Catalog::scan([self.plugins.path()]);
        let opening = Opening { name: "tier".into(), config: self.config.clone() };
        let tier = open_tier(catalog.find("nixl").unwrap(), &opening)?;
        let memory = SharedMemory::new("tier", PAGE * PAGES).unwrap();
        let region = tier.register(&Memory {
            address: Address::of(memory.address().as_ptr()),
            length: (PAGE * PAGES) as u64,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 1,
            fd_offset: 0,
        });
        Ok(Tier { region: region.unwrap(), tier, memory })
    }

    /// The files of all pages, unsorted.
    pub fn files(&self) -> Vec<PathBuf> {
        let list = |folder: &Path| {
            let entries = std::fs::read_dir(folder).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
        };
        let folders = list(&self.pages.path().join("nixl-v1"));
        folders.iter().filter(|f| !f.ends_with("tmp")).flat_map(|folder| list(folder)).collect()
    }

    pub fn file(&self, page: usize) -> PathBuf {
        self.files().into_iter().find(|path| path.to_str().unwrap().contains(&name(page))).unwrap()
    }

    pub fn edit(&self, page: usize, edit: &dyn Fn(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(self.file(page)).unwrap();
        edit(&mut bytes);
        std::fs::write(self.file(page), bytes).unwrap();
    }

    /// Runs `host tier` with the configuration of the workers. Returns the exit code, standard output and standard error.
    pub fn host(&self, command: &[&str]) -> (i32, String, String) {
        let config = self.plugins.path().join("config.toml");
        std::fs::write(&config, &self.config).unwrap();
        let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
        host.arg("tier").args(command).args(["--plugin", "nixl", "--plugins-dir"]).arg(self.plugins.path());
        let ended = Ended::from(host.arg("--plugin-config").arg(config).output().unwrap());
        (ended.code().expect("an exit code"), ended.stdout, ended.stderr)
    }

    pub fn unfinished(&self) -> usize {
        std::fs::read_dir(self.pages.path().join("nixl-v1/tmp")).unwrap().count()
    }
}

pub fn key(page: usize) -> Key {
    let mut key = [7; 32];
    key[0] = page as u8;
    key[24..].copy_from_slice(&(page as u64).to_le_bytes());
    Key(key)
}

pub fn name(page: usize) -> String {
    key(page).0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn byte(page: usize, at: usize) -> u8 {
    (page * 31 + at * 7 + at / 251) as u8
}

/// The value of a page as a worker stores it, with the host's seal.
pub fn value(page: usize) -> Vec<u8> {
    let mut kv: Vec<u8> = (0..PAGE - SEAL_BYTES).map(|at| byte(page, at)).collect();
    kv.extend(seal(&key(page), &kv));
    kv
}

impl Tier {
    #[allow(clippy::mut_from_ref)]
    pub fn bytes(&self) -> &mut [u8] {
        // SAFETY: the mapping lives as long as `self`. Tests hold one such slice at a time and no batch in flight.
        unsafe { std::slice::from_raw_parts_mut(self.memory.address().as_ptr(), self.memory.bytes()) }
    }

    pub fn fill(&self) {
        self.bytes().chunks_mut(PAGE).enumerate().for_each(|(page, to)| to.copy_from_slice(&value(page)));
    }

    pub fn is_right(&self, page: usize) -> bool {
        self.bytes()[page * PAGE..][..PAGE] == value(page)
    }

    pub fn pages(&self, pages: std::ops::Range<usize>) -> Vec<TierPage> {
        let page = |page| TierPage {
            key: key(page),
            region: self.region,
            length: PAGE as u32,
            offset: (page * PAGE) as u64,
        };
        pages.map(page).collect()
    }

    /// Waits for a batch and returns the statuses of its pages.
    pub fn finish(&self, code: i32, count: usize) -> Vec<i32> {
        assert_eq!(code, 0);
        let mut ends = vec![None; count];
        poll_until("the pages of a batch to end", || {
            let mut done = [TierCompletion::default(); 16];
            let taken = self.tier.poll(&mut done) as usize;
            for end in &done[..taken] {
                assert!(ends[end.page as usize].replace(end.status).is_none(), "{end:?} came twice");
            }
            if ends.iter().all(Option::is_some) { Ok(()) } else { Err(format!("{ends:?}")) }
        });
        ends.into_iter().flatten().collect()
    }

    pub fn put(&self, pages: std::ops::Range<usize>) -> Vec<i32> {
        let pages = self.pages(pages);
        self.finish(self.tier.put(Tag(1), &pages), pages.len())
    }

    pub fn get(&self, pages: std::ops::Range<usize>) -> Vec<i32> {
        let pages = self.pages(pages);
        self.finish(self.tier.get(Tag(2), &pages), pages.len())
    }
}

//! A tier in this process with registered memory, and batches that are watched to their end.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;

use fastrand::Rng;
use host_plugin_api::tier::{FOUND, STORED};
use host_plugin_api::{
    Address, ErrorCode, Key, Memory, MemoryKind, Opening, RegionId, StorageTier, Tag, TierCompletion,
    TierPage,
};
use host_plugin_hicache_file::FileTier;
use host_tests::wait::poll_until;

pub struct World {
    pub tier: FileTier,
    pub region: RegionId,
    memory: &'static mut [Block],
    tag: std::cell::Cell<u64>,
}

#[repr(C, align(4096))]
#[derive(Clone, Copy)]
struct Block([u8; 4096]);

/// Random numbers by a seed of this run, printed so that the run can be repeated with `SEED`.
pub fn seeded() -> Rng {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_nanos() as u64
    });
    println!("SEED={seed}");
    Rng::with_seed(seed)
}

pub fn key(number: u64) -> Key {
    let mut key = Key([0xA5; 32]);
    key.0[..8].copy_from_slice(&number.to_le_bytes());
    key
}

/// The bytes of the page of this number.
pub fn value(number: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    Rng::with_seed(number ^ 0x5EED).fill(&mut bytes);
    bytes
}

pub fn open(dir: &Path, more: &str) -> Result<FileTier, host_plugin_api::Error> {
    let dir = dir.to_str().unwrap();
    let config = format!("dir = {dir:?}\nfree_floor_mib = 0\nrefresh_ms = 10\nload_wait_ms = 600000\n{more}");
    host_plugin_hicache_file::open(&Opening { name: "test".into(), config })
}

/// Whether the kernel and the file system of the tests support this way.
pub fn can(dir: &Path, way: &str) -> bool {
    match open(dir, way) {
        Ok(_) => true,
        Err(e) => {
            println!("SKIPPED {way:?}: {e}");
            false
        }
    }
}

impl World {
    /// A tier in `dir`, with `bytes` bytes of memory.
    pub fn new(dir: &Path, bytes: usize, more: &str) -> Self {
        Self::around(open(dir, more).unwrap_or_else(|e| panic!("{e}")), bytes)
    }

    pub fn around(tier: FileTier, bytes: usize) -> Self {
        let memory = vec![Block([0; 4096]); bytes.div_ceil(4096) + 1].leak();
        let mut world = Self { tier, region: RegionId(0), memory, tag: std::cell::Cell::new(1) };
        world.register_again();
        world
    }

    pub fn register_again(&mut self) {
        let memory = Memory {
            address: Address::of(self.memory.as_ptr()),
            length: self.memory.len() as u64 * 4096,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 0,
            fd_offset: 0,
        };
        self.region = self.tier.register(&memory).unwrap();
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        let length = self.memory.len() * 4096;
        // SAFETY: plain bytes, borrowed through `self`, and no batch is in flight between calls.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), length) }
    }

    pub fn page(&self, number: u64, offset: usize, length: usize) -> TierPage {
        TierPage { key: key(number), region: self.region, length: length as u32, offset: offset as u64 }
    }

    /// Starts a batch, again while the tier would block, and waits for all of it. Returns status and bytes of each page.
    pub fn run(&self, count: usize, call: impl Fn(&FileTier, Tag) -> i32) -> Vec<(i32, u64)> {
        let tag = Tag(self.tag.replace(self.tag.get() + 1));
        poll_until("a batch to be taken", || match call(&self.tier, tag) {
            0 => Ok(()),
            code if code == ErrorCode::WOULD_BLOCK.0 => Err("the tier would block"),
            code => panic!("a batch was answered with {:?}", ErrorCode(code)),
        });
        let mut ended = vec![None; count];
        poll_until("the pages of a batch to end", || {
            let mut done = [TierCompletion::default(); 64];
            let taken = self.tier.poll(&mut done);
            for completion in &done[..usize::try_from(taken).unwrap()] {
                assert_eq!(completion.tag, tag);
                let before = ended[completion.page as usize].replace((completion.status, completion.bytes));
                assert_eq!(before, None, "page {} ended twice", completion.page);
            }
            if ended.iter().all(Option::is_some) { Ok(()) } else { Err(format!("{ended:?}")) }
        });
        ended.into_iter().flatten().collect()
    }

    fn batches(&self, count: usize) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let most = self.tier.limits().max_pages as usize;
        (0..count).step_by(most).map(move |first| first..count.min(first + most))
    }

    /// Stores pages of these numbers, one after the other in memory from `shift` on. Returns how each ended.
    pub fn put(&mut self, numbers: &[u64], length: usize, shift: usize) -> Vec<i32> {
        for (at, number) in numbers.iter().enumerate() {
            let start = shift + at * length;
            self.bytes()[start..start + length].copy_from_slice(&value(*number, length));
        }
        let pages: Vec<_> =
            numbers.iter().enumerate().map(|(at, n)| self.page(*n, shift + at * length, length)).collect();
        let run = |range: std::ops::Range<usize>| {
            self.run(range.len(), |tier, tag| tier.put(tag, &pages[range.clone()]))
        };
        self.batches(pages.len()).flat_map(run).map(|(status, _)| status).collect()
    }

    pub fn put_all(&mut self, numbers: &[u64], length: usize) {
        let ended = self.put(numbers, length, 0);
        assert!(ended.iter().all(|status| *status == STORED), "{ended:?}");
    }

    /// Reads pages of these numbers, from `shift` on. Returns how each ended. Panics when a found page is not what was put.
    pub fn get(&mut self, numbers: &[u64], length: usize, shift: usize) -> Vec<i32> {
        self.bytes().fill(0xEE);
        let pages: Vec<_> =
            numbers.iter().enumerate().map(|(at, n)| self.page(*n, shift + at * length, length)).collect();
        let run = |range: std::ops::Range<usize>| {
            self.run(range.len(), |tier, tag| tier.get(tag, &pages[range.clone()]))
        };
        let ended: Vec<i32> = self.batches(pages.len()).flat_map(run).map(|(status, _)| status).collect();
        for (at, (number, status)) in numbers.iter().zip(&ended).enumerate() {
            let bytes = &self.bytes()[shift + at * length..][..length];
            match *status {
                FOUND => assert!(bytes == value(*number, length), "WRONG BYTES of page {number}"),
                0 => assert!(bytes.iter().all(|b| *b == 0xEE), "a miss wrote to the memory of page {number}"),
                _ => {}
            }
        }
        ended
    }

    /// How many of these pages are found with the right bytes.
    pub fn found(&mut self, numbers: &[u64], length: usize) -> usize {
        self.get(numbers, length, 0).into_iter().filter(|status| *status == FOUND).count()
    }

    pub fn exists(&self, numbers: &[u64]) -> Vec<i32> {
        let keys: Vec<Key> = numbers.iter().map(|n| key(*n)).collect();
        let run = |range: std::ops::Range<usize>| {
            self.run(range.len(), |tier, tag| tier.exists(tag, &keys[range.clone()]))
        };
        self.batches(keys.len()).flat_map(run).map(|(status, _)| status).collect()
    }

    pub fn delete(&self, numbers: &[u64]) -> Vec<i32> {
        let keys: Vec<Key> = numbers.iter().map(|n| key(*n)).collect();
        let run = |range: std::ops::Range<usize>| {
            self.run(range.len(), |tier, tag| tier.delete(tag, &keys[range.clone()]))
        };
        self.batches(keys.len()).flat_map(run).map(|(status, _)| status).collect()
    }

    pub fn close(self) {
        self.tier.shutdown(300_000).unwrap();
    }
}

/// Polls until `yes` returns true.
pub fn wait_until(what: &str, mut yes: impl FnMut() -> bool) {
    poll_until(what, || if yes() { Ok(()) } else { Err("not yet") });
}

/// Files of segments whose names end in `ending`.
pub fn files(dir: &Path, ending: &str) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir.join("tier-v1")).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.to_str().unwrap().ends_with(ending));
    files.sort();
    files
}

//! Ways to store pages and read them again, and a table that compares several ways, round by round.

#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use host_plugin_api::Address;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use host_plugin_api::*;
use io_uring::{IoUring, opcode, types};
use rustix::fs::{Advice, FallocateFlags, Mode, OFlags, fadvise, fallocate, open};

/// Memory that pages are written from and read to.
pub const MEMORY: usize = 256 << 20;
pub const RAW_DEPTH: usize = 64;

#[repr(C, align(4096))]
#[derive(Clone)]
pub struct Block(pub [u8; 4096]);

pub struct Measured {
    pub seconds: f64,
    pub processor: f64,
    /// Share of the pages that were found in the end. The other pages count neither as written nor as read.
    pub kept: f64,
}

pub fn processor() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

pub fn measure(run: impl FnOnce()) -> Measured {
    let (start, before) = (Instant::now(), processor());
    run();
    Measured { seconds: start.elapsed().as_secs_f64(), processor: processor() - before, kept: 1.0 }
}

pub fn sync(dir: &Path) {
    let dir = open(dir, OFlags::RDONLY, Mode::empty()).unwrap();
    rustix::fs::syncfs(&dir).unwrap();
}

/// Drops these files from the page cache.
pub fn forget(dir: &Path) {
    for entry in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap()) {
        if entry.file_type().unwrap().is_dir() {
            forget(&entry.path());
        } else {
            let file = std::fs::File::open(entry.path()).unwrap();
            fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        }
    }
}

pub struct Bench {
    pub dir: PathBuf,
    pub memory: &'static mut [Block],
    pub page: usize,
    pub pages: usize,
}

impl Bench {
    /// With memory that is full of different bytes, and no pages yet.
    pub fn new(dir: &Path) -> Self {
        // Huge pages where the system has them, as the host's memory has.
        use rustix::mm::{Advice as Use, MapFlags, ProtFlags, madvise, mmap_anonymous};
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which is never unmapped. Its zeros are valid blocks.
        let memory = unsafe {
            let base = mmap_anonymous(std::ptr::null_mut(), MEMORY, rights, MapFlags::PRIVATE).unwrap();
            if std::env::var_os("TIER_BENCH_SMALL_PAGES").is_none() {
                madvise(base, MEMORY, Use::LinuxHugepage).unwrap();
            }
            std::slice::from_raw_parts_mut(base.cast::<Block>(), MEMORY / 4096)
        };
        for (number, block) in memory.iter_mut().enumerate() {
            fastrand::Rng::with_seed(number as u64).fill(&mut block.0);
        }
        Self { dir: dir.to_owned(), memory, page: 0, pages: 0 }
    }

    pub fn address(&self, page: usize) -> *mut u8 {
        let at = page % (MEMORY / self.page) * self.page;
        self.memory.as_ptr().cast_mut().cast::<u8>().wrapping_add(at)
    }

    pub fn key(&self, page: usize) -> Key {
        let mut key = Key([0x11; 32]);
        key.0[..8].copy_from_slice(&(page as u64).to_le_bytes());
        key.0[8..16].copy_from_slice(&(self.page as u64).to_le_bytes());
        key
    }

    /// One request per page through one ring, without a checksum.
    pub fn raw(&self, file: &OwnedFd, write: bool) {
        let mut ring = IoUring::new(RAW_DEPTH as u32).unwrap();
        let (mut started, mut ended) = (0, 0);
        while ended < self.pages {
            while started < self.pages && started - ended < RAW_DEPTH {
                let (fd, address) = (types::Fd(file.as_raw_fd()), self.address(started));
                let (length, offset) = (self.page as u32, (started * self.page) as u64);
                let entry = if write {
                    opcode::Write::new(fd, address, length).offset(offset).build()
                } else {
                    opcode::Read::new(fd, address, length).offset(offset).build()
                };
                // SAFETY: the memory lives for ever, and requests that share a piece of it only race for its bytes.
                unsafe { ring.submission().push(&entry).unwrap() };
                started += 1;
            }
            ring.submit_and_wait(1).unwrap();
            for entry in ring.completion() {
                assert_eq!(entry.result() as usize, self.page);
                ended += 1;
            }
        }
    }

    pub fn raw_both(&self) -> [Measured; 2] {
        let path = self.dir.join("raw");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT;
        let file = open(&path, flags, Mode::from_raw_mode(0o600)).unwrap();
        let write = measure(|| {
            fallocate(&file, FallocateFlags::empty(), 0, (self.pages * self.page) as u64).unwrap();
            self.raw(&file, true);
            sync(&self.dir);
        });
        let read = measure(|| self.raw(&file, false));
        std::fs::remove_file(path).unwrap();
        [write, read]
    }

    /// Registers all memory.
    pub fn register(&self, tier: &dyn StorageTier) -> RegionId {
        let memory = Memory {
            address: Address::of(self.memory.as_ptr()),
            length: MEMORY as u64,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 0,
            fd_offset: 0,
        };
        tier.register(&memory).unwrap()
    }

    pub fn tier(&self, config: &str) -> (impl StorageTier + use<>, RegionId) {
        let config =
            format!("dir = {:?}\nfree_floor_mib = 0\nsize_limit_mib = 8192\n{config}", self.dir.join("tier"));
        let tier = host_plugin_hicache_file::open(&Opening { name: "bench".into(), config }).unwrap();
        let region = self.register(&tier);
        (tier, region)
    }

    /// Moves all pages, in eight batches at once if the tier takes so many. At 4 MiB, as many pages are in flight as with raw I/O.
    pub fn through(&self, tier: &dyn StorageTier, region: RegionId, start: impl Fn(Tag, &[TierPage]) -> i32) {
        const PLACES: usize = 8;
        let batch = (MEMORY / PLACES / self.page).min(256);
        // The places in memory that no batch uses, and the number of pages in flight in each place.
        let (mut free, mut left) = ((0..PLACES).collect::<Vec<_>>(), [0; PLACES]);
        let mut pages = Vec::with_capacity(batch);
        // SAFETY: the tier lives as long as this borrow, and never closes it.
        let event = unsafe { std::os::fd::BorrowedFd::borrow_raw(tier.event_fd()) };
        let (mut started, mut ended) = (0, 0);
        while ended < self.pages {
            while let Some(&place) = free.last()
                && started < self.pages
            {
                let count = batch.min(self.pages - started);
                pages.clear();
                pages.extend((0..count).map(|at| TierPage {
                    key: self.key(started + at),
                    region,
                    length: self.page as u32,
                    offset: ((place * batch + at) * self.page) as u64,
                }));
                if start(Tag(place as u64), &pages) != 0 {
                    break;
                }
                free.pop();
                left[place] = count;
                started += count;
            }
            let mut fds = [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, None).unwrap();
            let mut done = [TierCompletion::default(); 256];
            let count = usize::try_from(tier.poll(&mut done)).unwrap();
            for done in &done[..count] {
                assert_eq!(done.status, 1, "{done:?}");
                let place = done.tag.0 as usize;
                left[place] -= 1;
                if left[place] == 0 {
                    free.push(place);
                }
            }
            ended += count;
        }
    }

    pub fn tier_both(&self, config: &str) -> [Measured; 2] {
        let write = measure(|| {
            let (tier, region) = self.tier(config);
            self.through(&tier, region, |tag, pages| tier.put(tag, pages));
            tier.shutdown(60_000).unwrap();
            sync(&self.dir);
        });
        let (tier, region) = self.tier(config);
        while tier.usage().unwrap().values < self.pages as u64 {
            std::thread::yield_now();
        }
        let read = measure(|| self.through(&tier, region, |tag, pages| tier.get(tag, pages)));
        drop(tier);
        std::fs::remove_dir_all(self.dir.join("tier")).unwrap();
        [write, read]
    }

    /// Stores pages as upstream's file backend does: in a temporary file that is renamed. One call reads it. Uses
    /// `threads` threads.
    pub fn files_both(&self, threads: usize, direct: bool) -> [Measured; 2] {
        let dir = self.dir.join("files");
        std::fs::create_dir(&dir).unwrap();
        let flag = if direct { OFlags::DIRECT } else { OFlags::empty() };
        let each = |work: &(dyn Fn(usize) + Sync)| {
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    scope.spawn(move || (thread..self.pages).step_by(threads).for_each(work));
                }
            });
        };
        let name = |page: usize| {
            let hex: String = self.key(page).0.iter().map(|byte| format!("{byte:02x}")).collect();
            dir.join(format!("{hex}.bin"))
        };
        // SAFETY: as in `raw`.
        let bytes = |page: usize| unsafe { std::slice::from_raw_parts_mut(self.address(page), self.page) };
        let write = measure(|| {
            each(&|page| {
                let (to, part) = (name(page), name(page).with_extension("part"));
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | flag;
                let file = open(&part, flags, Mode::from_raw_mode(0o600)).unwrap();
                assert_eq!(rustix::io::write(&file, bytes(page)).unwrap(), self.page);
                std::fs::rename(part, to).unwrap();
            });
            sync(&self.dir);
        });
        forget(&dir);
        let read = measure(|| {
            each(&|page| {
                let file = open(name(page), OFlags::RDONLY | flag, Mode::empty()).unwrap();
                assert_eq!(rustix::io::read(&file, bytes(page)).unwrap(), self.page);
            });
        });
        std::fs::remove_dir_all(dir).unwrap();
        [write, read]
    }
}

pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// The median, and the range from the least to the most.
fn spread(numbers: Vec<f64>, digits: usize) -> String {
    let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    let most = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{:.digits$} ({least:.digits$} to {most:.digits$})", median(numbers))
}

/// A way to write all pages and read them again.
pub type Way<'a> = (&'a str, &'a dyn Fn(&Bench) -> [Measured; 2]);

/// Prints the results of `count` rounds of all ways, for each page size. Ratios are relative to the first way. Ratios
/// and processor time come with the range of the rounds.
pub fn table(bench: &mut Bench, ways: &[Way<'_>], megabytes: usize, count: usize) {
    println!("| page | way | write GB/s | of raw | core s/GB | read GB/s | of raw | core s/GB | found |");
    println!("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    let wanted = number("TIER_BENCH_PAGE_KIB", 0);
    for page in [64 << 10, 256 << 10, 1 << 20, 4 << 20] {
        if wanted != 0 && page != wanted << 10 {
            continue;
        }
        bench.page = page;
        bench.pages = (megabytes << 20) / page;
        let bytes = (bench.pages * page) as f64 / 1e9;
        let mut rounds: Vec<Vec<[Measured; 2]>> = Vec::new();
        for _ in 0..count {
            let one = |(_, way): &Way<'_>| {
                // Syncs first, so that work that the previous way left behind does not count for this way.
                sync(&bench.dir);
                way(bench)
            };
            rounds.push(ways.iter().map(one).collect());
        }
        for (at, (name, _)) in ways.iter().enumerate() {
            print!("| {} KiB | {name} |", page >> 10);
            for side in 0..2 {
                let of = |f: &dyn Fn(&Vec<[Measured; 2]>) -> f64| rounds.iter().map(f).collect();
                let kept = |round: &Vec<[Measured; 2]>| bytes * round[at][side].kept;
                let speed = median(of(&|round| kept(round) / round[at][side].seconds));
                let ratio =
                    of(&|round| round[0][side].seconds / round[at][side].seconds * round[at][side].kept);
                let core = of(&|round| round[at][side].processor / kept(round));
                print!(" {speed:.2} | {} | {} |", spread(ratio, 2), spread(core, 3));
            }
            let kept = median(rounds.iter().map(|round| round[at][1].kept).collect());
            println!(" {:.0} |", kept * bench.pages as f64);
        }
    }
}

/// A number from an environment variable.
pub fn number(name: &str, or: usize) -> usize {
    std::env::var(name).map_or(or, |text| text.parse().expect("a number of MiB or of rounds"))
}

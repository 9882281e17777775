//! Compares the cost of a call into a plugin in C with that of a call into a plugin in Rust. Both do the same work for the same
//! calls, in one run and in turns. The host holds both in the same way (`Arc<dyn …>` with its proxy in front of the ABI).
//!
//! A call into Rust goes through the vtable, the check of the poison flag and the catching of panics. A call into C goes
//! through the host's adapter and the plugin's table. `tests/c/sums.c` is the plugin in C, [`Sums`] here the one in Rust.
//!
//! `cargo bench -p host-plugin-api --bench languages`. It needs gcc.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use host_plugin_api::abi::{RSlice, open_guarded, open_guarded_allocator, open_guarded_tier};
use host_plugin_api::*;
use host_plugins::{Catalog, LoadedAllocator, LoadedTier, LoadedTransfer, Services};
use host_tests::c_plugins::{Compiler, build};

const REPETITIONS: usize = 60;
const INVALID: i32 = ErrorCode::INVALID_ARGUMENT.0;

/// Adds up the entries that it gets and checks whether each entry is valid.
#[derive(Default)]
struct Sums(AtomicU64);

impl Sums {
    fn keep(&self, sum: u64) -> i32 {
        self.0.store(sum, Ordering::Relaxed);
        0
    }
}

impl TransferBackend for Sums {
    fn limits(&self) -> TransferLimits {
        TransferLimits::new(u32::MAX, u32::MAX)
    }
    fn register(&self, _memory: &Memory) -> Result<RegionId> {
        Ok(RegionId(1))
    }
    fn deregister(&self, _region: RegionId) -> Result<()> {
        Ok(())
    }
    fn endpoint(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }
    fn connect(&self, _name: &str, _endpoint: &[u8]) -> Result<PeerId> {
        Ok(PeerId(1))
    }
    fn disconnect(&self, _peer: PeerId) -> Result<()> {
        Ok(())
    }
    fn submit(&self, _submission: &Submission, writes: &[Write]) -> i32 {
        let mut bytes = 0;
        for write in writes {
            if write.length == 0 || write.target_region == RegionId(u32::MAX) {
                return INVALID;
            }
            bytes += u64::from(write.length);
        }
        self.keep(bytes)
    }
    fn poll(&self, _completions: &mut [Completion]) -> i32 {
        0
    }
    fn notifications(&self, _notifications: &mut [Notification]) -> i32 {
        0
    }
    fn cancel(&self, _tag: Tag) -> i32 {
        INVALID
    }
    fn settled(&self, _tag: Tag) -> i32 {
        1
    }
    fn event_fd(&self) -> i32 {
        -1
    }
    fn shutdown(&self, _deadline_ms: u64) -> Result<()> {
        Ok(())
    }
}

impl Sums {
    fn keys(&self, keys: &[Key]) -> i32 {
        self.keep(keys.iter().map(|key| u64::from(key.0[0])).sum())
    }

    fn pages(&self, pages: &[TierPage]) -> i32 {
        let mut bytes = 0;
        for page in pages {
            if page.length == 0 || page.region == RegionId(u32::MAX) {
                return INVALID;
            }
            bytes += u64::from(page.length);
        }
        self.keep(bytes)
    }
}

impl StorageTier for Sums {
    fn limits(&self) -> TierLimits {
        TierLimits { max_pages: 4096, max_batches: 64, max_value: 1 << 20, alignment: 1, reserved: [0; 4] }
    }
    fn register(&self, _memory: &Memory) -> Result<RegionId> {
        Ok(RegionId(1))
    }
    fn deregister(&self, _region: RegionId) -> Result<()> {
        Ok(())
    }
    fn exists(&self, _tag: Tag, keys: &[Key]) -> i32 {
        self.keys(keys)
    }
    fn get(&self, _tag: Tag, pages: &[TierPage]) -> i32 {
        self.pages(pages)
    }
    fn put(&self, _tag: Tag, pages: &[TierPage]) -> i32 {
        self.pages(pages)
    }
    fn delete(&self, _tag: Tag, keys: &[Key]) -> i32 {
        self.keys(keys)
    }
    fn poll(&self, _completions: &mut [TierCompletion]) -> i32 {
        0
    }
    fn cancel(&self, _tag: Tag) -> i32 {
        INVALID
    }
    fn settled(&self, _tag: Tag) -> i32 {
        1
    }
    fn scan(&self, _cursor: u64, _keys: &mut [Key]) -> Result<Scanned> {
        Ok(Scanned::default())
    }
    fn usage(&self) -> Result<TierUsage> {
        Ok(TierUsage::default())
    }
    fn event_fd(&self) -> i32 {
        -1
    }
    fn shutdown(&self, _deadline_ms: u64) -> Result<()> {
        Ok(())
    }
}

impl PoolAllocator for Sums {
    fn components(&self, components: &mut [Component]) -> i32 {
        let Some(first) = components.first_mut() else { return INVALID };
        *first = Component { pages: 4096, ..Component::default() };
        1
    }
    fn alloc(&self, _component: ComponentId, pages: &mut [PoolPage]) -> i32 {
        (0..).zip(&mut *pages).for_each(|(name, page)| *page = PoolPage(name));
        self.keep(pages.len() as u64)
    }
    fn free(&self, _component: ComponentId, pages: &[PoolPage]) -> i32 {
        let mut sum = 0;
        for page in pages {
            if page.0 == u32::MAX {
                return INVALID;
            }
            sum += u64::from(page.0);
        }
        self.keep(sum)
    }
}

/// All roles of one plugin, as the host holds them.
struct Held {
    transfer: Arc<dyn TransferBackend>,
    tier: Arc<dyn StorageTier>,
    allocator: Arc<dyn PoolAllocator>,
}

/// A model whose layers all attend to every token.
const FULL: [LayerGroup; 1] = [LayerGroup { kind: LayerKind::FULL, layers: 1, window: 0, parts: 1 }];

fn in_rust() -> Held {
    let services = Services::of("bench.rust").unwrap();
    let transfer =
        open_guarded(|_| Ok(Sums::default()), "bench".into(), "".into()).into_result().ok().unwrap();
    let tier =
        open_guarded_tier(|_| Ok(Sums::default()), "bench".into(), "".into()).into_result().ok().unwrap();
    let groups = RSlice::from_slice(&FULL);
    let pool = open_guarded_allocator(|_| Ok(Sums::default()), "bench".into(), "".into(), 16, 4096, groups);
    Held {
        transfer: Arc::new(LoadedTransfer::new("rust", transfer, &services).unwrap()),
        tier: Arc::new(LoadedTier::new("rust", tier, &services).unwrap()),
        allocator: Arc::new(LoadedAllocator::new("rust", pool.into_result().ok().unwrap())),
    }
}

fn in_c() -> Held {
    let folder = tempfile::tempdir().unwrap();
    let _file = build("sums.c", Compiler::Gcc, &[], folder.path());
    let catalog = Catalog::scan([folder.path()]);
    let entry = catalog.find("c-sums").unwrap();
    let (name, config) = ("bench".to_owned(), String::new());
    let opening = Opening { name: name.clone(), config: config.clone() };
    let pool = PoolOpening { name, config, page_tokens: 16, pages: 4096, groups: FULL.to_vec() };
    Held {
        transfer: host_plugins::open_transfer(entry, &opening).unwrap(),
        tier: host_plugins::open_tier(entry, &opening).unwrap(),
        allocator: host_plugins::open_allocator(entry, &pool).unwrap(),
    }
}

/// Prints the nanoseconds per call of both. Each is the best of several turns, so that a busy moment affects both.
fn compare(name: &str, calls: usize, both: &[Held; 2], call: impl Fn(&Held)) {
    let mut best = [f64::MAX; 2];
    for _ in 0..REPETITIONS {
        for (best, held) in best.iter_mut().zip(both) {
            let start = Instant::now();
            (0..calls).for_each(|_| call(black_box(held)));
            *best = best.min(start.elapsed().as_secs_f64() * 1e9 / calls as f64);
        }
    }
    let [rust, c] = best;
    println!("| {name} | {rust:.1} | {c:.1} | {:+.1} |", c - rust);
}

fn main() {
    // The harness passes `--bench`. `cargo test --benches` does not, and then there is nothing to measure.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let both = [in_rust(), in_c()];
    println!("| Call | Rust, ns | C, ns | C beside Rust, ns |\n| --- | ---: | ---: | ---: |");
    let submission = Submission {
        peer: PeerId(1),
        notification_length: 0,
        tag: Tag(1),
        notification: [0; NOTIFICATION_BYTES],
    };
    for count in [1, 8, 64, 512] {
        let writes = vec![Write { length: 4096, ..Write::default() }; count];
        compare(&format!("`submit` of {count} writes"), 2_000_000 / (count + 20), &both, |held| {
            assert_eq!(held.transfer.submit(&submission, black_box(&writes)), 0);
        });
    }
    compare("`poll` of a transfer plugin", 50_000, &both, |held| {
        let mut none = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 1];
        assert_eq!(held.transfer.poll(black_box(&mut none)), 0);
    });
    compare("`settled`", 50_000, &both, |held| assert_eq!(held.transfer.settled(black_box(Tag(7))), 1));
    for count in [1, 64] {
        let keys = vec![Key([3; 32]); count];
        let pages = vec![TierPage { length: 4096, ..TierPage::default() }; count];
        let calls = 2_000_000 / (count + 20);
        compare(&format!("`exists` of {count} keys"), calls, &both, |held| {
            assert_eq!(held.tier.exists(Tag(1), black_box(&keys)), 0);
        });
        compare(&format!("`get` of {count} pages"), calls, &both, |held| {
            assert_eq!(held.tier.get(Tag(1), black_box(&pages)), 0);
        });
    }
    for count in [1, 64] {
        let pages = std::cell::RefCell::new(vec![PoolPage::default(); count]);
        compare(&format!("`alloc` and `free` of {count} pages"), 2_000_000 / (count + 20), &both, |held| {
            let mut pages = pages.borrow_mut();
            assert_eq!(held.allocator.alloc(ComponentId(0), black_box(&mut pages)), 0);
            assert_eq!(held.allocator.free(ComponentId(0), black_box(&pages)), 0);
        });
    }
}

//! foyer: writes pages to disk on insertion, with io_uring and `O_DIRECT`. Its memory holds 1 MiB of pages.

use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, HybridCachePolicy,
    IoEngineConfig, UringIoEngineConfig,
};

use crate::ways::{Bench, Measured, measure, sync};

/// Pages that are read at once.
const READERS: usize = 16;

/// Opens the cache with `buffer` bytes for pages on their way to the disk, or with foyer's defaults.
async fn open(dir: &std::path::Path, capacity: usize, buffer: Option<usize>) -> HybridCache<u64, Vec<u8>> {
    let device = FsDeviceBuilder::new(dir).with_capacity(capacity).with_direct(true).build().unwrap();
    let engine = BlockEngineConfig::new(device).with_block_size(64 << 20);
    let engine = match buffer {
        Some(bytes) => engine.with_buffer_pool_size(bytes).with_submit_queue_size_threshold(bytes),
        None => engine,
    };
    HybridCacheBuilder::new()
        .with_policy(HybridCachePolicy::WriteOnInsertion)
        .memory(1 << 20)
        .with_weighter(|_, value: &Vec<u8>| value.len())
        .storage()
        .with_io_engine_config(Box::new(UringIoEngineConfig::new()) as Box<dyn IoEngineConfig>)
        .with_engine_config(engine)
        .build()
        .await
        .unwrap()
}

/// Writes and reads all pages. With a `pace`, the writer waits for the disk after so many bytes, with buffers for four times as
/// many. Without one, it waits only at the end, with foyer's default buffers. Each page is copied once on its way in, since foyer
/// owns what it stores, and once on its way out.
pub fn both(bench: &Bench, pace: Option<usize>) -> [Measured; 2] {
    let dir = bench.dir.join("foyer");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    // The capacity is larger than the pages, because foyer also needs blocks that it writes and cleans.
    let capacity = bench.pages * bench.page * 5 / 4 + (512 << 20);
    // SAFETY: the memory is never freed, and nothing writes a page while foyer stores it. The readers write disjoint pages.
    let bytes = |page: usize| unsafe { std::slice::from_raw_parts_mut(bench.address(page), bench.page) };
    let mut write = measure(|| {
        runtime.block_on(async {
            let cache = open(&dir, capacity, pace.map(|pace| 4 * pace)).await;
            let mut waiting = 0;
            for page in 0..bench.pages {
                cache.insert(page as u64, bytes(page).to_vec());
                waiting += bench.page;
                if pace.is_some_and(|pace| waiting >= pace) {
                    cache.storage().wait().await;
                    waiting = 0;
                }
            }
            cache.storage().wait().await;
            cache.close().await.unwrap();
        });
        sync(&bench.dir);
    });
    let cache = runtime.block_on(open(&dir, capacity, None));
    let found = std::sync::atomic::AtomicUsize::new(0);
    let mut read = measure(|| {
        std::thread::scope(|scope| {
            for reader in 0..READERS {
                let (cache, found, handle) = (&cache, &found, runtime.handle().clone());
                scope.spawn(move || {
                    for page in (reader..bench.pages).step_by(READERS) {
                        if let Some(entry) = handle.block_on(cache.get(&(page as u64))).unwrap() {
                            bytes(page).copy_from_slice(entry.value());
                            found.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        }
                    }
                });
            }
        });
    });
    runtime.block_on(cache.close()).unwrap();
    drop(cache);
    std::fs::remove_dir_all(dir).unwrap();
    let kept = found.into_inner() as f64 / bench.pages as f64;
    (write.kept, read.kept) = (kept, kept);
    [write, read]
}

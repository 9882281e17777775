//! dynamo-kv-router 1.6.1: its plain tree, and its concurrent compressed tree behind one worker thread.

use std::hint::black_box;

use dynamo_kv_router::indexer::{KvIndexerInterface, SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent, compute_block_hash_for_seq,
    compute_seq_hash_for_block,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree};

use crate::counting::in_use;
use crate::timing::Times;
use crate::workload::{PAGE, PAGES, SHARED_PAGES, Workload, read};

fn hashes(tokens: &[u32]) -> Vec<LocalBlockHash> {
    compute_block_hash_for_seq(tokens, PAGE as u32, BlockHashOptions::default())
}

fn stored(number: usize, tokens: &[u32]) -> RouterEvent {
    let local = hashes(tokens);
    let blocks = local.iter().zip(compute_seq_hash_for_block(&local)).map(|(local, sequence)| {
        KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(sequence),
            tokens_hash: *local,
            mm_extra_info: None,
        }
    });
    let data = KvCacheStoreData { parent_hash: None, start_position: None, blocks: blocks.collect() };
    let event = KvCacheEvent { event_id: number as u64, data: KvCacheEventData::Stored(data), dp_rank: 0 };
    RouterEvent::new(0, event)
}

fn matches(name: &str, workload: &Workload, find: impl Fn(&[LocalBlockHash]) -> u32) {
    let mut from_tokens = Times::with_capacity(workload.len());
    let mut prehashed = Times::with_capacity(workload.len());
    for index in 0..workload.len() {
        let tokens = workload.sequence(index);
        assert_eq!(from_tokens.time(|| find(&hashes(tokens))), PAGES as u32);
    }
    for index in 0..workload.len() {
        let local = hashes(workload.sequence(index));
        prehashed.time(|| black_box(find(&local)));
    }
    let mut just_read = Times::with_capacity(workload.len());
    for index in 0..workload.len() {
        let tokens = workload.sequence(index);
        read(tokens);
        assert_eq!(just_read.time(|| find(&hashes(tokens))), PAGES as u32);
    }
    from_tokens.print(&format!("{name}: match from tokens, full hit"));
    just_read.print(&format!("{name}: the same, prompt just read"));
    prehashed.print(&format!("{name}: match prehashed, full hit"));
    let cold = workload.cold(20_000.min(workload.len()));
    for _ in 0..2 {
        let mut times = Times::with_capacity(cold.len());
        for tokens in &cold {
            assert_eq!(times.time(|| find(&hashes(tokens))), SHARED_PAGES as u32);
        }
        times.print(&format!("{name}: match from tokens, 102 pages cached + 26 new"));
    }
}

fn memory(name: &str, bytes: usize, workload: &Workload) {
    let each = bytes as f64 / workload.unique_pages() as f64;
    println!("{:<58} {each:.1} B per page, tokens not included", format!("{name}: memory"));
}

/// Both trees on the main workload.
pub fn run(workload: &Workload) {
    let before = in_use();
    let mut tree = RadixTree::new();
    let mut times = Times::with_capacity(workload.len());
    let noted = in_use() - before;
    for index in 0..workload.len() {
        let event = stored(index, workload.sequence(index));
        times.time(|| tree.apply_event(event)).expect("the event applies");
    }
    memory("dynamo RadixTree", in_use() - before - noted, workload);
    times.print("dynamo RadixTree: insert, prehashed");
    matches("dynamo RadixTree", workload, |local| {
        tree.find_matches(local.to_vec(), false).scores.values().copied().max().unwrap_or(0)
    });
    drop(tree);

    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let before = in_use();
    let indexer = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, PAGE as u32);
    let mut seconds = 0.0;
    // The clock does not run while events are made. It stops when the worker thread has applied all of them.
    let mut next = 0;
    while next < workload.len() {
        let batch: Vec<RouterEvent> = (next..workload.len().min(next + 5000))
            .map(|index| stored(index, workload.sequence(index)))
            .collect();
        next += batch.len();
        let start = std::time::Instant::now();
        runtime.block_on(async {
            for event in batch {
                indexer.apply_event(event).await;
            }
            indexer.flush().await;
        });
        seconds += start.elapsed().as_secs_f64();
    }
    memory("dynamo CRTC", in_use() - before, workload);
    let each = seconds * 1e6 / workload.len() as f64;
    println!("{:<58} mean {each:>8.3} us", "dynamo CRTC: insert, prehashed, through its thread");
    matches("dynamo CRTC", workload, |local| {
        indexer.backend().find_matches(local, false).scores.values().copied().max().unwrap_or(0)
    });
}

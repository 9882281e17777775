//! Logits and KV bytes of a sequence depend on the sequence alone.

use std::ops::Range;

use host_core::layout::KvOrder;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sequence};
use host_executor::KvMemory;
use host_executor::cpu::{CpuExecutor, CpuOptions, WeightStorage};
use host_tests::model::{Stored, TinyModel, tiny_qwen3};
use tempfile::TempDir;

const MODEL: u64 = 20;
const PAGES: usize = 300;

fn load(directory: &TempDir, threads: usize) -> CpuExecutor {
    CpuExecutor::load(directory.path(), CpuOptions { threads, ..CpuOptions::default() }).unwrap()
}

fn model() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    tiny_qwen3(directory.path(), MODEL).unwrap();
    directory
}

fn pool(dtype: Dtype, order: KvOrder, page_tokens: usize) -> KvMemory {
    let shape =
        KvShape { pages: PAGES, heads: 2, layers: 4, page_tokens, head_dim: 16, value_dim: 16, dtype };
    KvMemory::new(KvLayout::new(shape, order)).unwrap()
}

fn plain(dtype: Dtype) -> KvMemory {
    pool(dtype, KvOrder::PageHeadLayerKvTokenDim, 16)
}

/// Tokens that look random.
fn prompt(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32)
        .map(|i| (i.wrapping_add(seed * 1000)).wrapping_mul(2_654_435_761) >> 8)
        .map(|t| t % 559)
        .collect()
}

/// A sequence on its way through an executor, with its results so far.
struct Run {
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    done: usize,
    logits: Vec<u32>,
}

impl Run {
    /// `pages` yields page ids, of which as many as needed are taken.
    fn new(tokens: Vec<u32>, pages: impl Iterator<Item = u32>, page_tokens: usize) -> Self {
        let pages = pages.take(tokens.len().div_ceil(page_tokens)).map(PageId).collect();
        Self { tokens, pages, done: 0, logits: Vec::new() }
    }

    fn next(&mut self, room: u64, count: usize) -> Option<Sequence> {
        let range = self.done..self.tokens.len().min(self.done + count);
        self.done = range.end;
        (!range.is_empty()).then(|| self.sequence(room, range))
    }

    fn sequence(&self, room: u64, range: Range<usize>) -> Sequence {
        let start = range.start as u32;
        Sequence {
            room: Room(room),
            tokens: self.tokens[range].to_vec(),
            start,
            pages: self.pages.clone(),
            window: host_core::window::WindowPages::default(),
            recompute: 0..0,
            drafted: 0,
            sample: None,
            scored: None,
        }
    }

    /// The bytes of all K and V rows, in an order that does not depend on the layout.
    fn kv(&self, kv: &KvMemory) -> Vec<u8> {
        let shape = kv.layout().shape;
        let mut bytes = Vec::new();
        for position in 0..self.tokens.len() {
            let (page, slot) = (self.pages[position / shape.page_tokens], position % shape.page_tokens);
            for head in 0..shape.heads {
                for layer in 0..shape.layers {
                    bytes.extend_from_slice(kv.read_row(page, head, layer, 0, slot));
                    bytes.extend_from_slice(kv.read_row(page, head, layer, 1, slot));
                }
            }
        }
        bytes
    }
}

/// Computes all runs to their end, in batches with one chunk of each. The chunk sizes are used in turn, again and again.
fn compute(executor: &mut CpuExecutor, kv: &mut KvMemory, runs: &mut [Run], chunks: &[usize]) {
    let mut id = 0;
    loop {
        let chunk = chunks[id as usize % chunks.len()];
        id += 1;
        let counts: Vec<usize> = runs.iter().map(|run| run.done).collect();
        let sequences: Vec<Sequence> =
            runs.iter_mut().enumerate().filter_map(|(room, run)| run.next(room as u64, chunk)).collect();
        if sequences.is_empty() {
            return;
        }
        let logits = executor.forward_logits(kv, &Batch { id, sequences, layer_group: 0 }).unwrap();
        let mut rows = logits.chunks_exact(559);
        for (run, before) in runs.iter_mut().zip(counts) {
            for row in rows.by_ref().take(run.done - before) {
                run.logits.extend(row.iter().map(|logit| logit.to_bits()));
            }
        }
        assert!(rows.next().is_none());
    }
}

/// Logits and KV of the prompt alone, in one chunk, on one thread, on pages in order.
fn reference(directory: &TempDir, dtype: Dtype, tokens: &[u32]) -> (Vec<u32>, Vec<u8>) {
    let mut kv = plain(dtype);
    let mut runs = [Run::new(tokens.to_vec(), 0.., 16)];
    compute(&mut load(directory, 1), &mut kv, &mut runs, &[usize::MAX / 2]);
    let bytes = runs[0].kv(&kv);
    (std::mem::take(&mut runs[0].logits), bytes)
}

#[test]
fn chunks_and_threads_leave_no_trace() {
    let directory = model();
    let tokens = prompt(1, 203);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (logits, bytes) = reference(&directory, dtype, &tokens);
        assert!(logits.iter().all(|&bits| f32::from_bits(bits).is_finite()));
        for threads in [1, 3, 4] {
            let mut executor = load(&directory, threads);
            for chunks in [&[1][..], &[7], &[16], &[64], &[203], &[1, 30, 2, 5]] {
                let mut kv = plain(dtype);
                let mut runs = [Run::new(tokens.clone(), 0.., 16)];
                compute(&mut executor, &mut kv, &mut runs, chunks);
                assert!(runs[0].logits == logits, "logits, {dtype}, {threads} threads, chunks {chunks:?}");
                assert!(runs[0].kv(&kv) == bytes, "KV, {dtype}, {threads} threads, chunks {chunks:?}");
            }
        }
    }
}

#[test]
fn strangers_in_the_batch_leave_no_trace() {
    let directory = model();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let lengths = [203, 1, 40, 17, 120, 16, 33, 5];
        let expected: Vec<_> =
            (0..8).map(|i| reference(&directory, dtype, &prompt(i as u32, lengths[i]))).collect();
        for threads in [1, 4] {
            // Sequences of different lengths end at different times, so that prefills and decode steps meet in all mixtures.
            for chunks in [&[1][..], &[16, 1, 1], &[50], &[7]] {
                let mut kv = plain(dtype);
                let mut runs: Vec<Run> = (0..8)
                    .map(|i| {
                        Run::new(prompt(i as u32, lengths[i]), (0..).map(move |page| page * 8 + i as u32), 16)
                    })
                    .collect();
                compute(&mut load(&directory, threads), &mut kv, &mut runs, chunks);
                for (i, run) in runs.iter().enumerate() {
                    assert!(
                        run.logits == expected[i].0,
                        "logits of {i}, {dtype}, {threads} threads, {chunks:?}"
                    );
                    assert!(
                        run.kv(&kv) == expected[i].1,
                        "KV of {i}, {dtype}, {threads} threads, {chunks:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn page_ids_page_sizes_and_layouts_leave_no_trace() {
    let directory = model();
    let tokens = prompt(3, 150);
    let mut executor = load(&directory, 4);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (logits, bytes) = reference(&directory, dtype, &tokens);
        for order in [KvOrder::PageHeadLayerKvTokenDim, KvOrder::LayerKvPageTokenHeadDim] {
            for page_tokens in [1, 5, 16, 64] {
                for step in [1, 7, 299] {
                    let mut kv = pool(dtype, order, page_tokens);
                    // 7 and 299 share no factor with 300, so these walk over all pages without meeting one twice.
                    let pages = (0..).map(|i| (i * step + 11) % PAGES as u32);
                    let mut runs = [Run::new(tokens.clone(), pages, page_tokens)];
                    compute(&mut executor, &mut kv, &mut runs, &[40]);
                    let place = format!("{dtype}, {order}, pages of {page_tokens}, step {step}");
                    assert!(runs[0].logits == logits, "logits, {place}");
                    assert!(runs[0].kv(&kv) == bytes, "KV, {place}");
                }
            }
        }
    }
}

#[test]
fn kv_that_was_moved_to_another_pool_is_as_good_as_computed() {
    let directory = model();
    let tokens = prompt(4, 100);
    let (mut prefill, mut decode) = (load(&directory, 4), load(&directory, 1));
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (logits, _) = reference(&directory, dtype, &tokens);
        let mut source = plain(dtype);
        let mut target = pool(dtype, KvOrder::LayerKvPageTokenHeadDim, 5);
        let mut first = [Run::new(tokens[..90].to_vec(), 3.., 16)];
        compute(&mut prefill, &mut source, &mut first, &[64]);
        let mut second = Run::new(tokens.clone(), (0..20).rev().map(|i| i * 3), 5);
        for position in 0..90 {
            for (head, layer, kv) in (0..16).map(|i| (i / 8, i / 2 % 4, i % 2)) {
                let row =
                    source.read_row(first[0].pages[position / 16], head, layer, kv, position % 16).to_vec();
                let page = second.pages[position / 5];
                target.write_row(page, head, layer, kv, position % 5).copy_from_slice(&row);
            }
        }
        second.done = 90;
        let mut runs = [second];
        compute(&mut decode, &mut target, &mut runs, &[1]);
        assert!(runs[0].logits == logits[90 * 559..], "{dtype}");
    }
}

#[test]
fn how_weights_are_stored_leaves_no_trace() {
    let tokens = prompt(5, 60);
    let (logits, bytes) = reference(&model(), Dtype::F32, &tokens);
    let base = TinyModel { seed: MODEL, ..TinyModel::default() };
    for (stored, shards, weights) in [
        (Stored::Bf16, 1, WeightStorage::F32),
        (Stored::F32, 1, WeightStorage::AsStored),
        (Stored::Bf16, 3, WeightStorage::AsStored),
    ] {
        let directory = tempfile::tempdir().unwrap();
        TinyModel { stored, shards, ..base.clone() }.write(directory.path()).unwrap();
        let mut executor = CpuExecutor::load(directory.path(), CpuOptions { threads: 2, weights }).unwrap();
        let mut kv = plain(Dtype::F32);
        let mut runs = [Run::new(tokens.clone(), 0.., 16)];
        compute(&mut executor, &mut kv, &mut runs, &[60]);
        assert!(runs[0].logits == logits, "{stored:?}, {shards} shards, {weights:?}");
        assert!(runs[0].kv(&kv) == bytes, "{stored:?}, {shards} shards, {weights:?}");
    }
}

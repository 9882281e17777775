//! Logits, tokens and KV bytes do not depend on the number of tensor-parallel ranks.

use std::path::Path;
use std::thread;

use host_core::heads::{counted_heads, rank_heads};
use host_core::layout::KvOrder;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sampling, Sequence, SequenceOutput};
use host_executor::cpu::{CpuExecutor, CpuOptions};
use host_executor::digest::{self, PagePart};
use host_executor::group::{Seat, seats};
use host_executor::synthetic::{Cost, Synthetic, SyntheticShape};
use host_executor::{Executor, KvMemory};
use host_tests::model::{Family, Stored, TinyModel};

const GREEDY: Sampling = Sampling::GREEDY;
const PAGE_TOKENS: usize = 8;
/// Pages of each sequence.
const PAGES: u32 = 12;

/// One rank: its executor and its pool.
struct Rank<E> {
    executor: E,
    kv: KvMemory,
}

/// The ranks of a worker. `load` makes the executor of a seat.
fn worker<E: Executor>(ranks: usize, order: KvOrder, dtype: Dtype, load: impl Fn(Seat) -> E) -> Vec<Rank<E>> {
    let rank = |(rank, seat)| {
        let executor = load(seat);
        let model = executor.shape();
        let heads = rank_heads(model.kv_heads, ranks, rank);
        let shape = KvShape {
            pages: 3 * PAGES as usize,
            heads: heads.len(),
            layers: model.layers,
            page_tokens: PAGE_TOKENS,
            head_dim: model.head_dim,
            value_dim: model.head_dim,
            dtype,
        };
        let kv = KvMemory::for_heads(KvLayout::new(shape, order), heads.start).unwrap();
        Rank { executor, kv }
    };
    seats(ranks).into_iter().enumerate().map(rank).collect()
}

/// Runs `work` on all ranks at the same time.
fn on_all<E: Executor, R: Send>(
    worker: &mut [Rank<E>],
    work: impl Fn(usize, &mut Rank<E>) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let work = &work;
        let ranks = worker.iter_mut().enumerate();
        let threads: Vec<_> = ranks.map(|(rank, part)| scope.spawn(move || work(rank, part))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn prompt(sequence: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| (i + sequence * 1000).wrapping_mul(2_654_435_761) >> 8).map(|t| t % 500).collect()
}

/// Batches that compute three sequences in chunks of these sizes, and then eight given tokens of each one by one.
fn batches(chunks: &[usize]) -> Vec<Batch> {
    let sequences: Vec<Vec<u32>> =
        [(1, 61), (2, 7), (3, 30)].map(|(seed, length)| prompt(seed, length)).into();
    let mut done = vec![0; sequences.len()];
    let mut batches = Vec::new();
    while done.iter().zip(&sequences).any(|(done, tokens)| *done < tokens.len()) {
        let chunk = chunks[batches.len() % chunks.len()];
        let mut batch = Batch { id: batches.len() as u64, sequences: Vec::new(), layer_group: 0 };
        for (index, (tokens, done)) in sequences.iter().zip(&mut done).enumerate() {
            // The last eight tokens one by one, as in decode.
            let prefill = tokens.len().saturating_sub(8).max(1);
            let end = if *done < prefill { prefill.min(*done + chunk) } else { tokens.len().min(*done + 1) };
            if *done < end {
                batch.sequences.push(Sequence {
                    room: Room(index as u64),
                    tokens: tokens[*done..end].to_vec(),
                    start: *done as u32,
                    pages: (0..PAGES)
                        .map(|page| PageId((page * 3 + index as u32 + 5) % (3 * PAGES)))
                        .collect(),
                    window: host_core::window::WindowPages::default(),
                    recompute: 0..0,
                    drafted: 0,
                    sample: (end >= prefill).then_some(GREEDY.into()),
                    scored: None,
                });
            }
            *done = end;
        }
        batches.push(batch);
    }
    batches
}

/// Digest of all KV, each head counted once.
fn kv_digest<E: Executor>(worker: &[Rank<E>]) -> u64 {
    let kv_heads = worker[0].executor.shape().kv_heads;
    digest::sum(worker.iter().enumerate().flat_map(|(rank, part)| {
        let heads = counted_heads(kv_heads, worker.len(), rank);
        let layers = 0..part.kv.layout().shape.layers;
        (0..3 * PAGES).map(move |page| {
            let part_of = PagePart {
                page: PageId(page),
                index: page as usize,
                layers: layers.clone(),
                heads: heads.clone(),
                tokens: PAGE_TOKENS,
            };
            digest::part(&part.kv, &part_of)
        })
    }))
}

/// Bits of all logits, and the digest of the pools at the end.
fn logits(worker: &mut [Rank<CpuExecutor>], chunks: &[usize]) -> (Vec<u32>, u64) {
    let batches = batches(chunks);
    let found = on_all(worker, |_rank, part| {
        let mut logits = [const { Vec::new() }; 3];
        for batch in &batches {
            let mut rows = part.executor.forward_logits(&mut part.kv, batch).unwrap().chunks_exact(559);
            for sequence in &batch.sequences {
                for row in rows.by_ref().take(sequence.tokens.len()) {
                    logits[sequence.room.0 as usize].extend(row.iter().map(|logit| logit.to_bits()));
                }
            }
        }
        logits.concat()
    });
    assert!(found[1..].iter().all(Vec::is_empty), "only rank 0 has logits");
    (found.into_iter().next().unwrap(), kv_digest(worker))
}

fn load(directory: &Path, threads: usize, seat: Seat) -> CpuExecutor {
    CpuExecutor::load_rank(directory, CpuOptions { threads, ..CpuOptions::default() }, seat).unwrap()
}

#[test]
fn a_models_logits_and_kv_are_bit_identical_for_every_number_of_ranks() {
    for (family, stored, tied) in [(Family::Qwen3, Stored::Bf16, false), (Family::Llama, Stored::F32, true)] {
        for (heads, counts) in [(4, vec![2, 3, 4]), (8, vec![2, 3, 4, 5, 8])] {
            let directory = tempfile::tempdir().unwrap();
            let model = TinyModel { family, stored, heads, tied, layers: 2, seed: 7, ..TinyModel::default() };
            model.write(directory.path()).unwrap();
            for dtype in [Dtype::F32, Dtype::Bf16] {
                let mut one = worker(1, KvOrder::PageHeadLayerKvTokenDim, dtype, |seat| {
                    load(directory.path(), 2, seat)
                });
                let expected = logits(&mut one, &[usize::MAX / 2]);
                assert!(expected.0.iter().all(|bits| f32::from_bits(*bits).is_finite()));
                for &ranks in &counts {
                    for (chunks, threads, order) in [
                        (&[1][..], 1, KvOrder::PageHeadLayerKvTokenDim),
                        (&[16, 5], 2, KvOrder::LayerKvPageTokenHeadDim),
                        (&[100], 1, KvOrder::PageLayerHeadKvTokenDim),
                    ] {
                        let mut many =
                            worker(ranks, order, dtype, |seat| load(directory.path(), threads, seat));
                        let found = logits(&mut many, chunks);
                        let how = format!("{family:?}, {heads} heads, {dtype}, {ranks} ranks, {chunks:?}");
                        assert!(found.0 == expected.0, "logits: {how}");
                        assert!(found.1 == expected.1, "KV: {how}");
                    }
                }
            }
        }
    }
}

#[test]
fn ranks_that_share_a_gguf_file_compute_the_bits_of_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    let (folder, file) = (directory.path().join("folder"), directory.path().join("model.gguf"));
    let model = TinyModel { family: Family::Llama, heads: 8, layers: 2, seed: 7, ..TinyModel::default() };
    model.write(&folder).unwrap();
    std::fs::write(&file, model.gguf().bytes()).unwrap();
    let order = KvOrder::PageHeadLayerKvTokenDim;
    let expected = logits(&mut worker(1, order, Dtype::Bf16, |seat| load(&folder, 2, seat)), &[100]);
    for ranks in [1, 2, 3, 5, 8] {
        let found = logits(&mut worker(ranks, order, Dtype::Bf16, |seat| load(&file, 1, seat)), &[16, 5]);
        assert!(found == expected, "{ranks} ranks");
    }
}

#[test]
fn each_rank_holds_its_part_of_the_weights_and_the_parts_are_the_whole() {
    let directory = tempfile::tempdir().unwrap();
    TinyModel { heads: 8, hidden: 256, intermediate: 512, ..TinyModel::default() }
        .write(directory.path())
        .unwrap();
    let whole = load(directory.path(), 1, Seat::alone()).weight_bytes();
    for ranks in [2, 4] {
        let parts: Vec<usize> =
            seats(ranks).into_iter().map(|seat| load(directory.path(), 1, seat).weight_bytes()).collect();
        let total: usize = parts.iter().sum();
        // The sum is larger because of panels at the ends of parts, and the K and V projections of heads that two ranks hold.
        assert!((whole..whole + whole / 8).contains(&total), "{parts:?} of {whole}");
        assert!(parts.iter().all(|part| *part < whole / ranks * 5 / 4), "{parts:?} of {whole}");
    }
}

#[test]
fn more_ranks_than_query_heads_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    TinyModel::default().write(directory.path()).unwrap();
    let seat = seats(5).pop().unwrap();
    let error = CpuExecutor::load_rank(directory.path(), CpuOptions::default(), seat).err().unwrap();
    assert!(error.to_string().contains("has 4 query heads, which 5 ranks cannot share"), "{error}");
}

/// The outputs of the synthetic executor in all batches, from rank 0, and the digest of the pools. Other ranks draw nothing.
fn tokens(worker: &mut [Rank<Synthetic>], chunks: &[usize]) -> (Vec<SequenceOutput>, u64) {
    let batches = batches(chunks);
    let found = on_all(worker, |rank, part| {
        let forward = |batch| part.executor.forward(&mut part.kv, batch).unwrap();
        let outputs: Vec<SequenceOutput> = batches.iter().flat_map(forward).collect();
        assert!(rank == 0 || outputs.is_empty());
        outputs
    });
    let drawn = found.into_iter().flatten().filter(|output| !output.sampled.is_empty());
    let mut drawn: Vec<SequenceOutput> = drawn.collect();
    drawn.sort_by_key(|output| output.room);
    (drawn, kv_digest(worker))
}

fn synthetic(ranks: usize, kv_heads: usize, order: KvOrder) -> Vec<Rank<Synthetic>> {
    let shape = SyntheticShape { kv_heads, vocabulary: 1 << 30, ..SyntheticShape::default() };
    worker(ranks, order, Dtype::F32, |seat| Synthetic::for_rank(shape, Cost::default(), seat).unwrap())
}

#[test]
fn synthetic_answers_are_the_same_for_every_number_of_ranks_and_layout() {
    for kv_heads in [1, 2, 3, 8] {
        let expected = tokens(&mut synthetic(1, kv_heads, KvOrder::PageHeadLayerKvTokenDim), &[100]);
        assert_eq!(expected.0.len(), 9 + 7 + 9, "{:?}", expected.0);
        for (ranks, order) in (1..=8).flat_map(|ranks| KvOrder::ALL.map(|order| (ranks, order))) {
            let found = tokens(&mut synthetic(ranks, kv_heads, order), &[9, 20]);
            assert_eq!(found, expected, "{kv_heads} heads over {ranks} ranks, {order}");
        }
    }
}

#[test]
fn every_ranks_bytes_matter_also_those_of_a_head_that_another_holds_too() {
    let batches = batches(&[100]);
    let (last, before) = batches.split_last().unwrap();
    for (kv_heads, ranks) in [(4, 2), (2, 4), (1, 3)] {
        let mut worker = synthetic(ranks, kv_heads, KvOrder::PageHeadLayerKvTokenDim);
        for batch in before {
            on_all(&mut worker, |_, part| part.executor.forward(&mut part.kv, batch).unwrap());
        }
        let mut next = |flipped: Option<usize>| {
            let sequence = &last.sequences[0];
            let flip = |part: &mut Rank<Synthetic>| {
                part.kv.write_row(sequence.pages[1], 0, 1, 1, 2)[5] ^= 1;
            };
            let outputs = on_all(&mut worker, |rank, part| {
                let flipped = flipped == Some(rank);
                if flipped {
                    flip(part);
                }
                let outputs = part.executor.forward(&mut part.kv, last).unwrap();
                if flipped {
                    flip(part);
                }
                outputs
            });
            outputs[0][0].sampled[0].token
        };
        let right = next(None);
        for rank in 0..ranks {
            assert_ne!(next(Some(rank)), right, "{kv_heads} heads, rank {rank} of {ranks}");
        }
        assert_eq!(next(None), right);
    }
}

#[test]
fn a_batch_that_one_rank_cannot_compute_fails_on_all_and_the_next_is_computed() {
    let directory = tempfile::tempdir().unwrap();
    TinyModel::default().write(directory.path()).unwrap();
    let mut worker =
        worker(3, KvOrder::PageHeadLayerKvTokenDim, Dtype::F32, |seat| load(directory.path(), 1, seat));
    let batch = &batches(&[100])[0];
    let right = logits(&mut worker, &[100]);
    let failed = on_all(&mut worker, |rank, part| {
        let mut batch = batch.clone();
        if rank == 1 {
            batch.sequences[0].pages.truncate(1);
        }
        part.executor.forward(&mut part.kv, &batch).unwrap_err().to_string()
    });
    assert!(failed[1].contains("1 pages of 8 tokens"), "{failed:?}");
    for rank in [0, 2] {
        assert_eq!(failed[rank], "the executor failed: rank 1 gave the batch up");
    }
    assert!(logits(&mut worker, &[100]) == right);
}

//! Tests the promise of the CUDA executor: the bits of the CPU executor, for any batch, chunks, layout of the pool and number of
//! ranks.
//!
//! By default the tests run on the stand-in for NVIDIA's driver, which computes on the CPU. With `HOST_CUDA=device` they run on the
//! GPU of this machine, and `NVRTC` names the compiler's library or a folder with it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

use std::path::Path;
use std::sync::{LazyLock, Mutex};
use std::thread;

use host_core::heads::{counted_heads, rank_heads};
use host_core::layout::KvOrder;
use host_core::window::WindowPages;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sampling, Scored, Sequence, SequenceOutput};
use host_executor::cpu::{CpuExecutor, CpuOptions};
use host_executor::cuda::{CudaExecutor, CudaMath, CudaOptions, TENSOR_MATH};
use host_executor::digest::{self, PagePart};
use host_executor::group::{Seat, seats};
use host_executor::{Executor, ExecutorError, KvMemory};
use host_tests::cuda::is_on_device;
use host_tests::model::{Family, Stored, TinyModel};
use host_tests::skip::skipped;
use libloading::os::unix::{Library, RTLD_NOW};

const PAGE_TOKENS: usize = 8;
/// Pages of each sequence.
const PAGES: u32 = 12;
const PLAIN: KvOrder = KvOrder::PageHeadLayerKvTokenDim;

/// An executor that can return logits.
trait Logits: Executor {
    fn logits(&mut self, kv: &mut KvMemory, batch: &Batch) -> Result<&[f32], ExecutorError>;
}

impl Logits for CpuExecutor {
    fn logits(&mut self, kv: &mut KvMemory, batch: &Batch) -> Result<&[f32], ExecutorError> {
        self.forward_logits(kv, batch)
    }
}

impl Logits for CudaExecutor {
    fn logits(&mut self, kv: &mut KvMemory, batch: &Batch) -> Result<&[f32], ExecutorError> {
        self.forward_logits(kv, batch)
    }
}

/// One rank: its executor and its pool.
struct Rank<E> {
    executor: E,
    kv: KvMemory,
}

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
        let kv = executor.pool(KvLayout::new(shape, order), heads.start).unwrap();
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

fn sequence(index: usize, tokens: &[u32], start: usize) -> Sequence {
    let page = |page: u32| PageId((page * 3 + index as u32 + 5) % (3 * PAGES));
    Sequence {
        room: Room(index as u64),
        tokens: tokens.to_vec(),
        start: start as u32,
        pages: (0..PAGES).map(page).collect(),
        window: WindowPages::default(),
        recompute: 0..0,
        drafted: 0,
        sample: Some(Sampling::GREEDY.into()),
        scored: None,
    }
}

/// Batches that compute three sequences in chunks of these sizes, and their last eight tokens one by one, as in decode.
fn batches(chunks: &[usize]) -> Vec<Batch> {
    let sequences: Vec<Vec<u32>> =
        [(1, 61), (2, 7), (3, 30)].map(|(seed, length)| prompt(seed, length)).into();
    let mut done = vec![0; sequences.len()];
    let mut batches = Vec::new();
    while done.iter().zip(&sequences).any(|(done, tokens)| *done < tokens.len()) {
        let chunk = chunks[batches.len() % chunks.len()];
        let mut batch = Batch { id: batches.len() as u64, sequences: Vec::new(), layer_group: 0 };
        for (index, (tokens, done)) in sequences.iter().zip(&mut done).enumerate() {
            let prefill = tokens.len().saturating_sub(8).max(1);
            let end = if *done < prefill { prefill.min(*done + chunk) } else { tokens.len().min(*done + 1) };
            if *done < end {
                batch.sequences.push(sequence(index, &tokens[*done..end], *done));
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
    let of_rank = |(rank, part): (usize, &Rank<E>)| {
        let layers = 0..part.kv.layout().shape.layers;
        let heads = counted_heads(kv_heads, worker.len(), rank);
        let whole = |page: u32| PagePart {
            page: PageId(page),
            index: page as usize,
            layers: layers.clone(),
            heads: heads.clone(),
            tokens: PAGE_TOKENS,
        };
        let all: Vec<PagePart> = (0..3 * PAGES).map(whole).collect();
        digest::sum(digest::parts(&part.kv, &all).unwrap())
    };
    digest::sum(worker.iter().enumerate().map(of_rank))
}

/// Bits of all logits by sequence, and the digest of the pools at the end.
fn logits<E: Logits>(worker: &mut [Rank<E>], chunks: &[usize]) -> (Vec<u32>, u64) {
    let batches = batches(chunks);
    let vocabulary = worker[0].executor.shape().vocabulary;
    let found = on_all(worker, |_rank, part| {
        let mut logits = [const { Vec::new() }; 3];
        for batch in &batches {
            let mut rows = part.executor.logits(&mut part.kv, batch).unwrap().chunks_exact(vocabulary);
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

fn on_cpu(directory: &Path, seat: Seat) -> CpuExecutor {
    CpuExecutor::load_rank(directory, CpuOptions { threads: 1, ..CpuOptions::default() }, seat).unwrap()
}

static STAND_IN: LazyLock<Library> = LazyLock::new(|| {
    // SAFETY: our own library, without initialisers.
    unsafe { Library::open(Some(host_tests::cuda::library()), RTLD_NOW) }.unwrap()
});

/// Lets one test run at a time, because the stand-in's settings apply to all tests.
static ONE: Mutex<()> = Mutex::new(());

/// Options for this machine's GPU or for the stand-in, with exact math.
fn options() -> CudaOptions {
    if is_on_device() {
        let nvrtc = std::env::var_os("NVRTC").map(Into::into);
        return CudaOptions { nvrtc, math: CudaMath::Exact, ..CudaOptions::default() };
    }
    // The driver's name then finds the library that is loaded already.
    LazyLock::force(&STAND_IN);
    CudaOptions { nvrtc: Some(host_tests::cuda::library()), math: CudaMath::Exact, ..CudaOptions::default() }
}

fn on_gpu(directory: &Path, seat: Seat) -> CudaExecutor {
    CudaExecutor::load_rank(directory, &options(), seat).unwrap()
}

#[test]
fn a_models_logits_and_kv_are_those_of_the_cpu() {
    let _one = ONE.lock();
    for (family, stored, tied) in [
        (Family::Qwen3, Stored::Bf16, false),
        (Family::Llama, Stored::F32, true),
        (Family::Llama, Stored::F16, false),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let model = TinyModel { family, stored, tied, layers: 2, seed: 7, ..TinyModel::default() };
        model.write(directory.path()).unwrap();
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut cpu = worker(1, PLAIN, dtype, |seat| on_cpu(directory.path(), seat));
            let expected = logits(&mut cpu, &[usize::MAX / 2]);
            assert!(expected.0.iter().all(|bits| f32::from_bits(*bits).is_finite()));
            for (ranks, chunks, order) in [
                (1, &[1][..], PLAIN),
                (1, &[100], KvOrder::LayerKvPageTokenHeadDim),
                (1, &[16, 5], KvOrder::PageLayerHeadKvTokenDim),
                (2, &[16, 5], PLAIN),
                (3, &[100], KvOrder::LayerKvPageTokenHeadDim),
            ] {
                let mut gpu = worker(ranks, order, dtype, |seat| on_gpu(directory.path(), seat));
                let found = logits(&mut gpu, chunks);
                let how = format!("{family:?} {stored:?}, KV {dtype}, {ranks} ranks, {chunks:?}, {order}");
                assert!(found.0 == expected.0, "logits: {how}");
                assert!(found.1 == expected.1, "KV: {how}");
            }
        }
    }
}

/// The outputs of all batches, sequence by sequence.
fn drawn<E: Executor>(worker: &mut [Rank<E>], batches: &[Batch]) -> Vec<SequenceOutput> {
    let part = &mut worker[0];
    batches.iter().flat_map(|batch| part.executor.forward(&mut part.kv, batch).unwrap()).collect()
}

#[test]
fn what_is_drawn_is_what_the_cpu_draws_with_seeds_and_guesses() {
    let _one = ONE.lock();
    let directory = tempfile::tempdir().unwrap();
    TinyModel { layers: 2, seed: 3, ..TinyModel::default() }.write(directory.path()).unwrap();
    let mut batches = batches(&[16, 5]);
    for (index, sequence) in batches.iter_mut().flat_map(|batch| &mut batch.sequences).enumerate() {
        let sampling = Sampling { temperature: 0.9, seed: index as u64, top_p: 0.9, ..Sampling::GREEDY };
        sequence.sample = Some(sampling.into());
        // The last token counts as drafted.
        sequence.drafted = u32::from(sequence.tokens.len() > 1);
    }
    let expected = drawn(&mut worker(1, PLAIN, Dtype::Bf16, |seat| on_cpu(directory.path(), seat)), &batches);
    let found = drawn(&mut worker(1, PLAIN, Dtype::Bf16, |seat| on_gpu(directory.path(), seat)), &batches);
    assert_eq!(found, expected);
}

#[test]
fn the_log_probabilities_of_prompts_are_those_of_the_cpu() {
    let _one = ONE.lock();
    let directory = tempfile::tempdir().unwrap();
    TinyModel { layers: 2, seed: 3, ..TinyModel::default() }.write(directory.path()).unwrap();
    let mut batches = batches(&[16, 5]);
    for (index, sequence) in batches.iter_mut().flat_map(|batch| &mut batch.sequences).enumerate() {
        // Others draw in the same batches.
        if sequence.room == Room(1) {
            continue;
        }
        let mut next = sequence.tokens.clone();
        next.rotate_left(1);
        next.truncate(next.len() - index % 2);
        (sequence.sample, sequence.scored) = (None, Some(Scored { next, top: 2 }));
    }
    let expected = drawn(&mut worker(1, PLAIN, Dtype::Bf16, |seat| on_cpu(directory.path(), seat)), &batches);
    assert!(expected.iter().any(|output| output.scored.len() > 10));
    let found = drawn(&mut worker(1, PLAIN, Dtype::Bf16, |seat| on_gpu(directory.path(), seat)), &batches);
    assert_eq!(found, expected);
}

#[test]
fn kv_is_there_for_other_streams_when_a_batch_returns_in_which_nothing_is_drawn() {
    let _one = ONE.lock();
    let directory = tempfile::tempdir().unwrap();
    TinyModel { layers: 2, ..TinyModel::default() }.write(directory.path()).unwrap();
    let mut batches = batches(&[16, 5]);
    batches.iter_mut().flat_map(|batch| &mut batch.sequences).for_each(|sequence| sequence.sample = None);
    for ranks in [1, 2] {
        let mut cpu = worker(ranks, PLAIN, Dtype::Bf16, |seat| on_cpu(directory.path(), seat));
        let mut gpu = worker(ranks, PLAIN, Dtype::Bf16, |seat| on_gpu(directory.path(), seat));
        for batch in &batches {
            let expected = computed(&mut cpu, batch);
            // Digests are computed in a stream of the pool, which does not wait for other streams.
            assert_eq!(computed(&mut gpu, batch), expected, "{ranks} ranks, batch {}", batch.id);
        }
    }
}

/// Computes a batch in which nothing is drawn. Returns the digest of the pools after it.
fn computed<E: Executor>(worker: &mut [Rank<E>], batch: &Batch) -> u64 {
    let drawn = on_all(worker, |_rank, part| part.executor.forward(&mut part.kv, batch).unwrap());
    assert!(drawn.iter().flatten().all(|output| output.sampled.is_empty()));
    kv_digest(worker)
}

#[test]
fn nothing_is_written_any_more_when_a_batch_returns_that_failed_on_its_way() {
    let _one = ONE.lock();
    if is_on_device() {
        return skipped("a batch that fails on its way: a device refuses no launch");
    }
    let directory = tempfile::tempdir().unwrap();
    TinyModel { layers: 2, ..TinyModel::default() }.write(directory.path()).unwrap();
    let batches = batches(&[16, 5]);
    for launches in [12, 30] {
        let mut gpu = worker(1, PLAIN, Dtype::Bf16, |seat| on_gpu(directory.path(), seat));
        let Rank { executor, kv } = &mut gpu[0];
        // The first batch grows the executor's memory. Freeing memory waits for all work, which must not happen later.
        executor.forward(kv, &batches[0]).unwrap();
        pretend(b"fake_refused_after", launches);
        let error = executor.forward(kv, &batches[1]).unwrap_err();
        assert!(matches!(error, ExecutorError::Failed(_)), "{error}");
        let found = kv_digest(&gpu);
        // An empty batch waits for all work in the executor's stream.
        let Rank { executor, kv } = &mut gpu[0];
        executor.forward(kv, &Batch { sequences: Vec::new(), ..batches[1].clone() }).unwrap();
        assert_eq!(kv_digest(&gpu), found, "refused after {launches} launches");
    }
}

#[test]
fn a_batch_that_cannot_be_computed_is_refused_and_the_next_is_computed() {
    let _one = ONE.lock();
    let directory = tempfile::tempdir().unwrap();
    TinyModel { layers: 2, ..TinyModel::default() }.write(directory.path()).unwrap();
    let mut gpu = worker(1, PLAIN, Dtype::Bf16, |seat| on_gpu(directory.path(), seat));
    let part = &mut gpu[0];
    let mut refused = |sequence: Sequence| {
        let batch = Batch { id: 1, sequences: vec![sequence], layer_group: 0 };
        part.executor.forward(&mut part.kv, &batch).unwrap_err().to_string()
    };
    let right = sequence(0, &[1, 2, 3], 0);
    let token = refused(Sequence { tokens: vec![1, 70_000], ..right.clone() });
    assert!(token.contains("token 70000 of a vocabulary of"), "{token}");
    let pages = refused(Sequence { pages: vec![PageId(1)], start: 8, ..right.clone() });
    assert!(pages.contains("1 pages of 8 tokens for 11 positions"), "{pages}");
    let outside = refused(Sequence { pages: vec![PageId(3 * PAGES)], ..right.clone() });
    assert!(outside.contains("page 36 of a pool of 36"), "{outside}");
    let host = KvMemory::new(*part.kv.layout()).unwrap();
    let batch = Batch { id: 2, sequences: vec![right], layer_group: 0 };
    let elsewhere = part.executor.forward(&mut { host }, &batch).unwrap_err().to_string();
    assert!(elsewhere.contains("the KV pool is not in the memory of a device"), "{elsewhere}");
    assert_eq!(part.executor.forward(&mut part.kv, &batch).unwrap().len(), 1);
}

#[test]
fn a_device_that_is_lost_is_told_apart_from_a_batch_that_cannot_be_computed() {
    let _one = ONE.lock();
    if is_on_device() {
        return skipped("a lost device: one that is there would stay lost");
    }
    let directory = tempfile::tempdir().unwrap();
    TinyModel { layers: 2, ..TinyModel::default() }.write(directory.path()).unwrap();
    let mut gpu = worker(1, PLAIN, Dtype::Bf16, |seat| on_gpu(directory.path(), seat));
    let part = &mut gpu[0];
    let batch = Batch { id: 1, sequences: vec![sequence(0, &[1, 2, 3], 0)], layer_group: 0 };
    let expected = part.executor.forward(&mut part.kv, &batch).unwrap();
    for code in [700, 719, 214] {
        lose(code);
        let error = part.executor.forward(&mut part.kv, &batch).unwrap_err();
        lose(0);
        assert!(matches!(error, ExecutorError::Lost(_)), "{code}: {error}");
        assert!(error.to_string().contains("the GPU is lost for this process"), "{error}");
    }
    // If the driver only refuses a call, the batch fails and the executor is not lost.
    lose(1);
    let error = part.executor.forward(&mut part.kv, &batch).unwrap_err();
    lose(0);
    assert!(matches!(error, ExecutorError::Failed(_)), "{error}");
    assert_eq!(part.executor.forward(&mut part.kv, &batch).unwrap(), expected);
}

/// Makes the stand-in answer with this code from now on.
fn lose(code: i32) {
    pretend(b"fake_lost", code);
}

/// Calls a function of the stand-in that changes its settings.
fn pretend(what: &[u8], value: i32) {
    // SAFETY: driver.c has functions of these names, each with one number.
    unsafe { STAND_IN.get::<unsafe extern "C" fn(i32)>(what).unwrap()(value) }
}

#[test]
fn models_and_devices_that_cannot_be_used_are_told() {
    let _one = ONE.lock();
    let directory = tempfile::tempdir().unwrap();
    TinyModel::gemma3().write(directory.path()).unwrap();
    let error =
        CudaExecutor::load_rank(directory.path(), &options(), Seat::alone()).err().unwrap().to_string();
    assert!(
        error.contains("has layers with a sliding window") && error.contains("--executor cpu"),
        "{error}"
    );
    let far = CudaOptions { device: 9, ..options() };
    let error = CudaExecutor::load_rank(directory.path(), &far, Seat::alone()).err().unwrap().to_string();
    assert!(error.contains("cannot open device 9"), "{error}");
}

/// A model with sizes that the tensor cores' kernels support.
fn even(family: Family) -> TinyModel {
    let sizes = TinyModel { family, layers: 3, hidden: 256, heads: 8, kv_heads: 2, ..TinyModel::default() };
    TinyModel {
        head_dim: if family == Family::Qwen3 { 128 } else { 64 },
        intermediate: 640,
        vocabulary: 1008,
        seed: 5,
        ..sizes
    }
}

#[test]
fn tensor_cores_give_the_same_bits_for_any_batch_and_chunks_and_are_near_the_cpu() {
    let _one = ONE.lock();
    if !is_on_device() {
        return skipped("tensor cores, which only a GPU has: HOST_CUDA=device takes the one of this machine");
    }
    for family in [Family::Llama, Family::Qwen3] {
        let directory = tempfile::tempdir().unwrap();
        even(family).write(directory.path()).unwrap();
        let options = CudaOptions { math: CudaMath::Tensor, ..options() };
        let load = |seat| CudaExecutor::load_rank(directory.path(), &options, seat).unwrap();
        let mut whole = worker(1, PLAIN, Dtype::Bf16, load);
        assert_eq!(whole[0].executor.shape().math, TENSOR_MATH);
        let expected = logits(&mut whole, &[100]);
        for (chunks, order) in [
            (&[1][..], PLAIN),
            (&[16, 5], KvOrder::LayerKvPageTokenHeadDim),
            (&[3, 50], KvOrder::PageLayerHeadKvTokenDim),
        ] {
            let found = logits(&mut worker(1, order, Dtype::Bf16, load), chunks);
            assert!(found.0 == expected.0, "{family:?}, logits in chunks of {chunks:?}, {order}");
            assert!(found.1 == expected.1, "{family:?}, KV in chunks of {chunks:?}, {order}");
        }
        // The same tokens again. Now the likeliest tokens are found on the device.
        let (drawn, read) = (drawn(&mut worker(1, PLAIN, Dtype::Bf16, load), &batches(&[100])), &expected.0);
        let rows: Vec<Vec<f32>> = read
            .chunks_exact(1008)
            .map(|row| row.iter().map(|bits| f32::from_bits(*bits)).collect())
            .collect();
        let likeliest =
            |row: &[f32]| (0..1008).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
        let of_room = |room: u64| {
            let all: Vec<u32> = drawn
                .iter()
                .filter(|output| output.room == Room(room))
                .flat_map(|output| output.sampled.iter().map(|sampled| sampled.token))
                .collect();
            all
        };
        let first = of_room(0);
        let tail: Vec<u32> = rows[..61][61 - first.len()..].iter().map(|row| likeliest(row)).collect();
        assert_eq!(first, tail, "{family:?}");
        let cpu = logits(&mut worker(1, PLAIN, Dtype::Bf16, |seat| on_cpu(directory.path(), seat)), &[100]);
        let (mut apart, mut size) = (0.0, 0.0);
        for (found, expected) in
            expected.0.iter().zip(&cpu.0).map(|(a, b)| (f32::from_bits(*a), f32::from_bits(*b)))
        {
            apart += f64::from(found - expected).powi(2);
            size += f64::from(expected).powi(2);
        }
        let apart = (apart / size).sqrt();
        println!("{family:?}: {apart:.4} of the logits' size apart from the CPU's");
        assert!(apart < 0.05, "{family:?}: {apart}");
    }
}

//! Uses the executor as the scheduler does: batches in, tokens out.

use std::path::Path;

use host_core::layout::KvOrder;
use host_core::window::WindowPages;
use host_core::{Batch, Draw, Dtype, KvLayout, KvShape, PageId, Room, Sampling, Scored, Sequence};
use host_executor::cpu::{CpuExecutor, CpuOptions, read_shape};
use host_executor::{Executor, KvMemory};
use host_tests::model::{tiny_gemma3, tiny_qwen3};

const GREEDY: Sampling = Sampling::GREEDY;

fn setup(seed: u64) -> (CpuExecutor, KvMemory) {
    load(tiny_qwen3, seed)
}

/// Writes the model of a seed.
type Write = fn(&Path, u64) -> std::io::Result<()>;

fn load(write: Write, seed: u64) -> (CpuExecutor, KvMemory) {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), seed).unwrap();
    let executor =
        CpuExecutor::load(directory.path(), CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
    assert_eq!(*executor.shape(), read_shape(directory.path()).unwrap());
    let shape = KvShape {
        pages: 40,
        heads: 2,
        layers: executor.shape().page_layers(),
        page_tokens: 16,
        head_dim: 16,
        value_dim: 16,
        dtype: Dtype::Bf16,
    };
    (executor, KvMemory::new(KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim)).unwrap())
}

fn sequence(tokens: Vec<u32>, start: u32, sample: Option<Draw>) -> Sequence {
    let pages = (0..40).map(PageId).collect();
    // For a model with sliding layers, the first ten pages are the full part, and the others are the window's, three per page.
    let window = WindowPages { first: 0, pages: (10..40).map(PageId).collect() };
    Sequence {
        room: Room(1),
        tokens,
        start,
        pages,
        window,
        recompute: 0..0,
        drafted: 0,
        sample,
        scored: None,
    }
}

fn generate(
    executor: &mut CpuExecutor,
    kv: &mut KvMemory,
    prompt: &[u32],
    sampling: Sampling,
    steps: usize,
) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    let mut done = 0;
    for id in 0..steps as u64 {
        let next = sequence(tokens[done..].to_vec(), done as u32, Some(sampling.clone().into()));
        done = tokens.len();
        let outputs = executor.forward(kv, &Batch { id, sequences: vec![next], layer_group: 0 }).unwrap();
        tokens.push(outputs[0].sampled[0].token);
    }
    tokens.split_off(prompt.len())
}

/// Checks the fixture: tests that compare answers of the made-up models can see a wrong token only if the tokens vary.
#[test]
fn greedy_text_of_the_made_up_model_is_varied_and_does_not_end_early() {
    // Gemma-3's output matrix is its embedding, so the last token comes again more often.
    let kinds: [(Write, usize, std::ops::Range<u64>); 2] = [(tiny_qwen3, 60, 0..8), (tiny_gemma3, 40, 8..16)];
    let models =
        kinds.into_iter().flat_map(|(write, least, seeds)| seeds.map(move |seed| (write, least, seed)));
    for (write, least, seed) in models {
        let (mut executor, mut kv) = load(write, seed);
        let prompt: Vec<u32> = (0..20).map(|i| i * 13 % 300).collect();
        let tokens = generate(&mut executor, &mut kv, &prompt, GREEDY, 128);
        let distinct: std::collections::BTreeSet<_> = tokens.iter().collect();
        assert!(distinct.len() >= least, "seed {seed}: {} distinct tokens in {tokens:?}", distinct.len());
        assert!(tokens.iter().all(|&token| token < 556), "seed {seed}: a special token in {tokens:?}");
    }
}

#[test]
fn sampled_text_is_fixed_by_its_seed() {
    let (mut executor, mut kv) = setup(3);
    let prompt = [5, 6, 7];
    let mut text = |seed| {
        let sampling =
            Sampling { temperature: 1.0, top_p: 0.9, top_k: 50, seed, logprobs: Some(5), ..GREEDY };
        generate(&mut executor, &mut kv, &prompt, sampling, 40)
    };
    let (a, b, c) = (text(1), text(1), text(2));
    assert_eq!(a, b);
    assert_ne!(a, c);
}

#[test]
fn only_sequences_that_ask_get_a_sample_and_it_is_their_own() {
    let (mut executor, mut kv) = setup(3);
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| (0..20).map(|t| (t * 31 + i * 7) % 500).collect()).collect();
    let alone: Vec<u32> =
        prompts.iter().map(|prompt| generate(&mut executor, &mut kv, prompt, GREEDY, 1)[0]).collect();
    assert!(alone.iter().any(|token| *token != alone[0]));
    let sequences = prompts.iter().zip(0u32..).map(|(prompt, i)| Sequence {
        room: Room(u64::from(i)),
        pages: vec![PageId(i * 2), PageId(i * 2 + 1)],
        sample: (i != 1).then_some(Draw::from(Sampling { logprobs: Some(2), ..GREEDY })),
        ..sequence(prompt.clone(), 0, None)
    });
    let outputs =
        executor.forward(&mut kv, &Batch { id: 1, sequences: sequences.collect(), layer_group: 0 }).unwrap();
    for (i, output) in outputs.iter().enumerate() {
        assert_eq!(output.room, Room(i as u64));
        let Some(sampled) = output.sampled.first() else {
            assert_eq!(i, 1);
            continue;
        };
        assert_eq!(sampled.token, alone[i]);
        assert_eq!(sampled.top.len(), 2);
        assert_eq!((sampled.top[0].0, Some(sampled.top[0].1)), (sampled.token, sampled.logprob));
    }
}

#[test]
fn the_log_probabilities_of_a_prompt_are_those_of_its_logits_however_it_is_cut() {
    for write in [tiny_qwen3 as Write, tiny_gemma3] {
        let (mut executor, mut kv) = load(write, 5);
        let vocabulary = executor.shape().vocabulary;
        let prompt: Vec<u32> = (0..40).map(|t| (t * 31 + 7) % 500).collect();
        let whole = Batch { id: 1, sequences: vec![sequence(prompt.clone(), 0, None)], layer_group: 0 };
        let logits = executor.forward_logits(&mut kv, &whole).unwrap().to_vec();
        let expected: Vec<f64> = logits
            .chunks_exact(vocabulary)
            .zip(&prompt[1..])
            .map(|(row, token)| {
                let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
                f64::from(row[*token as usize]) - sum.ln()
            })
            .collect();
        let mut found = Vec::new();
        for chunk in [40, 7, 1] {
            let mut scored = Vec::new();
            for start in (0..prompt.len()).step_by(chunk) {
                let end = prompt.len().min(start + chunk);
                let next = prompt[start + 1..prompt.len().min(end + 1)].to_vec();
                let part = Sequence {
                    scored: Some(Scored { next: next.clone(), top: 3 }),
                    ..sequence(prompt[start..end].to_vec(), start as u32, None)
                };
                // A sequence that draws is in the batch, too, before and behind it.
                let other = |room, page| Sequence {
                    room: Room(room),
                    pages: vec![PageId(page)],
                    window: WindowPages {
                        first: 0,
                        pages: (0..3).map(|part| PageId(3 * page + 10 + part)).collect(),
                    },
                    ..sequence(vec![3, 4], 0, Some(GREEDY.into()))
                };
                let sequences = vec![other(2, 8), part, other(3, 9)];
                let outputs = executor.forward(&mut kv, &Batch { id: 1, sequences, layer_group: 0 }).unwrap();
                let [before, part, behind] = &outputs[..] else { panic!("{outputs:?}") };
                assert_eq!((before.sampled.len(), &before.sampled), (1, &behind.sampled));
                assert!(part.sampled.is_empty() && before.scored.is_empty());
                assert_eq!(part.scored.iter().map(|scored| scored.token).collect::<Vec<_>>(), next);
                scored.extend(part.scored.clone());
            }
            for (scored, expected) in scored.iter().zip(&expected) {
                let logprob = f64::from(scored.logprob.unwrap());
                assert!((logprob - expected).abs() < 1e-4, "{logprob}, {expected} expected");
                assert!(scored.top.len() == 3 && f64::from(scored.top[0].1) >= logprob);
            }
            assert_eq!(scored.len(), prompt.len() - 1);
            found.push(scored);
        }
        assert!(found.iter().all(|scored| *scored == found[0]), "to the last bit");
    }
}

#[test]
fn batches_that_cannot_be_computed_are_refused() {
    let (mut executor, mut kv) = setup(0);
    let pages = |ids: &[u32]| ids.iter().copied().map(PageId).collect::<Vec<_>>();
    let good = sequence(vec![1, 2, 3], 0, None);
    for (sequence, reason) in [
        (Sequence { tokens: vec![], ..good.clone() }, "no tokens"),
        (Sequence { tokens: vec![1, 559], ..good.clone() }, "token 559 of a vocabulary of 559"),
        (Sequence { pages: pages(&[]), ..good.clone() }, "0 pages of 16 tokens for 3 positions"),
        (Sequence { pages: pages(&[0]), start: 14, ..good.clone() }, "1 pages of 16 tokens for 17 positions"),
        (Sequence { pages: pages(&[40]), ..good.clone() }, "page 40 of a pool of 40"),
        (Sequence { start: 4094, ..good.clone() }, "4097 positions, the model has 4096"),
        (Sequence { start: u32::MAX, ..good.clone() }, "positions, the model has 4096"),
    ] {
        let error = executor
            .forward(&mut kv, &Batch { id: 1, sequences: vec![sequence], layer_group: 0 })
            .unwrap_err()
            .to_string();
        assert!(error.contains(reason), "{error:?} does not say {reason:?}");
    }
    let mut other = KvMemory::new(KvLayout::new(
        KvShape {
            pages: 4,
            heads: 1,
            layers: 4,
            page_tokens: 16,
            head_dim: 16,
            value_dim: 16,
            dtype: Dtype::F32,
        },
        KvOrder::PageHeadLayerKvTokenDim,
    ))
    .unwrap();
    let error = executor
        .forward(&mut other, &Batch { id: 1, sequences: vec![good], layer_group: 0 })
        .unwrap_err()
        .to_string();
    assert!(error.contains("(4, 0..1, 16)") && error.contains("(4, 0..2, 16)"), "{error}");
    assert!(
        executor.forward(&mut kv, &Batch { id: 1, sequences: vec![], layer_group: 0 }).unwrap().is_empty()
    );
}

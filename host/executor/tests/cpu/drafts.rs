//! Tokens that are verified together equal those that are drawn one by one, to the last bit, for any drafted tokens.

use super::world::{Computes, GREEDY, Kind, Table, World};
use host_core::{Draw, Sampled, Sampling, Sequence, Shaping};
use host_executor::Sliding;
use host_executor::cpu::{CpuExecutor, CpuOptions};
use host_executor::group::Seat;
use host_executor::synthetic::{Cost, Synthetic, SyntheticShape};
use host_tests::model::{tiny_gemma3, tiny_qwen3};

/// Longer than the window, so that it moves while tokens are verified.
const PROMPT: usize = 37;
const ANSWER: usize = 40;

fn prompt() -> Vec<u32> {
    (0..PROMPT as u32).map(|i| i * 13 % 90 + 2).collect()
}

/// Settings whose draws depend on the tokens before, and some that do not.
fn settings() -> Vec<Sampling> {
    let hot = Sampling { temperature: 1.0, top_p: 0.9, seed: 7, logprobs: Some(3), ..GREEDY };
    let penalties = Shaping {
        repetition_penalty: 1.3,
        frequency_penalty: 0.4,
        presence_penalty: 0.2,
        bad_words: vec![vec![5, 6], vec![40]],
        min_tokens: 12,
        end_tokens: vec![3, 50],
        ..Shaping::default()
    };
    let shaping = Some(Box::new(penalties));
    vec![GREEDY, hot.clone(), Sampling { shaping: shaping.clone(), ..GREEDY }, Sampling { shaping, ..hot }]
}

/// The tokens that a sequence draws behind `known`, with a draft.
fn draws<E: Computes>(
    world: &mut World<E>,
    table: &mut Table,
    sampling: &Sampling,
    known: &[u32],
    draft: &[u32],
) -> Vec<Sampled> {
    let tokens = [&known[table.done..], draft].concat();
    world.turn(table, table.done, known.len() + draft.len());
    let sequence = Sequence {
        drafted: draft.len() as u32,
        sample: Some(Draw::next(sampling, &known[..PROMPT], 0, &known[PROMPT..])),
        scored: None,
        ..world.sequence(table, &tokens)
    };
    let drawn = world.draw(sequence);
    table.done = known.len() + drawn.len() - 1;
    drawn
}

fn one_by_one<E: Computes>(world: &mut World<E>, sampling: &Sampling) -> Vec<Sampled> {
    let (mut known, mut table) = (prompt(), Table::default());
    let step = |_step| {
        let drawn = draws(world, &mut table, sampling, &known, &[]);
        known.push(drawn[0].token);
        drawn
    };
    (0..ANSWER).flat_map(step).collect()
}

/// Checks that drafts of up to 6 tokens, of which a random number is right, give the same answer.
fn guessing<E: Computes>(world: &mut World<E>, sampling: &Sampling, answer: &[Sampled], seed: u64) {
    let (mut known, mut table) = (prompt(), Table::default());
    let mut random = fastrand::Rng::with_seed(seed);
    while known.len() < PROMPT + ANSWER {
        let done = known.len() - PROMPT;
        let most = (ANSWER - done - 1).min(6);
        let (count, right) = (random.usize(..=most), random.usize(..=most));
        let guess = |place: usize| answer[done + place].token + u32::from(place >= right);
        let draft: Vec<u32> = (0..count).map(guess).collect();
        let drawn = draws(world, &mut table, sampling, &known, &draft);
        assert_eq!(drawn.len(), right.min(count) + 1, "seed {seed}");
        assert_eq!(drawn, answer[done..done + drawn.len()], "seed {seed}");
        known.extend(drawn.iter().map(|drawn| drawn.token));
    }
}

fn check<E: Computes>(name: &str, load: impl Fn(Seat) -> E + Copy) {
    for (number, sampling) in settings().iter().enumerate() {
        let answer = one_by_one(&mut World::new(Kind::PLAIN, load), sampling);
        for (ranks, seed) in [(1, 1), (1, 2), (2, 3)] {
            println!("{name}, settings {number}, {ranks} ranks");
            guessing(&mut World::new(Kind { ranks, ..Kind::PLAIN }, load), sampling, &answer, seed);
        }
    }
}

#[test]
fn models_answer_the_same_whatever_was_guessed() {
    let directory = tempfile::tempdir().unwrap();
    let load = |seat: Seat| {
        let options = CpuOptions { threads: 1, ..CpuOptions::default() };
        CpuExecutor::load_rank(directory.path(), options, seat).unwrap()
    };
    tiny_qwen3(directory.path(), 5).unwrap();
    check("qwen3", load);
    tiny_gemma3(directory.path(), 5).unwrap();
    check("gemma3", load);
}

#[test]
fn the_synthetic_executor_answers_the_same_whatever_was_guessed() {
    for sliding in [None, Some(Sliding { layers: 5, window: 20 })] {
        let shape = SyntheticShape { layers: 7, sliding, vocabulary: 100, ..SyntheticShape::default() };
        check("synthetic", |seat| Synthetic::for_rank(shape, Cost::default(), seat).unwrap());
    }
}

//! Measures what each setting of sampling costs for a token: time, and instructions where valgrind is installed.
//!
//!     cargo bench -p host-executor --bench sampling_cost [-- ROUNDS]
//!
//! Tokens are drawn from made-up logits of Qwen3's vocabulary, behind a prompt of 4,000 tokens and 1,000 tokens of an answer. The
//! settings take turns. A time is the median of all rounds, 200 unless another number is given. It includes the copy of the tokens
//! so far that the scheduler makes for a draw. The ratio is to the first row.
//!
//! Instructions are those of this program under callgrind: what three tokens take beyond one, halved. They do not depend on what
//! else the machine does. Valgrind has no AVX-512, so kernels count with AVX2.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that fails")]
#![allow(clippy::disallowed_methods, reason = "measures time")]

use std::hint::black_box;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use host_core::{Draw, Sampling, Shaping};
use host_executor::sampling::sample;

const VOCABULARY: u32 = 151_936;
const PROMPT: usize = 4000;
const ANSWER: usize = 1000;
const ROUNDS: usize = 200;
/// The argument with which this program draws tokens and does not measure.
const DRAWS: &str = "draws";

/// What a token is drawn from.
struct Given {
    logits: Vec<f32>,
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

impl Given {
    fn made_up() -> Self {
        let mut random = fastrand::Rng::with_seed(7);
        // Most tokens are unlikely, and some are likely, as in a model's logits.
        let logits: Vec<f32> =
            (0..VOCABULARY).map(|_| 14.0 * random.f32().powi(12) - 20.0 * random.f32()).collect();
        let mut tokens =
            |count: usize| -> Vec<u32> { (0..count).map(|_| random.u32(0..VOCABULARY)).collect() };
        let (prompt, answer) = (tokens(PROMPT), tokens(ANSWER));
        Self { logits, prompt, answer }
    }

    fn draw(&self, sampling: &Sampling) -> u32 {
        let draw = Draw::next(black_box(sampling), &self.prompt, 0, &self.answer);
        sample(black_box(&self.logits), &draw, (PROMPT + ANSWER) as u64).token
    }
}

/// The settings, the plain one first.
fn settings() -> Vec<(&'static str, Sampling)> {
    let greedy = || Sampling::GREEDY;
    let drawn = || Sampling { temperature: 1.0, seed: 3, ..Sampling::GREEDY };
    let shaped = |shaping: Shaping| Sampling { shaping: Some(Box::new(shaping)), ..Sampling::GREEDY };
    let none = Shaping::default;
    let tokens = |count: u32| (0..count).map(|number| number * 7919 % VOCABULARY);
    let biases: Vec<(u32, f32)> = tokens(300).map(|token| (token, 0.5)).collect();
    // Half of the words have one token, half have two.
    let word = |token: u32| if token.is_multiple_of(2) { vec![token] } else { vec![token, token / 2] };
    let words: Vec<Vec<u32>> = tokens(100).map(word).collect();
    let penalties = Shaping { presence_penalty: 0.5, frequency_penalty: 0.3, ..none() };
    let ends = Shaping { min_tokens: 2000, end_tokens: vec![151_643, 151_645], ..none() };
    let all = Shaping {
        repetition_penalty: 1.1,
        logit_bias: biases.clone(),
        bad_words: words.clone(),
        min_tokens: ends.min_tokens,
        end_tokens: ends.end_tokens.clone(),
        ..penalties.clone()
    };
    vec![
        ("greedy", greedy()),
        ("greedy, `logprobs` 5", Sampling { logprobs: Some(5), ..greedy() }),
        ("greedy, `repetition_penalty`", shaped(Shaping { repetition_penalty: 1.1, ..none() })),
        ("greedy, `presence_penalty` and `frequency_penalty`", shaped(penalties)),
        ("greedy, `logit_bias` of 300 tokens", shaped(Shaping { logit_bias: biases, ..none() })),
        ("greedy, 100 `bad_words`", shaped(Shaping { bad_words: words, ..none() })),
        (
            "greedy, 100 `allowed_token_ids`",
            shaped(Shaping { allowed_tokens: tokens(100).collect(), ..none() }),
        ),
        ("greedy, `min_tokens` not reached", shaped(ends)),
        ("greedy, penalties, `logit_bias`, `bad_words`, `min_tokens`", shaped(all)),
        ("`temperature` 1", drawn()),
        ("`temperature` 1, `top_p` 0.9", Sampling { top_p: 0.9, ..drawn() }),
        ("`temperature` 1, `top_k` 40", Sampling { top_k: 40, ..drawn() }),
        ("`temperature` 1, `min_p` 0.05", Sampling { min_p: 0.05, ..drawn() }),
    ]
}

/// Instructions of a token with the settings of this number, if valgrind is there.
fn instructions(number: usize) -> Option<u64> {
    let program = std::env::current_exe().ok()?;
    let of = |tokens: &str| -> Option<u64> {
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(&program);
        let output = valgrind.args(["--bench", DRAWS, &number.to_string(), tokens]).output().ok()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let (_, rest) = said.rsplit_once("Collected : ")?;
        rest.lines().next()?.trim().parse().ok()
    };
    Some(of("3")?.checked_sub(of("1")?)? / 2)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.iter().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    let given = Given::made_up();
    let settings = settings();
    let values: Vec<&str> =
        arguments.iter().map(String::as_str).filter(|argument| !argument.starts_with("--")).collect();
    if let [DRAWS, number, tokens] = values[..] {
        let (_, sampling) = &settings[number.parse::<usize>().unwrap()];
        for _ in 0..tokens.parse::<usize>().unwrap() {
            black_box(given.draw(sampling));
        }
        return ExitCode::SUCCESS;
    }
    let rounds = values.first().map_or(ROUNDS, |rounds| rounds.parse().expect("a number of rounds"));
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); settings.len()];
    for _ in 0..rounds.max(1) {
        for ((_, sampling), times) in settings.iter().zip(&mut times) {
            let begun = Instant::now();
            black_box(given.draw(sampling));
            times.push(begun.elapsed());
        }
    }
    println!(
        "vocabulary {VOCABULARY}, prompt {PROMPT}, answer {ANSWER}, median of {} rounds\n",
        rounds.max(1)
    );
    println!("| Settings | µs a token | of greedy | Instructions a token | of greedy |");
    println!("| --- | ---: | ---: | ---: | ---: |");
    let (mut plain, mut plain_instructions) = (None, None);
    for (number, ((name, _), times)) in settings.iter().zip(&mut times).enumerate() {
        times.sort();
        let time = times[times.len() / 2].as_secs_f64() * 1e6;
        let ratio = time / *plain.get_or_insert(time);
        let counted = instructions(number).map_or("not counted | ".to_owned(), |count| {
            let first = *plain_instructions.get_or_insert(count);
            format!("{count} | {:.2}", count as f64 / first as f64)
        });
        println!("| {name} | {time:.0} | {ratio:.2} | {counted} |");
    }
    ExitCode::SUCCESS
}

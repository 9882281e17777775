//! Generated workloads, among them those that published tables were measured with.
//!
//! Prompts are drawn from a seed. Equal figures and seeds give equal workloads.

use std::time::Duration;

use host_sim::Random;

use crate::traffic::{Ask, Prompt, Workload};

/// Tokens of a generated block. Prompts share whole blocks.
pub const BLOCK: u32 = 100;

/// Prompts that share long beginnings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPrefixes {
    /// Different beginnings.
    pub prefixes: u64,
    /// Tokens of each, a multiple of 100.
    pub prefix_tokens: u32,
    /// Tokens behind it that only one prompt has, a multiple of 100.
    pub suffix_tokens: u32,
    /// Tokens of an answer.
    pub answer: u32,
    /// Requests in all.
    pub requests: usize,
}

impl SharedPrefixes {
    /// The workload of SGLang's pull request 19746: 91 % of a prompt are one of 20 beginnings of 50,000 tokens. The table there
    /// has 355 tokens of an answer for each request.
    pub const PULL_19746: Self =
        Self { prefixes: 20, prefix_tokens: 50_000, suffix_tokens: 4_500, answer: 355, requests: 1000 };

    /// The requests. Their beginnings are drawn from the seed.
    #[must_use]
    pub fn asks(&self, seed: u64) -> Vec<Ask> {
        let mut random = Random::new(seed);
        let (shared, own) = (u64::from(self.prefix_tokens / BLOCK), u64::from(self.suffix_tokens / BLOCK));
        // Behind the blocks of all beginnings.
        let owned = self.prefixes.max(1) * shared;
        let ask = |number: usize| {
            let prefix = random.below(self.prefixes.max(1)) * shared;
            let suffix = owned + number as u64 * own;
            let blocks: Vec<u64> = (prefix..prefix + shared).chain(suffix..suffix + own).collect();
            asked(blocks, self.answer)
        };
        (0..self.requests).map(ask).collect()
    }
}

fn asked(blocks: Vec<u64>, answer: u32) -> Ask {
    let tokens = u32::try_from(blocks.len()).unwrap_or(u32::MAX).saturating_mul(BLOCK);
    Ask { at: Duration::ZERO, prompt: Prompt { blocks, block_tokens: BLOCK, tokens }, answer }
}

/// Prompts of one length that share nothing.
#[must_use]
pub fn unshared(requests: usize, prompt_tokens: u32, answer: u32) -> Vec<Ask> {
    let blocks = u64::from(prompt_tokens.div_ceil(BLOCK));
    let ask = |number: u64| {
        let ask = asked((number * blocks..(number + 1) * blocks).collect(), answer);
        Ask { prompt: Prompt { tokens: prompt_tokens, ..ask.prompt }, ..ask }
    };
    (0..requests as u64).map(ask).collect()
}

/// Conversations whose prompts grow: each turn has everything that was said before, and adds so many tokens.
#[must_use]
pub fn conversations(count: usize, turns: &[u32], answer: u32, concurrency: usize) -> Workload {
    let blocks: u64 = turns.iter().map(|tokens| u64::from(tokens.div_ceil(BLOCK))).sum();
    let conversation = |number: u64| {
        let mut first = number * blocks;
        let turn = |tokens: &u32| {
            let ask = asked((first..first + u64::from(tokens.div_ceil(BLOCK))).collect(), answer);
            first += ask.prompt.blocks.len() as u64;
            Ask { prompt: Prompt { tokens: *tokens, ..ask.prompt }, ..ask }
        };
        turns.iter().map(turn).collect()
    };
    Workload::Conversations { turns: (0..count as u64).map(conversation).collect(), concurrency }
}

/// Lets requests arrive independently of each other, so many a second on average (a Poisson process).
///
/// # Panics
/// When the rate is not positive.
#[must_use]
pub fn poisson(asks: Vec<Ask>, per_second: f64, seed: u64) -> Workload {
    bursts(asks, per_second, 1, seed)
}

/// Lets requests arrive in bursts of so many at once, so many requests a second on average.
///
/// # Panics
/// When the rate is not positive.
#[must_use]
pub fn bursts(mut asks: Vec<Ask>, per_second: f64, burst: usize, seed: u64) -> Workload {
    assert!(per_second > 0.0, "a rate is positive: {per_second}");
    let mut random = Random::new(seed);
    let burst = burst.max(1);
    let mut now = 0.0;
    for asks in asks.chunks_mut(burst) {
        // The argument is above 0 and at most 1, so its logarithm is finite.
        now += -(1.0 - random.unit()).ln() * burst as f64 / per_second;
        let at = Duration::from_secs_f64(now);
        asks.iter_mut().for_each(|ask| ask.at = at);
    }
    Workload::Open(asks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_one_of_the_beginnings_and_nothing_else() {
        let asks = SharedPrefixes { requests: 300, ..SharedPrefixes::PULL_19746 }.asks(1);
        let shared = |one: &Ask, other: &Ask| {
            let blocks = one.prompt.blocks.iter().zip(&other.prompt.blocks);
            blocks.take_while(|(one, other)| one == other).count()
        };
        assert!(asks.iter().all(|ask| ask.prompt.tokens == 54_500 && ask.answer == 355));
        let first = &asks[0];
        let sizes: Vec<usize> = asks[1..].iter().map(|other| shared(first, other)).collect();
        assert!(sizes.iter().all(|size| *size == 0 || *size == 500), "{sizes:?}");
        let alike = sizes.iter().filter(|size| **size > 0).count();
        assert!((5..30).contains(&alike), "{alike} of 299 share one of 20 beginnings");
    }

    #[test]
    fn arrivals_come_at_their_rate_and_in_their_bursts() {
        for burst in [1, 25] {
            let Workload::Open(asks) = bursts(unshared(5000, 10, 1), 50.0, burst, 3) else { unreachable!() };
            let rate = 5000.0 / asks[4999].at.as_secs_f64();
            assert!((40.0..60.0).contains(&rate), "bursts of {burst}: {rate} a second");
            let mut times: Vec<Duration> = asks.iter().map(|ask| ask.at).collect();
            assert!(times.is_sorted());
            times.dedup();
            assert_eq!(times.len(), 5000 / burst);
        }
    }

    #[test]
    fn turns_of_conversations_are_new_text() {
        let Workload::Conversations { turns, .. } = conversations(3, &[4000, 150], 7, 2) else {
            unreachable!()
        };
        let mut blocks: Vec<u64> = turns.iter().flatten().flat_map(|ask| ask.prompt.blocks.clone()).collect();
        let all = blocks.len();
        blocks.sort_unstable();
        blocks.dedup();
        assert_eq!((all, blocks.len(), turns[2][1].prompt.tokens), (3 * 42, 3 * 42, 150));
    }
}

//! Sends the requests of a workload at their times, and collects what their clients saw.

use std::sync::Arc;
use std::time::Duration;

use host_simulate::recording::Curves;
use host_simulate::report::Figures;
use host_simulate::traffic::{Ask, Prompt};
use host_simulate::{Seen, Workload};
use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::answer::{Answered, ask};
use super::measured::Server;

/// A workload's results.
pub struct Run {
    /// What the clients saw.
    pub figures: Figures,
    /// The distributions of the latencies.
    pub curves: Curves,
    /// The share of the prompts' tokens that were in caches.
    pub found: f64,
    /// Why the first request that failed did.
    pub first_failure: Option<String>,
}

/// Sends the whole workload, whose tokens follow from `salt`: no cache has the prompts of another salt. `shown` gets the number of requests that have ended, each time when it has changed.
pub async fn drive(server: &Server, workload: &Workload, salt: u64, shown: impl Fn(usize)) -> Run {
    let begun = Instant::now();
    let mut conversations = JoinSet::new();
    let alone = |asks: &[Ask]| asks.iter().map(|ask| vec![ask.clone()]).collect::<Vec<_>>();
    let (all, concurrency) = match workload {
        Workload::Open(asks) => (alone(asks), None),
        Workload::Closed { asks, concurrency } => (alone(asks), Some(*concurrency)),
        Workload::Conversations { turns, concurrency } => (turns.clone(), Some(*concurrency)),
    };
    let mut answered: Vec<Answered> = Vec::new();
    let mut ended = |answers: Vec<Answered>| {
        answered.extend(answers);
        shown(answered.len());
    };
    let places = concurrency.map(|places| Arc::new(Semaphore::new(places)));
    for turns in all {
        let place = match &places {
            // The semaphore is never closed.
            Some(places) => places.clone().acquire_owned().await.ok(),
            None => {
                let at = begun + turns.first().map_or(Duration::ZERO, |ask| ask.at);
                sleep_until(at).await;
                None
            }
        };
        let server = server.clone();
        conversations.spawn(async move {
            let answers = converse(&server, turns, salt, begun).await;
            drop(place);
            answers
        });
        while let Some(answers) = conversations.try_join_next() {
            ended(joined(answers));
        }
    }
    while let Some(answers) = conversations.join_next().await {
        ended(joined(answers));
    }
    answered.sort_by_key(|answered| answered.seen.sent);
    let seen: Vec<Seen> = answered.iter().map(|answered| answered.seen).collect();
    let gaps: Vec<f64> = answered.iter().flat_map(|answered| answered.gaps.iter().copied()).collect();
    let cached: u64 = answered.iter().map(|answered| answered.cached).sum();
    let tokens: u64 = seen.iter().map(|seen| u64::from(seen.prompt)).sum();
    Run {
        figures: Figures::of(&seen, &gaps),
        curves: Curves::of(&seen, &gaps),
        found: cached as f64 / tokens.max(1) as f64,
        first_failure: answered.into_iter().find_map(|answered| answered.failure),
    }
}

/// The answers of a conversation's task. No task is aborted, so one without answers has panicked.
fn joined(answers: Result<Vec<Answered>, JoinError>) -> Vec<Answered> {
    answers.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

/// Sends the turns of a conversation, each when the one before is answered. When one fails, those behind it fail, too.
async fn converse(server: &Server, turns: Vec<Ask>, salt: u64, begun: Instant) -> Vec<Answered> {
    let mut answers: Vec<Answered> = Vec::new();
    let mut said: Vec<u32> = Vec::new();
    let last = turns.len().saturating_sub(1);
    for (place, turn) in turns.into_iter().enumerate() {
        if answers.last().is_some_and(|before| before.failure.is_some()) {
            let seen = Seen { sent: begun.elapsed(), ..Seen::default() };
            let failure = Some("it was not sent, because the turn before it failed".to_owned());
            answers.push(Answered { seen, failure, ..Answered::default() });
            continue;
        }
        said.extend(text_of(&turn.prompt, salt));
        let mut answered = ask(server, &said, turn.answer, begun).await;
        if answered.failure.is_none() && place < last {
            match server.tokens(&answered.text).await {
                Ok(tokens) => said.extend(tokens),
                Err(why) => answered.fail(why),
            }
        }
        answers.push(answered);
    }
    answers
}

/// The tokens of a prompt. Equal blocks have equal tokens, which are ids that every vocabulary has.
fn text_of(prompt: &Prompt, salt: u64) -> Vec<u32> {
    let size = u64::from(prompt.block_tokens);
    let positions = prompt.blocks.iter().flat_map(|block| (0..size).map(move |at| block * size + at));
    positions.take(prompt.tokens as usize).map(|position| token(position, salt)).collect()
}

/// The first id of prompts. Ids below it are often special tokens.
const FIRST: u64 = 32;
/// One above the last id of prompts.
const END: u64 = 256;

/// The token at a position, by SplitMix64: different positions and different salts differ within some tokens.
fn token(position: u64, salt: u64) -> u32 {
    let mut bits = (position ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // Less than `END`, so nothing is cut off.
    (FIRST + (bits >> 32) % (END - FIRST)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_agree_in_the_blocks_that_they_share_and_nowhere_else() {
        let text = |blocks: &[u64], tokens| {
            text_of(&Prompt { blocks: blocks.to_vec(), block_tokens: 16, tokens }, 7 << 40)
        };
        let (one, other) = (text(&[5, 6, 7], 48), text(&[5, 6, 8], 40));
        assert_eq!((one.len(), other.len(), &one[..32]), (48, 40, &other[..32]));
        let mut all: Vec<Vec<u32>> = (0..10_000).map(|block| text(&[block], 16)).collect();
        assert!(all.iter().flatten().all(|token| (32..256).contains(token)));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 10_000, "first pages of different blocks are different");
    }
}

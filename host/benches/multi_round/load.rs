//! Conversations that send one question per round.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use host_tests::streaming::{Streamed, generate};

use super::{AT_ONCE, Sizes};

/// The tokens of each conversation so far.
pub struct Load {
    sizes: Sizes,
    said: Vec<Vec<u32>>,
}

impl Load {
    /// Conversations without a message.
    pub fn new(sizes: Sizes) -> Self {
        Self { sizes, said: vec![Vec::new(); sizes.conversations] }
    }

    /// Asks the next question of each conversation, and waits for all answers.
    pub fn round(&mut self, url: &str, round: usize) -> anyhow::Result<Vec<Streamed>> {
        for (number, said) in self.said.iter_mut().enumerate() {
            let seed = mix((number * 1_000 + round) as u64);
            said.extend((0..self.sizes.question as u64).map(|place| (mix(seed ^ place) % 250) as u32));
        }
        let next = AtomicUsize::new(0);
        let answers = Mutex::new(Vec::new());
        let client = || -> anyhow::Result<()> {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(prompt) = self.said.get(number) else { return Ok(()) };
                let answer = generate(url, prompt, self.sizes.answer).map_err(anyhow::Error::msg)?;
                answers.lock().unwrap_or_else(PoisonError::into_inner).push((number, answer));
            }
        };
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(client)).collect();
            clients.into_iter().try_for_each(|client| match client.join() {
                Ok(result) => result,
                Err(_panic) => anyhow::bail!("a client panicked"),
            })
        })?;
        let answers = answers.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (number, answer) in &answers {
            self.said[*number].extend(&answer.tokens);
        }
        Ok(answers.into_iter().map(|(_, answer)| answer).collect())
    }
}

/// The output function of SplitMix64.
fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

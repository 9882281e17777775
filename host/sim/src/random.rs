//! The only source of randomness: equal seeds draw equal numbers, on every machine.

use std::ops::Range;
use std::time::Duration;

/// SplitMix64 (Steele, Lea and Flood, 2014): its state is one word, and every seed is a good one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Random(u64);

/// The finalizer of SplitMix64: words that differ in one bit become words that differ in about half of all bits.
#[must_use]
pub fn scramble(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// One word that depends on two words and their order. A chain of such words is a digest.
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    let word = a ^ b.rotate_left(32).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    scramble(word)
}

impl Random {
    /// A generator with this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A random word.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        scramble(self.0)
    }

    /// A number below a bound that is not zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    /// A number of a range that is not empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    /// A random index of a list that is not empty.
    pub fn place(&mut self, length: usize) -> usize {
        // The number is below the length, which is a usize.
        usize::try_from(self.below(length as u64)).unwrap_or_default()
    }

    /// A number from 0 to, not including, 1.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Whether an event of this probability happens.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// A time from zero up to, but not including, `most`, in whole microseconds. Zero if `most` is.
    pub fn up_to(&mut self, most: Duration) -> Duration {
        let most = u64::try_from(most.as_micros()).unwrap_or(u64::MAX);
        if most == 0 { Duration::ZERO } else { Duration::from_micros(self.below(most)) }
    }

    /// A time of a range that is not empty, in microseconds.
    pub fn micros(&mut self, range: Range<u64>) -> Duration {
        Duration::from_micros(self.within(range))
    }
}

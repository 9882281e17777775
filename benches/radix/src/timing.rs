//! Times each operation, and prints one line for each kind of operation.

use std::time::Instant;

/// Times of single operations, in nanoseconds.
pub struct Times(Vec<u64>);

impl Times {
    pub fn with_capacity(count: usize) -> Self {
        Self(Vec::with_capacity(count))
    }

    /// Does `work` and notes how long it took. Two clock readings (about 50 ns) are part of it.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.0.push(start.elapsed().as_nanos() as u64);
        result
    }

    /// Prints mean, p50, p99 and the worst in microseconds.
    pub fn print(mut self, what: &str) {
        self.0.sort_unstable();
        let count = self.0.len();
        let at = |share: f64| self.0[((count - 1) as f64 * share) as usize] as f64 / 1000.0;
        let mean = self.0.iter().sum::<u64>() as f64 / count as f64 / 1000.0;
        println!(
            "{what:<58} mean {mean:>8.3} us   p50 {:>8.3}   p99 {:>8.3}   max {:>9.1}",
            at(0.5),
            at(0.99),
            at(1.0)
        );
    }
}

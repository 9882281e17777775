//! A model of the time of a step, learned from computed steps.
//!
//! A step takes `fixed + sequences · s + tokens · t + context · c`, none of them negative: a pass over the weights, the
//! cost of each sequence that decodes, the cost of each token of prompts (and of their recomputation), and reading
//! the KV of all contexts. The four costs are fitted to *bins*: means over steps with similar numbers of sequences and
//! tokens, one bin per half octave. A fit over single steps (recursive least squares with forgetting) forgets sizes
//! that do not occur: while a batch stays at its limit, all steps are alike, and only noise separates fixed from
//! variable cost. Bins remember the other sizes. Each bin is a mean over about its last 32 steps, and loses weight
//! while no step is added. So a changed cost is learned within about 32 steps of the sizes in use.
//!
//! The bins say how time depends on the batch. The present speed of the machine is a factor over them. It is taken from
//! the last 64 steps, each weighted by its sequences, because that many users waited for it.
//!
//! All memory is bounded. The result is a function of the learned steps.

use std::collections::{BTreeMap, VecDeque};

/// The load of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::scheduler) struct Load {
    /// Sequences that compute one token, beside drafted ones.
    pub sequences: usize,
    /// Tokens of the other sequences, and drafted tokens.
    pub tokens: usize,
    /// Positions that are read, over all sequences.
    pub context: usize,
}

impl Load {
    fn terms(&self) -> [f64; TERMS] {
        [1.0, self.sequences as f64, self.tokens as f64, self.context as f64]
    }
}

const TERMS: usize = 4;
const TOKENS: usize = 2;
/// Most steps in a bin's mean.
const BIN_MEMORY: f64 = 32.0;
/// After so many steps without a new one a bin has half its weight.
const HALF_LIFE: f64 = 4096.0;
/// Most bins. The bin that got no step for the longest time goes first.
const BINS: usize = 64;
/// Steps from which the present speed of the machine is taken.
const RECENT: usize = 64;
/// A step counts for at most so many times its expected time, so that a single slow step changes little.
const OUTLIER: f64 = 4.0;
/// How strongly each term is drawn towards zero, relative to what it explains. The fixed term is drawn most: while all
/// steps were alike, the whole time counts as the cost of the sequences, which gives the longest time for a larger
/// batch.
const SHRINK: [f64; TERMS] = [1e-2, 1e-4, 1e-4, 1e-4];

#[derive(Clone, Copy, Debug)]
struct Bin {
    terms: [f64; TERMS],
    seconds: f64,
    /// Steps in the means, at most [`BIN_MEMORY`].
    steps: f64,
    /// When the bin got its last step, counted in steps.
    seen: u64,
}

/// The model.
#[derive(Clone, Debug)]
pub(in crate::scheduler) struct StepModel {
    bins: BTreeMap<(u32, u32), Bin>,
    recent: VecDeque<(Load, f64)>,
    /// Seconds per term.
    cost: [f64; TERMS],
    /// Present time of steps relative to the fit.
    speed: f64,
    steps: u64,
}

impl Default for StepModel {
    fn default() -> Self {
        Self { bins: BTreeMap::new(), recent: VecDeque::new(), cost: [0.0; TERMS], speed: 1.0, steps: 0 }
    }
}

impl StepModel {
    /// Steps learned from.
    pub(in crate::scheduler) fn steps(&self) -> u64 {
        self.steps
    }

    /// Seconds per step, sequence, token and position of context, as of now.
    pub(in crate::scheduler) fn cost(&self) -> [f64; TERMS] {
        self.cost.map(|cost| cost * self.speed)
    }

    /// Sequences of the largest of the last steps.
    pub(in crate::scheduler) fn largest_seen(&self) -> usize {
        self.recent.iter().map(|(load, _)| load.sequences).max().unwrap_or(0)
    }

    /// Seconds that a step is expected to take, or zero as long as nothing was learned.
    pub(in crate::scheduler) fn predict(&self, load: &Load) -> f64 {
        self.speed * dot(&self.cost, &load.terms())
    }

    /// Learns from a step.
    pub(in crate::scheduler) fn learn(&mut self, load: Load, seconds: f64) {
        let expected = self.predict(&load);
        let seconds = if expected > 0.0 { seconds.min(OUTLIER * expected) } else { seconds };
        // The fit uses relative errors, so a time must not be zero.
        let seconds = seconds.max(1e-7);
        self.steps += 1;
        self.put(load, seconds);
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((load, seconds));
        self.fit();
        let mut sums = (0.0, 0.0);
        for (load, seconds) in &self.recent {
            let weight = load.sequences.max(1) as f64;
            sums.0 += weight * seconds;
            sums.1 += weight * dot(&self.cost, &load.terms());
        }
        self.speed = if sums.1 > 0.0 { (sums.0 / sums.1).clamp(0.1, 10.0) } else { 1.0 };
    }

    fn put(&mut self, load: Load, seconds: f64) {
        let key = (half_octave(load.sequences), half_octave(load.tokens));
        if self.bins.len() >= BINS
            && !self.bins.contains_key(&key)
            && let Some(oldest) = self.bins.iter().min_by_key(|(_, bin)| bin.seen).map(|(key, _)| *key)
        {
            self.bins.remove(&oldest);
        }
        let bin =
            self.bins.entry(key).or_insert(Bin { terms: [0.0; TERMS], seconds: 0.0, steps: 0.0, seen: 0 });
        bin.steps = (bin.steps + 1.0).min(BIN_MEMORY);
        bin.seen = self.steps;
        for (mean, term) in bin.terms.iter_mut().zip(load.terms()) {
            *mean += (term - *mean) / bin.steps;
        }
        bin.seconds += (seconds - bin.seconds) / bin.steps;
    }

    /// Least squares of relative errors over all bins, without negative terms. With four terms there are fifteen sets
    /// of terms that are not zero. Each set is solved exactly, and the best solution without a negative term is taken.
    fn fit(&mut self) {
        let mut square = [[0.0; TERMS]; TERMS];
        let mut right = [0.0; TERMS];
        for bin in self.bins.values() {
            let weight = bin.steps * 0.5_f64.powf((self.steps - bin.seen) as f64 / HALF_LIFE);
            let terms = bin.terms.map(|term| term / bin.seconds);
            for (row, term) in terms.iter().enumerate() {
                right[row] += weight * term;
                for (column, other) in terms.iter().enumerate() {
                    square[row][column] += weight * term * other;
                }
            }
        }
        for (row, shrink) in SHRINK.iter().enumerate() {
            square[row][row] *= 1.0 + shrink;
        }
        let candidates = (1_u32..1 << TERMS).filter_map(|which| {
            let cost = solve(&square, &right, which)?;
            let quadratic: f64 = cost.iter().zip(&square).map(|(c, row)| c * dot(&cost, row)).sum();
            Some((quadratic - 2.0 * dot(&cost, &right), cost))
        });
        if let Some((_, cost)) = candidates.min_by(|(a, _), (b, _)| a.total_cmp(b)) {
            self.cost = cost;
        }
        // As long as no step had prompts, a token of them is assumed to cost as much as a sequence.
        if square[TOKENS][TOKENS] == 0.0 {
            self.cost[TOKENS] = self.cost[1];
        }
    }
}

fn dot(a: &[f64; TERMS], b: &[f64; TERMS]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// 0 for none, then one class per half octave.
fn half_octave(count: usize) -> u32 {
    if count == 0 { 0 } else { 1 + (2.0 * (count as f64).log2()) as u32 }
}

/// Solves the normal equations with only those terms that `which` has a bit for. `None` when a term comes out negative
/// or cannot be determined.
fn solve(square: &[[f64; TERMS]; TERMS], right: &[f64; TERMS], which: u32) -> Option<[f64; TERMS]> {
    let chosen: Vec<usize> = (0..TERMS).filter(|term| which >> term & 1 == 1).collect();
    let mut rows: Vec<Vec<f64>> = chosen
        .iter()
        .map(|row| chosen.iter().map(|column| square[*row][*column]).chain([right[*row]]).collect())
        .collect();
    let size = chosen.len();
    for pivot in 0..size {
        // The matrix is symmetric, and positive if the terms can be told apart, so no rows need to change places.
        let (done, rest) = rows.split_at_mut(pivot + 1);
        let row = &done[pivot];
        let divisor = row[pivot];
        if divisor <= 1e-12 * square[chosen[pivot]][chosen[pivot]] {
            return None;
        }
        for other in rest {
            let factor = other[pivot] / divisor;
            for (value, above) in other.iter_mut().zip(row).skip(pivot) {
                *value -= factor * above;
            }
        }
    }
    let mut cost = [0.0; TERMS];
    for pivot in (0..size).rev() {
        let known: f64 = (pivot + 1..size).map(|column| rows[pivot][column] * cost[chosen[column]]).sum();
        cost[chosen[pivot]] = (rows[pivot][size] - known) / rows[pivot][pivot];
    }
    cost.iter().all(|cost| *cost >= 0.0 && cost.is_finite()).then_some(cost)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SplitMix64.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) as usize % bound
        }
    }

    fn truth(load: &Load) -> f64 {
        4e-3 + 3e-4 * load.sequences as f64 + 2e-5 * load.tokens as f64 + 1e-8 * load.context as f64
    }

    fn load(sequences: usize, tokens: usize, context_each: usize) -> Load {
        Load { sequences, tokens, context: sequences * context_each + tokens }
    }

    fn close(model: &StepModel, at: &Load, tolerance: f64) {
        let ratio = model.predict(at) / truth(at);
        assert!((ratio - 1.0).abs() < tolerance, "{at:?}: {ratio} of the truth, {:?}", model.cost());
    }

    #[test]
    fn steps_of_all_kinds_are_told_apart() {
        let mut model = StepModel::default();
        let mut random = Random(1);
        for _ in 0..500 {
            let tokens = if random.below(3) == 0 { random.below(512) } else { 0 };
            let at = load(1 + random.below(64), tokens, 100 + random.below(4000));
            // A tenth of noise in both directions.
            let noise = 0.9 + random.below(1000) as f64 / 5000.0;
            model.learn(at, truth(&at) * noise);
        }
        for at in
            [load(1, 0, 100), load(30, 0, 1000), load(64, 0, 4000), load(10, 300, 1000), load(64, 512, 50)]
        {
            close(&model, &at, 0.05);
        }
    }

    #[test]
    fn a_batch_that_never_changes_is_not_taken_to_be_free() {
        let mut model = StepModel::default();
        for _ in 0..2000 {
            model.learn(load(8, 0, 100), truth(&load(8, 0, 100)));
        }
        close(&model, &load(8, 0, 100), 0.01);
        // The cost of twice as many sequences is unknown. At most it is twice as high.
        let twice = model.predict(&load(16, 0, 100));
        assert!(twice > truth(&load(16, 0, 100)) && twice < 2.01 * truth(&load(8, 0, 100)), "{twice}");
    }

    #[test]
    fn other_sizes_are_remembered_through_a_long_time_at_one_size() {
        let mut model = StepModel::default();
        let mut random = Random(2);
        for _ in 0..200 {
            let at = load(1 + random.below(32), 0, 500);
            model.learn(at, truth(&at));
        }
        for _ in 0..3000 {
            let at = load(30, 0, 500);
            model.learn(at, truth(&at) * (0.8 + random.below(1000) as f64 / 2500.0));
        }
        for sequences in [1, 8, 16, 32] {
            close(&model, &load(sequences, 0, 500), 0.08);
        }
    }

    #[test]
    fn a_machine_that_becomes_slower_is_learned_within_a_hundred_steps() {
        let mut model = StepModel::default();
        let mut random = Random(3);
        let mut at = || load(1 + random.below(32), 0, 500);
        for _ in 0..300 {
            let at = at();
            model.learn(at, truth(&at));
        }
        for _ in 0..100 {
            let at = at();
            model.learn(at, 3.0 * truth(&at));
        }
        let ratio = model.predict(&load(20, 0, 500)) / truth(&load(20, 0, 500));
        assert!((2.8..3.2).contains(&ratio), "{ratio}");
    }

    #[test]
    fn a_single_hiccup_moves_little() {
        let mut model = StepModel::default();
        let at = load(8, 0, 100);
        for _ in 0..100 {
            model.learn(at, truth(&at));
        }
        model.learn(at, 100.0);
        close(&model, &at, 0.1);
    }

    #[test]
    fn no_input_makes_it_say_nonsense() {
        let mut model = StepModel::default();
        let mut random = Random(4);
        for _ in 0..5000 {
            let digits = random.below(24);
            let at = Load {
                sequences: random.below(20_000),
                tokens: random.below(1 << digits),
                context: random.below(1 << 40),
            };
            let seconds = [0.0, 1e-9, 1e-3, 1.0, 1e6][random.below(5)];
            model.learn(at, seconds);
            let said = model.predict(&at);
            assert!(said.is_finite() && said >= 0.0, "{at:?}: {said}");
            assert!(model.bins.len() <= BINS && model.recent.len() <= RECENT);
        }
    }
}

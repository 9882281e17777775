//! Pseudo-random numbers, the same in every run.

/// The seed that all cases start from, so that a failure repeats.
pub const SEED: u64 = 20_250_101;

/// A generator of numbers for one case.
pub fn seeded() -> fastrand::Rng {
    fastrand::Rng::with_seed(SEED)
}

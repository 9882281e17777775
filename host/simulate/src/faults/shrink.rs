//! Shortens a failing case.

use std::collections::BTreeSet;

use super::{Broken, Case, FailingCase, run};

/// Runs that shrinking one case takes at most.
const RUNS: usize = 1500;

/// Leaves requests and mishaps out of a case for as long as the same check fails (Zeller's ddmin, with one chunk left out at a
/// time).
#[must_use]
pub fn shrink(case: &Case, broken: &Broken) -> FailingCase {
    let mut left = RUNS;
    let mut best = case.clone();
    let mut fails = |case: &Case| {
        left = left.saturating_sub(1);
        let ended = run(case, true);
        (left > 0)
            .then_some(ended)
            .filter(|run| run.broken.as_ref().is_some_and(|other| other.is_like(broken)))
    };
    // Twice, because a case of fewer mishaps may need fewer requests.
    for _ in 0..2 {
        let numbers = best.requests.clone().unwrap_or_else(|| (0..super::scene::MOST_REQUESTS).collect());
        let requests = fewest(numbers, &mut |only| {
            let fewer = Case { requests: Some(only.clone()), ..best.clone() };
            fails(&fewer).map(|_| only.clone())
        });
        best.requests = Some(requests);
        let Some(all) = fails(&best) else { break };
        let struck: BTreeSet<u64> = all.mishaps.iter().map(|mishap| mishap.number).collect();
        let mishaps = fewest(struck, &mut |only| {
            let fewer = Case { mishaps: Some(only.clone()), ..best.clone() };
            // A mishap that does not strike any more is left out, too.
            fails(&fewer).map(|run| run.mishaps.iter().map(|mishap| mishap.number).collect())
        });
        best.mishaps = Some(mishaps);
    }
    let last = run(&best, true);
    match last.broken {
        Some(broken) => FailingCase { seed: case.seed, case: best, broken, mishaps: last.mishaps },
        None => {
            FailingCase { seed: case.seed, case: case.clone(), broken: broken.clone(), mishaps: Vec::new() }
        }
    }
}

/// The fewest numbers found with which a run still fails. `fails` returns the numbers that were needed.
fn fewest(
    all: BTreeSet<u64>,
    fails: &mut dyn FnMut(&BTreeSet<u64>) -> Option<BTreeSet<u64>>,
) -> BTreeSet<u64> {
    let mut best = fails(&BTreeSet::new()).unwrap_or(all);
    let mut chunk = best.len().div_ceil(2);
    while chunk > 0 && !best.is_empty() {
        let mut first = 0;
        while first < best.len() {
            let without =
                best.iter().enumerate().filter(|(place, _)| !(first..first + chunk).contains(place));
            let without: BTreeSet<u64> = without.map(|(_, number)| *number).collect();
            match fails(&without) {
                Some(needed) if needed.len() < best.len() => best = needed,
                _ => first += chunk,
            }
        }
        chunk /= 2;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_needed_is_left_out() {
        let needed = BTreeSet::from([3, 40, 41]);
        let mut runs = 0;
        let found = fewest((0..100).collect(), &mut |only| {
            runs += 1;
            only.is_superset(&needed).then(|| only.clone())
        });
        assert!(found == needed && runs < 100, "{found:?} in {runs} runs");
        assert_eq!(fewest((0..9).collect(), &mut |only| Some(only.clone())), BTreeSet::new());
    }
}

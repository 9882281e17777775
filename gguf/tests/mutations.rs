//! Damaged files never make the reader panic. The example `mutate` does the same at length.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

#[path = "damage/damage.rs"]
mod damage;
#[path = "damage/exercise.rs"]
mod exercise;

use damage::{Damage, seeds};

#[test]
fn files_damaged_at_random_are_read_or_refused() {
    let seed = 20;
    println!("seed {seed}");
    let (seeds, mut damage) = (seeds(), Damage::seeded(seed));
    assert!(seeds.iter().all(|bytes| exercise::exercise(bytes)));
    let read = (0..20_000).filter(|_| {
        let base = &seeds[damage.below(seeds.len())];
        exercise::exercise(&damage.damaged(base))
    });
    let read = read.count();
    assert!(
        (500..10_000).contains(&read),
        "{read} of 20000 could be read: too much or too little is damaged"
    );
}

//! Reads millions of damaged files, which a seeded generator makes from valid ones. It needs no nightly compiler, unlike the fuzz
//! target.
//!
//! ```text
//! cargo run --release -p host-gguf --example mutate -- COUNT [SEED]    reads COUNT damaged files
//! cargo run -p host-gguf --example mutate -- --seeds FOLDER            writes the valid ones
//! ```
//!
//! At the end it prints how many files could still be read, and the largest memory of the process. The files are small, so
//! memory that is taken for a damaged length shows there.

use std::path::Path;

#[path = "../tests/damage/damage.rs"]
mod damage;
#[path = "../tests/damage/exercise.rs"]
mod exercise;

use damage::{Damage, seeds};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seeds = seeds();
    if let [flag, folder] = &arguments[..]
        && flag == "--seeds"
    {
        std::fs::create_dir_all(folder)?;
        for (index, bytes) in seeds.iter().enumerate() {
            std::fs::write(Path::new(folder).join(format!("seed-{index}")), bytes)?;
        }
        return Ok(());
    }
    let count: u64 = arguments.first().ok_or("usage: mutate COUNT [SEED]")?.parse()?;
    let seed: u64 = arguments.get(1).map_or(Ok(1), |seed| seed.parse())?;
    if let Some(index) = seeds.iter().position(|bytes| !exercise::exercise(bytes)) {
        return Err(format!("seed {index} is refused").into());
    }
    let mut damage = Damage::seeded(seed);
    let mut read = 0u64;
    for _ in 0..count {
        let base = &seeds[damage.below(seeds.len())];
        read += u64::from(exercise::exercise(&damage.damaged(base)));
    }
    let status = std::fs::read_to_string("/proc/self/status")?;
    let most: Vec<&str> = status.lines().filter(|line| line.starts_with("VmPeak")).collect();
    println!("{count} files from seed {seed}: {read} could be read; {}", most.join(""));
    Ok(())
}

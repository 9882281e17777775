//! Published tables beside their simulation: `cargo run --release -p host-simulate --example headline [PULL]`.

use host_simulate::headline::{pull_19746, pull_26227};

fn main() {
    let mut watch = |what: &str| eprintln!("{what}");
    let tables = match std::env::args().nth(1).as_deref() {
        Some("19746") => pull_19746(&mut watch),
        Some("26227") => pull_26227(&mut watch),
        _ => pull_19746(&mut watch).into_iter().chain(pull_26227(&mut watch)).collect(),
    };
    tables.iter().for_each(|table| println!("{table}"));
}

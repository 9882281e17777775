//! Published tables beside their simulation: `cargo run --release -p host-simulate --example headline [PULL]`.

use host_simulate::headline::{all, pull_19746, pull_22536, pull_24857, pull_26227};

fn main() {
    let mut watch = |what: &str| eprintln!("{what}");
    let tables = match std::env::args().nth(1).as_deref() {
        Some("19746") => pull_19746(&mut watch),
        Some("22536") => pull_22536(&mut watch),
        Some("24857") => pull_24857(&mut watch),
        Some("26227") => pull_26227(&mut watch),
        Some(other) => panic!("no table of pull request {other}"),
        None => all(&mut watch),
    };
    tables.iter().for_each(|table| println!("{table}"));
}

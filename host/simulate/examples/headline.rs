//! Published tables beside their simulation: `cargo run --release -p host-simulate --example headline`.

fn main() {
    for table in host_simulate::headline::pull_19746(&mut |what| eprintln!("{what}")) {
        println!("{table}");
    }
}

//! The radix tree and page pool of host-core beside those of other systems, on one workload and one core.
//!
//! ```text
//! radix-bench [--sequences 100000] [--groups 1000] [--only ours|dynamo] [--dump FILE]
//! ```
//!
//! `--dump` writes the sequences as u32 little endian for `sglang_bench.py` and ends.

mod counting;
mod dynamo;
mod ours;
mod timing;
mod workload;

use std::io::Write;

use workload::Workload;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| arguments.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone());
    let number =
        |name: &str, default: usize| value(name).map_or(default, |text| text.parse().expect("a number"));
    let workload = Workload::new(number("--sequences", 100_000), number("--groups", 1000));
    if let Some(path) = value("--dump") {
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        for token in workload.all() {
            file.write_all(&token.to_le_bytes())?;
        }
        return file.flush();
    }
    println!(
        "{} sequences in {} groups, {} unique pages",
        workload.len(),
        workload.groups(),
        workload.unique_pages()
    );
    let only = value("--only");
    let wanted = |name: &str| only.as_deref().is_none_or(|only| only == name);
    if wanted("ours") {
        ours::pool();
        ours::run(&workload);
        ours::eviction(&workload);
        ours::pressure(&workload);
    }
    if wanted("dynamo") {
        dynamo::run(&workload);
    }
    Ok(())
}

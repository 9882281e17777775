//! Reads any bytes as a GGUF file. From this folder:
//!
//! ```text
//! cargo run -p host-gguf --example mutate -- --seeds gguf/fuzz/corpus/read    (in the workspace)
//! RUSTC_BOOTSTRAP=1 cargo fuzz run read -- -runs=10000000 -malloc_limit_mb=8 -max_len=4096
//! ```
#![no_main]

#[path = "../exercise.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| _ = exercise::exercise(bytes));

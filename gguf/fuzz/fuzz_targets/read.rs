//! Reads any bytes as a GGUF file. From this folder:
//!
//! ```text
//! cargo run -p host-gguf --example mutate -- --seeds gguf/fuzz/corpus/read    (in the workspace)
//! cargo +nightly fuzz run read -- -runs=10000000 -malloc_limit_mb=8 -max_len=4096
//! ```
//!
//! Without the address sanitizer (`-s none`; the reader has no unsafe code) it runs several times as fast.
#![no_main]

#[path = "../exercise.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::exercise(bytes);
});

//! The entry of every fuzz target: the name of the binary selects the target. The targets are in `tests/fuzzing`.
#![no_main]

use std::sync::LazyLock;

use host_fuzzing::Target;

static TARGET: LazyLock<Target> = LazyLock::new(|| host_fuzzing::target(env!("CARGO_BIN_NAME")));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _accepted = (TARGET.run)(bytes);
});

//! KV transfers between workers change no answer, whatever is lost on the way: over shared memory, and over plugins that fail on
//! purpose. Tests with NIXL or Mooncake are in modules named `external`, which `cargo xtask test` runs one at a time, and in
//! `host/tests/external`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod everything_together;
mod faults;
mod layer_groups;
mod resume;
mod shared_transfers;
mod staging;
mod tensor_parallel;
mod tensor_parallel_transfer;
mod unsettled;
mod walk;

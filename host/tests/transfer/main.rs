//! KV that travels between workers changes no answer, whatever is lost on the way, over shared memory and plugins that fail
//! on purpose. What runs NIXL or Mooncake is in `host/tests/external`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod faults;
mod layer_groups;
mod resume;
mod shared_transfers;
mod tensor_parallel;
mod unsettled;
mod walk;

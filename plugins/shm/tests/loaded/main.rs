//! The shared-memory plugin, loaded as a file, between instances and processes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod between_devices;
mod corrupting_flips_a_byte;
mod keeps_its_contract;
mod moves_bytes;
mod older_peers;
mod survives_faults;

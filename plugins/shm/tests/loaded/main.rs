//! The shared-memory plugin, loaded as a file, between instances and processes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod between_devices;
mod corrupting_flips_a_byte;
mod keeps_its_contract;
mod moves_bytes;
mod older_peers;
mod survives_faults;

/// Long enough that connections succeed, however slow the machine is.
const CONNECTS: &str = "connect_timeout_ms = 60000\n";
/// As [`CONNECTS`], and fences have to succeed.
const PATIENT: &str = "connect_timeout_ms = 60000\nfence_timeout_ms = 60000\n";

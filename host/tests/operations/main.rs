//! Tests of an operator's work: start, refusal to start, monitoring, routing and end. Tests with NIXL are in a module named
//! `external`, which `cargo xtask test` runs one at a time.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod api_tls;
mod batch;
mod bench_live;
mod by_hand;
mod clients;
mod cluster_identity;
mod companions;
mod docs_commands;
mod first_minutes;
mod lifecycle;
mod lost_arrivals;
mod metrics;
mod one_user;
mod pace;
mod panicking_roles;
mod plugin_hangs;
mod routing;
mod simulate;
mod start_refused;
mod versions;
mod worker_death;

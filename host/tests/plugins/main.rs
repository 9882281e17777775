//! Plugins as operators and authors see them: `host plugins`, and the errors about unusable plugins. `host/plugins/tests/loading`
//! tests loading itself.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod aborts_on_load;
mod commands;
mod conformance;
mod examples;
mod in_c;
mod new;
mod new_ci;
mod other_compiler;
mod requirements;
mod shipping;
mod stops_or_is_left_behind;

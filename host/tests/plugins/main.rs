//! Plugins as operators and authors meet them: `host plugins`, and what the program says of plugins that it cannot use.
//! Loading itself is tested in `host/plugins/tests/loading`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod aborts_on_load;
mod commands;
mod new;
mod other_compiler;
mod requirements;
mod stops_or_is_left_behind;

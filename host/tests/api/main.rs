//! What clients see of real workers: conversations with `host chat`, and namespaces from the HTTP API to the pages. Tests that
//! need no worker are in `host/front/tests/api`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod chat_command;
mod grammars;
mod namespaces;
mod settings;

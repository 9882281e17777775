//! Tests of clients with real workers: conversations with `host chat`, grammars, and namespaces from the HTTP API to the pages.
//! Tests without workers are in `host/front/tests/api`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod canaries;
mod chat_command;
mod grammars;
mod namespaces;
mod scores;
mod settings;

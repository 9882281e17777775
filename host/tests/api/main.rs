//! What clients are promised: conversations with `host chat`, and namespaces from the HTTP API to the pages. What needs no
//! worker is in `host/front/tests/api`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod chat_command;
mod namespaces;

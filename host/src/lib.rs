//! `host`: serves large language models with prefill and decode on separate workers.

pub mod cli;

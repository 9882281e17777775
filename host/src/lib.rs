//! `host`: serves large language models with prefill and decode on separate workers.

pub mod cli;
pub mod executor;
pub mod net;
pub mod plugins;
pub mod text;
pub mod worker;

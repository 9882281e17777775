//! The conformance kit as commands: `host plugins test`, and the program `host-plugin-test`, which has no server in it.

pub mod command;
pub mod output;

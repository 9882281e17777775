//! A server, as commands that talk to one reach it.

mod address;
mod client;

pub use address::Address;
pub use client::{Answer, Client, NoAnswer, message_in};

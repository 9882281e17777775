//! A client of a server, for commands that talk to one.

mod address;
mod client;

pub use address::Address;
pub use client::{Answer, Client, NoAnswer, message_in};

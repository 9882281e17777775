//! A client of a server, for commands that talk to one.

mod address;
mod client;
mod events;
pub mod started;
mod stop;

pub use address::Address;
pub use client::{Answer, Client, NoAnswer, message_in};
pub use events::Events;
pub use started::Started;
pub use stop::Stop;

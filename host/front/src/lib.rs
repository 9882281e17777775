//! The part in front of the workers: registry, router and HTTP API, and the conversion of text to tokens.

mod audit;
pub mod connections;
pub mod front;
pub mod http;
pub mod identity;
pub mod metrics;
pub mod registry;
pub mod router;
mod routing_metrics;
pub mod text;
pub mod turns;

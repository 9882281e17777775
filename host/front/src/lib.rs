//! In front of the workers: registry, router and HTTP API, and what makes tokens of text.

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

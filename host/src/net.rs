//! Control plane between workers, registry, router and HTTP API.

pub mod cache_news;
pub mod clock;
pub mod connections;
pub mod front;
pub mod http;
pub mod identity;
pub mod metrics;
pub mod peers;
pub mod random;
pub mod registration;
pub mod registry;
pub mod router;
mod routing_metrics;
pub mod wire;
pub mod worker_metrics;
pub mod worker_service;

/// Generated from `proto/control.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod proto {
    tonic::include_proto!("host.v1");
}

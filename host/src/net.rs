//! Control plane between workers, registry, router and HTTP API.

pub mod identity;
pub mod peers;
pub mod registration;
pub mod wire;
pub mod worker_service;

/// Generated from `proto/control.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod proto {
    tonic::include_proto!("host.v1");
}

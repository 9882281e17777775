//! Control plane between workers, registry, router and HTTP API.

/// Generated from `proto/control.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod proto {
    tonic::include_proto!("host.v1");
}

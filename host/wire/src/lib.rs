//! Messages between the processes of a cluster: the schema, conversions from core's types, and the control plane's only access to
//! other processes, time and randomness.
//!
//! [`proto`] is generated from `proto/control.proto`. [`convert`] and [`cache_news`] translate. [`pairs`] decides which workers
//! can work together, and [`protocol`] which versions of the schema. [`identity`] makes a digest of all that makes workers' KV
//! differ. [`endpoint`] connects processes that can prove that they belong together. [`exposition`] has the formats of their
//! counters. [`shares`] divides limited resources among clients.

mod answer;
pub mod audit;
pub mod cache_news;
pub mod clock;
pub mod convert;
pub mod endpoint;
pub mod exposition;
pub mod identity;
pub mod log_rate;
pub mod pairs;
pub mod protocol;
pub mod random;
pub mod shares;

pub use answer::Answer;

/// Generated from `proto/control.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod proto {
    tonic::include_proto!("host.v1");
}

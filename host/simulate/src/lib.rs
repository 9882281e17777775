//! Simulates whole clusters under a virtual clock: the latencies and the throughput of a trace of requests on given
//! machines.
//!
//! ```text
//! Trace ──► Traffic ──── requests ───►┌──────── host_sim::World ────────┐
//!           │     ▲                   │  Scheduler of each worker:      │
//!           ▼     └── cache changes ──│  the core that serves, unchanged│
//!         Router                      └──────▲──────────────────────────┘
//!         the core's Accounts                │ how long everything takes
//!         and choose                  Hardware: executors, links, tiers
//!           │                                ▲
//!           └──────── Records ──► Report     └── Cluster (cluster.toml)
//! ```
//!
//! This crate makes no scheduling decisions. Schedulers, caches, offload tiers, the protocol between workers and the
//! costs of routes are those of [`host_core`]. The world between them is [`host_sim`]'s, with pages that have names and
//! no contents. This crate adds three things: [how long work takes](hardware) on given machines, [what clients
//! ask](traffic), and [the report](report).
//!
//! Equal traces, clusters and seeds give equal reports, byte for byte.
//!
//! ```
//! use host_simulate::{Cluster, Options, Trace, simulate};
//!
//! let cluster = Cluster::parse("cluster.toml", r#"
//!     model = "qwen3-32b"
//!     [[workers]]
//!     role = "aggregated"
//!     machine = "h200"
//!     tp = 2
//! "#)?;
//! let line = r#"{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [1, 2]}"#;
//! let trace = Trace::parse("trace.jsonl", line, None)?;
//! let report = simulate(&trace.into_workload(1.0), &cluster, &Options::default(), &mut |_| {});
//! assert_eq!(report.figures.requests.completed, 1);
//! # Ok::<(), host_simulate::Wrong>(())
//! ```

#![forbid(unsafe_code)]

pub mod cluster;
pub mod comparison;
pub mod faults;
pub mod goodput;
pub mod hardware;
pub mod headline;
pub mod html;
pub mod machine;
pub mod model;
pub mod plan;
pub mod recording;
pub mod report;
mod router;
mod run;
mod seen;
mod table;
mod trace;
pub mod traffic;
pub mod workloads;
mod wrong;

pub use cluster::Cluster;
pub use recording::Recording;
pub use report::Report;
pub use run::{Options, Progress, record, simulate};
pub use seen::Seen;
pub use trace::Trace;
pub use traffic::Workload;
pub use wrong::Wrong;

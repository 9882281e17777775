//! The cluster that is simulated, read from `cluster.toml`.
//!
//! ```toml
//! model = "qwen3-32b"          # a preset, or a table of its shape
//! weights = "bf16"
//! kv = "fp8"
//! page_tokens = 64
//! router = "prefix"            # or "round-robin"
//! link = "rdma-400g"           # "nvlink", "tcp", or a table
//!
//! [[workers]]
//! role = "prefill"
//! count = 3
//! machine = "b200"             # a preset, or a table
//! tp = 2
//!
//! [[workers]]
//! role = "decode"
//! machine = "b200"
//! tp = 2
//! target_itl_ms = 80
//! host_memory_gib = 200        # L2
//!
//! [[tiers]]                    # L3, in the order in which it is asked
//! gigabytes_per_second = 20
//! latency_us = 500
//! ```

mod check;
mod config;
mod text;

pub(crate) use config::VOCABULARY;

use host_core::layout::KvOrder;
use host_core::transfer::StagingMode;
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::model::{Dtype, Model};
use crate::wrong::Wrong;

/// A preset by its name, or a value of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Named<T> {
    /// A preset.
    Name(String),
    /// The value.
    Itself(T),
}

impl<T: Copy> Named<T> {
    fn find(&self, presets: &[(&str, T)]) -> Result<T, String> {
        match self {
            Named::Itself(value) => Ok(*value),
            Named::Name(name) => {
                let found = presets.iter().find(|(preset, _)| preset == name);
                let names: Vec<&str> = presets.iter().map(|(name, _)| *name).collect();
                found
                    .map(|(_, value)| *value)
                    .ok_or_else(|| format!("there is no {name:?}: take one of {}", names.join(", ")))
            }
        }
    }
}

/// A link between workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bytes per second of one network card, each direction, in units of 10⁹.
    pub gigabytes_per_second: f64,
    /// Microseconds from the request for a write to its first byte. Also the time of a message.
    pub latency_us: f64,
    /// Further microseconds for each page that a write names.
    #[serde(default)]
    pub page_us: f64,
    /// Further microseconds for each run of bytes that a rank writes. A run is contiguous on both sides.
    #[serde(default)]
    pub run_us: f64,
    /// The number of workers that share one card. They are neighbours in one entry of `workers`.
    #[serde(default = "one")]
    pub workers_per_card: usize,
}

fn one() -> usize {
    1
}

impl Link {
    /// Links by name. Bandwidths are nominal ones times 0.9 for NVLink 5 (900 GB/s) and 0.71 for RDMA (142 of 200 GB/s,
    /// measured by vLLM with Mooncake on four cards). For TCP it is the rate of one stream on a 25 Gbit/s network.
    pub const PRESETS: [(&'static str, Link); 3] = [
        ("nvlink", Link::new(810.0, 10.0, 0.1)),
        ("rdma-400g", Link::new(35.5, 20.0, 0.5)),
        ("tcp", Link::new(2.5, 100.0, 5.0)),
    ];

    /// A link of so many 10⁹ bytes per second, with a card for each worker.
    #[must_use]
    pub const fn new(gigabytes_per_second: f64, latency_us: f64, page_us: f64) -> Self {
        Self { gigabytes_per_second, latency_us, page_us, run_us: 0.0, workers_per_card: 1 }
    }
}

/// A storage tier.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// Bandwidth of reads and writes together, in units of 10⁹ bytes per second.
    pub gigabytes_per_second: f64,
    /// Microseconds of a query, a read or a write.
    pub latency_us: f64,
    /// Whether all workers share the bandwidth. Otherwise each worker has it for itself. All workers share the contents
    /// in any case.
    #[serde(default)]
    pub shared: bool,
}

/// The role of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts.
    Prefill,
    /// Computes answers.
    Decode,
    /// Computes both.
    Aggregated,
}

/// How workers are chosen for requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// By the cached pages and the load of each worker.
    #[default]
    Prefix,
    /// In turn.
    RoundRobin,
}

/// When pages are written to the offload tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Write {
    /// When they are computed or received.
    #[default]
    WriteThrough,
    /// Once they were used often.
    WriteThroughSelective,
    /// When they are evicted.
    WriteBack,
}

/// What a step takes, measured: `base + prompt tokens · prompt_token + answers · sequence`, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredStep {
    /// Every step.
    pub base_us: f64,
    /// For each token of a prompt.
    pub prompt_token_us: f64,
    /// For each answer that gets a token.
    pub sequence_us: f64,
}

/// Workers that are alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workers {
    /// Their role.
    pub role: Role,
    /// How many.
    #[serde(default = "one")]
    pub count: usize,
    /// The device that each worker is made of.
    pub machine: Named<Machine>,
    /// Devices of each worker.
    #[serde(default = "one")]
    pub tp: usize,
    /// What a step of each worker takes, where it was measured. The default is what the machine's peaks and the model say.
    pub step: Option<MeasuredStep>,
    /// Tokens that the pool of each worker holds. The default is `memory_share` of its devices' memory, less the
    /// weights.
    pub pool_tokens: Option<u32>,
    /// The share of the devices' memory that weights and pool get.
    #[serde(default = "default_memory_share")]
    pub memory_share: f64,
    /// Whether each worker keeps the KV of ended requests.
    #[serde(default = "yes")]
    pub radix_cache: bool,
    /// Host memory for pages. It needs the radix cache.
    #[serde(default)]
    pub host_memory_gib: f64,
    /// When pages go to host memory and storage.
    #[serde(default)]
    pub write: Write,
    /// Prompt tokens in one step.
    #[serde(default = "default_chunk_tokens")]
    pub chunk_tokens: u32,
    /// Sequences in one step.
    #[serde(default = "default_max_batch")]
    pub max_batch: u32,
    /// Requests in the queue. More are refused.
    #[serde(default = "default_max_queued")]
    pub max_queued: u32,
    /// Answer tokens for which each running request has room when another request is admitted.
    #[serde(default = "default_reserved_decode_tokens")]
    pub reserved_decode_tokens: u32,
    /// The mean time between two tokens that steps should not exceed.
    pub target_itl_ms: Option<f64>,
}

fn default_memory_share() -> f64 {
    0.9
}
fn yes() -> bool {
    true
}
fn default_max_batch() -> u32 {
    256
}
fn default_reserved_decode_tokens() -> u32 {
    512
}
fn default_chunk_tokens() -> u32 {
    8192
}
fn default_max_queued() -> u32 {
    10_000
}

/// A cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// The model.
    pub model: Named<Model>,
    /// The type of its weights.
    #[serde(default = "default_dtype")]
    pub weights: Dtype,
    /// The type of its KV.
    #[serde(default = "default_dtype")]
    pub kv: Dtype,
    /// Tokens in a page.
    #[serde(default = "default_page_tokens")]
    pub page_tokens: u32,
    /// How requests get their workers.
    #[serde(default)]
    pub router: Policy,
    /// The link from prefill to decode workers.
    #[serde(default = "default_link")]
    pub link: Named<Link>,
    /// The number of groups of layers in which pages are sent while later layers are computed. 1 sends whole pages.
    #[serde(default = "default_layer_groups")]
    pub layer_groups: u32,
    /// The order of the dimensions in all pools. The names are those of `host --kv-layout`.
    #[serde(default = "Cluster::default_kv_layout", with = "text")]
    pub kv_layout: KvOrder,
    /// Whether short runs go through staging memory, as with `host --staging`.
    #[serde(default, with = "text")]
    pub staging: StagingMode,
    /// Whether requests with the same prefix wait for the first of them, as on a live worker. Otherwise each computes or receives the
    /// prefix itself.
    #[serde(default = "yes")]
    pub share_transfers: bool,
    /// Microseconds of the router for each request. It serves requests one after the other.
    #[serde(default)]
    pub router_us: f64,
    /// The share of pages that offload tiers fail to give: storage has lost the page, or a copy between pool and host memory fails.
    #[serde(default)]
    pub tier_failures: f64,
    /// The workers.
    pub workers: Vec<Workers>,
    /// Storage.
    #[serde(default)]
    pub tiers: Vec<Tier>,
}

fn default_dtype() -> Dtype {
    Dtype::Bf16
}
fn default_page_tokens() -> u32 {
    64
}
fn default_link() -> Named<Link> {
    Named::Name("rdma-400g".into())
}
fn default_layer_groups() -> u32 {
    1
}

impl Cluster {
    /// The order of a pool's dimensions unless the file has another.
    #[must_use]
    pub fn default_kv_layout() -> KvOrder {
        KvOrder::ALL[0]
    }

    /// Reads the text of a `cluster.toml`. `file` is its name in errors.
    ///
    /// # Errors
    /// [`Wrong`], with the line or the key.
    pub fn parse(file: &str, text: &str) -> Result<Self, Wrong> {
        let cluster: Cluster = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            Wrong::new(file, format!("line {line}"), error.message().trim())
        })?;
        cluster.check().map_err(|(key, what)| Wrong::new(file, key, what))?;
        Ok(cluster)
    }
}

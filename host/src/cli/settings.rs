//! Every setting once: as a flag, and as a key of `--config`.
//!
//! A new one is a field here, a name in a list of `settings/file.rs`, without which it does not compile, and a method in
//! `settings/defaults.rs` if it has a default of its own.

mod bytes;
mod choices;
mod companion;
mod defaults;
mod file;
mod hicache;
mod set;
mod suggestion;
mod synthetic;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use host_core::layer_groups::Wish;
use host_core::transfer::StagingMode;
use host_wire::endpoint::ListenAt;
use serde::Deserialize;

pub use bytes::Bytes;
pub use choices::{
    EvictionPolicyName, KvDtypeName, KvLayoutName, PrefetchPolicyName, ReasoningParserName, RouterPolicyName,
    SpeculateName, ToolParserName, WritePolicyName,
};
pub use companion::CompanionSettings;
use file::{address, one_or_several, word_or_number};
pub use hicache::{CostSettings, HicacheSettings};
pub use set::set_key;
pub use synthetic::SyntheticSettings;

/// What one process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum RoleName {
    /// Computes prompts and hands their KV over
    Prefill,
    /// Takes prompts' KV over and generates
    Decode,
    /// Takes requests and spreads them over workers
    Router,
    /// Prefill and decode in one worker, without a transfer
    Aggregated,
}

impl RoleName {
    /// The role's name, as flags write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            RoleName::Prefill => "prefill",
            RoleName::Decode => "decode",
            RoleName::Router => "router",
            RoleName::Aggregated => "aggregated",
        }
    }
}

/// What computes the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ExecutorName {
    /// A real model on the CPU
    Cpu,
    /// A real model on an NVIDIA GPU, with its KV pool in the GPU's memory
    Cuda,
    /// No model: KV that proves itself, with a modelled speed
    Synthetic,
}

/// How a GPU computes the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum CudaMathName {
    /// On tensor cores where that is possible, else exact
    #[default]
    Auto,
    /// With the bits of the CPU executor
    Exact,
    /// On tensor cores
    Tensor,
}

impl ExecutorName {
    /// Whether it computes the model that `--model` names.
    #[must_use]
    pub fn computes_a_model(self) -> bool {
        match self {
            ExecutorName::Cpu | ExecutorName::Cuda => true,
            ExecutorName::Synthetic => false,
        }
    }
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Plain text
    Text,
    /// One JSON object per line
    Json,
}

/// What is set, by flag or file. The methods of the same names give the defaults of what is not set.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// TOML file with the same settings, by their flags' names. Flags win
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// The model: a Hugging Face directory (config.json, safetensors, tokenizer.json) or a .gguf file
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,

    /// Hugging Face directory whose tokenizer and chat template are used instead of the model's own
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,

    /// Jinja file with the chat template that is used instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,

    /// How the model writes calls of tools [default: as its chat template says]
    #[arg(long, value_name = "FORMAT")]
    pub tool_parser: Option<ToolParserName>,

    /// How the model writes its thoughts, which answers have in reasoning_content [default: they are part of the text]
    #[arg(long, value_name = "FORMAT")]
    pub reasoning_parser: Option<ReasoningParserName>,

    /// Names under which the model is served. Answers have the first one [default: the directory's name, or the file's without .gguf]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    #[serde(deserialize_with = "one_or_several", default)]
    pub served_model_name: Option<Vec<String>>,

    /// What computes the model [default: cpu]
    #[arg(long, value_enum)]
    pub executor: Option<ExecutorName>,

    /// The GPU of --executor cuda, by its number. All ranks of a worker compute on it [default: 0]
    #[arg(long, value_name = "NUMBER")]
    pub cuda_device: Option<u32>,

    /// NVIDIA's run-time compiler, which --executor cuda compiles its kernels with: libnvrtc.so, or a folder with it as the package
    /// nvidia-cuda-nvrtc lays it out [default: what the variable NVRTC names, else where the system and CUDA's installer have it]
    #[arg(long, value_name = "PATH")]
    pub nvrtc: Option<PathBuf>,

    /// How --executor cuda computes: "tensor" on tensor cores with weights and activations in bf16, "exact" with the bits of --executor
    /// cpu, slowly. "auto" takes tensor cores where model and GPU allow it and no worker has several ranks [default: auto]
    #[arg(long, value_enum)]
    pub cuda_math: Option<CudaMathName>,

    /// Run only this part. Without this flag, all parts are started on this machine
    #[arg(long, value_enum)]
    pub role: Option<RoleName>,

    /// Plugins to load, by name [default: shm]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub plugins: Option<Vec<String>>,

    /// Of several plugins that could, the one that carries pages between workers. The others do nothing, unless --hicache-storage
    /// names them [default: the only one that --plugins names]
    #[arg(long, value_name = "NAME")]
    pub transfer: Option<String>,

    /// A key of a plugin's configuration, for example hicache-file.dir=/var/cache/pages. It wins over the file, and may be given
    /// several times
    #[arg(long, value_name = "PLUGIN.KEY=VALUE")]
    #[serde(skip)]
    pub set: Vec<String>,

    /// Directories with plugins, searched in order [default: "plugins" beside the program, the program's own, and
    /// "../lib/host/plugins" from there]
    #[arg(long, value_name = "DIR,...", value_delimiter = ',')]
    pub plugins_dir: Option<Vec<PathBuf>>,

    /// File of publishers, one [[publisher]] with name and minisign key for each: only plugins that one of them signed are loaded
    /// [default: none, signatures are not looked at]
    #[arg(long, value_name = "FILE")]
    pub plugin_publishers: Option<PathBuf>,

    /// Load plugins that users other than root, you, and the owner of this program could change. Each is logged
    #[arg(long)]
    #[serde(default)]
    pub insecure_plugin_permissions: bool,

    /// Load plugins built with panic = "abort", whose defects end this process. Each is logged
    #[arg(long)]
    #[serde(default)]
    pub plugins_may_abort: bool,

    /// Seconds after which a worker whose plugin has not returned from a call ends, to be started again by its supervisor. Calls
    /// that wait for others, as open, register, connect and disconnect, have ten times as long. 0 means never [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub plugin_call_timeout: Option<u32>,

    /// Address that the HTTP API listens on [default: 127.0.0.1]
    #[arg(long, value_name = "IP")]
    pub host: Option<IpAddr>,

    /// Port that the HTTP API listens on. 0 takes a free one [default: 8000]
    #[arg(long)]
    pub port: Option<u16>,

    /// File of API keys, one [[key]] for each tenant, which "host keys new" writes. It is read again when it changes [default:
    /// none, requests need no key]
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,

    /// Header in which a trusted gateway names the tenant of a request. It is only for servers that only the gateway reaches, or
    /// with --api-keys, where the gateway's key has gateway = true [default: none]
    #[arg(long, value_name = "HEADER")]
    pub tenant_header: Option<String>,

    /// PEM file with the certificate that the HTTP API shows, and those between it and its authority. The API then speaks TLS 1.2
    /// and 1.3 alone. The file is read again when it changes [default: none, plain text]
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// PEM file with the key of --tls-cert, which other users may not read. The file is read again when it changes
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Serve the HTTP API in plain text where other machines reach it: behind a gateway that speaks TLS, or in a network where all
    /// may be read
    #[arg(long)]
    #[serde(default)]
    pub insecure_api: bool,

    /// Address for operators, or a Unix socket, unix:PATH, for processes of the same user: /drain, /flush_cache and /metrics are
    /// served there, and not with the HTTP API any more [default: none, they are served with the HTTP API]
    #[arg(long, value_name = "IP:PORT")]
    #[serde(deserialize_with = "address", default)]
    pub admin: Option<ListenAt>,

    /// Names under which clients address the HTTP API, beside localhost and addresses. "*" allows any, but not to operators without
    /// keys [default: none where it listens on the loopback interface, else any for clients]
    #[arg(long, value_name = "NAME,...")]
    pub allowed_hosts: Option<String>,

    /// Requests that a router serves at once at most. A client has at most four times as many as are free [default: 1024]
    #[arg(long, value_name = "REQUESTS")]
    pub max_requests: Option<u32>,

    /// Connections of clients at once at most. A client has at most four times as many as are free [default: three quarters of
    /// the open files that this process may have, at most 65536]
    #[arg(long, value_name = "CONNECTIONS")]
    pub max_connections: Option<u32>,

    /// Largest body of a request [default: 8MiB]
    #[arg(long, value_name = "BYTES")]
    pub max_body_bytes: Option<Bytes>,

    /// Bodies that are on their way from clients at once at most. A client has at most four times as many as are free [default:
    /// 4096]
    #[arg(long, value_name = "BODIES")]
    pub max_uploads: Option<u32>,

    /// Bytes of these bodies in all at most. A client has at most four times as many as are free [default: 256MiB, or eight of
    /// the largest bodies]
    #[arg(long, value_name = "BYTES")]
    pub max_upload_bytes: Option<Bytes>,

    /// Bytes of requests that are parsed and tokenized, or wait for that, at most. A client has at most four times as many as are
    /// free [default: 256MiB, or eight of the largest bodies]
    #[arg(long, value_name = "BYTES")]
    pub max_text_bytes: Option<Bytes>,

    /// Bytes of answers that are made and not read, at most. A client has at most four times as many as are free. What is streamed
    /// then waits, unless it is repeated later (/generate and /v1/responses), and other answers are refused [default: 256MiB, or
    /// eight of the largest bodies]
    #[arg(long, value_name = "BYTES")]
    pub max_answer_bytes: Option<Bytes>,

    /// Seconds in which the body of a request has to arrive [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub body_timeout: Option<u32>,

    /// Seconds after which a connection is closed on which nothing is asked for, or whose client reads nothing of its answer. A
    /// stream of HTTP/2 that is not read ends alone [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub idle_timeout: Option<u32>,

    /// An answer whose worker fails ends with an error, instead of going on on another worker
    #[arg(long)]
    #[serde(default)]
    pub no_resume: bool,

    /// Seconds after which a client that waits for the next event of its stream gets a comment, for proxies that cut idle
    /// streams. Some clients cannot read comments [default: never]
    #[arg(long, value_name = "SECONDS")]
    pub stream_keep_alive: Option<u32>,

    /// Origins of web pages that may use the API from a browser, for example https://app.example.com, or "*" for all [default:
    /// none]
    #[arg(long, value_name = "ORIGIN,...")]
    pub cors_origins: Option<String>,

    /// Write no log line for each request
    #[arg(long)]
    #[serde(default)]
    pub no_request_log: bool,

    /// Seconds that a request may take in all, from its arrival to the last token of its answer [default: 600]
    #[arg(long, value_name = "SECONDS")]
    pub request_timeout: Option<u32>,

    /// Seconds after which a prefill worker gives a transfer up to which nothing happens: no write of the plugin ends, or the decode
    /// worker does not confirm that all arrived, which it does when it has restored its own part from storage [default: 120]
    #[arg(long, value_name = "SECONDS")]
    pub transfer_timeout: Option<u32>,

    /// Seconds in which a request waits for a worker, and in which failed ones are tried again. They count anew after an answer
    /// under way broke off [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub retry_timeout: Option<u32>,

    /// Send requests to new workers at once, without a dummy request that reads their weights and opens their connections
    #[arg(long)]
    #[serde(default)]
    pub no_warm_up: bool,

    /// Seconds that requests under way have to end by themselves when a process has to stop. What is left then goes on on other
    /// workers, or is given up [default: 20]
    #[arg(long, value_name = "SECONDS")]
    pub drain_timeout: Option<u32>,

    /// Address that this process's control plane listens on, or a Unix socket, unix:PATH, for processes of the same user
    /// [default: 127.0.0.1, a free port, or port 8001 for the router]
    #[arg(long, value_name = "IP:PORT")]
    #[serde(deserialize_with = "address", default)]
    pub control: Option<ListenAt>,

    /// Control addresses of the routers that a worker registers with [default: http://127.0.0.1:8001, or https:// with
    /// --cluster-secret or --cluster-certs]
    #[arg(long, value_name = "URL,...")]
    pub router: Option<String>,

    /// File with the secret of this cluster, the same for all its processes, which "host certs secret" makes. Control connections
    /// are then TLS, and other processes are refused. The file is read again when it changes [default: none]
    #[arg(long, value_name = "FILE")]
    pub cluster_secret: Option<PathBuf>,

    /// Folder with ca.pem, cert.pem and key.pem, which "host certs new" makes: as --cluster-secret, with certificates [default:
    /// none]
    #[arg(long, value_name = "DIR")]
    pub cluster_certs: Option<PathBuf>,

    /// Let the control plane listen where other machines reach it without --cluster-secret or --cluster-certs: every process that
    /// does is believed
    #[arg(long)]
    #[serde(default)]
    pub insecure_control: bool,

    /// Address at which a worker answers /metrics and /health [default: where its control plane listens, or a free port of
    /// 127.0.0.1 where that takes processes of the cluster alone]
    #[arg(long, value_name = "IP:PORT")]
    pub metrics: Option<SocketAddr>,

    /// How the router chooses workers [default: prefix]
    #[arg(long, value_name = "POLICY", value_enum)]
    pub router_policy: Option<RouterPolicyName>,

    /// This worker's name in logs and metrics [default: the role and the process id]
    #[arg(long)]
    pub name: Option<String>,

    /// Tokens in a KV page [default: 16]
    #[arg(long, value_name = "TOKENS")]
    pub page_size: Option<u32>,

    /// Pages in a worker's KV pool [default: what --kv-memory holds]
    #[arg(long, value_name = "PAGES")]
    pub pool_pages: Option<u32>,

    /// Memory for a worker's KV pool, for example 512MiB [default: what remains of a quarter of
    /// this machine's memory, shared between its workers, beside host memory for pages and staging; with --executor cuda half of the
    /// GPU's memory, shared between the workers]
    #[arg(long, value_name = "BYTES")]
    pub kv_memory: Option<Bytes>,

    /// Element type of K and V [default: the model's]
    #[arg(long, value_enum)]
    pub kv_dtype: Option<KvDtypeName>,

    /// Order of a pool's dimensions [default: page-head-layer-kv-token-dim]
    #[arg(long, value_enum)]
    pub kv_layout: Option<KvLayoutName>,

    /// Prompt tokens computed in one step at most [default: 512, on tensor cores 2048]
    #[arg(long, value_name = "TOKENS")]
    pub chunk_tokens: Option<u32>,

    /// Groups of layers in which prefill sends pages while later layers are computed: auto (as many as pay), off, or a
    /// number [default: auto]
    #[arg(long, value_name = "N|auto|off")]
    #[serde(deserialize_with = "word_or_number", default)]
    pub layer_groups: Option<Wish>,

    /// Prefill and decode workers pack small pieces of KV into large writes: auto (where it pays), always or never [default:
    /// auto]
    #[arg(long, value_name = "MODE")]
    #[serde(deserialize_with = "word_or_number", default)]
    pub staging: Option<StagingMode>,

    /// Memory for packing pieces (--staging), per worker, shared out to its ranks, at least 64KiB for each. 0 means none
    /// [default: 128MiB, or less on a small machine]
    #[arg(long, value_name = "BYTES")]
    pub staging_bytes: Option<Bytes>,

    /// Pieces of at least this size are written directly [default: what the transfer plugin says, or 16KiB]
    #[arg(long, value_name = "BYTES")]
    pub staging_knee: Option<Bytes>,

    /// Decode workers keep the KV of ended requests, and only what they lack of a prompt is sent to them [default: on where
    /// the transfer plugin can]
    #[arg(long, num_args = 0, default_missing_value = "true")]
    pub decode_radix_cache: Option<bool>,

    /// Turns --decode-radix-cache off
    #[arg(long, conflicts_with = "decode_radix_cache")]
    #[serde(skip)]
    pub no_decode_radix_cache: bool,

    /// Prefill and aggregated workers keep the KV of ended requests, and compute only what they lack of a prompt [default: on
    /// where the transfer plugin can]
    #[arg(long, num_args = 0, default_missing_value = "true")]
    pub prefill_radix_cache: Option<bool>,

    /// Turns --prefill-radix-cache off
    #[arg(long, conflicts_with = "prefill_radix_cache")]
    #[serde(skip)]
    pub no_prefill_radix_cache: bool,

    /// Pages that leave a radix cache are kept in host memory, and on the storage tier if there is one [default: on where
    /// --plugins names a storage tier]
    #[arg(long, num_args = 0, default_missing_value = "true")]
    pub hierarchical_cache: Option<bool>,

    /// Turns --hierarchical-cache off. A storage tier that --plugins names then does nothing
    #[arg(long, conflicts_with = "hierarchical_cache")]
    #[serde(skip)]
    pub no_hierarchical_cache: bool,

    /// Host memory for pages, per worker, for example 2GiB [default: twice the KV pool, or less where
    /// that is not there]
    #[arg(long, value_name = "BYTES")]
    pub hicache_memory: Option<Bytes>,

    /// Storage tiers for pages, by the names of their plugins: each is written, and a page is read from the first that has
    /// it [default: none]
    #[arg(long, value_name = "PLUGIN,...", value_delimiter = ',')]
    #[serde(deserialize_with = "one_or_several", default)]
    pub hicache_storage: Option<Vec<String>>,

    /// When pages are written to the offload tiers [default: write_through]
    #[arg(long, value_name = "POLICY", value_enum)]
    pub hicache_write_policy: Option<WritePolicyName>,

    /// How long a request waits for pages from storage, which is never longer than 30 s [default: timeout]
    #[arg(long, value_name = "POLICY", value_enum)]
    pub hicache_prefetch_policy: Option<PrefetchPolicyName>,

    /// Plugin that hands out the pages of a KV pool [default: swa for models with sliding layers, else none: the host does]
    #[arg(long, value_name = "PLUGIN")]
    pub allocator: Option<String>,

    /// Gives sliding layers a fixed part of the KV pool: so much window for each token of the full layers, above 0 and at
    /// most 1 [default: none, both share the pool]
    #[arg(long, value_name = "RATIO")]
    pub swa_full_tokens_ratio: Option<f64>,

    /// What leaves a radix cache first [default: lru]
    #[arg(long, value_name = "POLICY", value_enum)]
    pub radix_eviction: Option<EvictionPolicyName>,

    /// Sequences in one step at most [default: 64]
    #[arg(long, value_name = "SEQUENCES")]
    pub max_batch: Option<u32>,

    /// Tokens of its answer for which each request finds room in the KV pool when another is admitted [default: 512]
    #[arg(long, value_name = "TOKENS")]
    pub reserved_decode_tokens: Option<u32>,

    /// Mean milliseconds between two tokens of an answer to stay under: fewer requests decode at once, others wait for
    /// their first token instead [default: none, as many decode as fit]
    #[arg(long, value_name = "MILLISECONDS")]
    pub target_itl_ms: Option<f64>,

    /// Guess the next tokens of answers, and verify several of them in one step. This says where guesses come from. Answers
    /// stay the same, token by token. Guesses pay where an answer repeats its prompt or itself [default: none, no guesses]
    #[arg(long, value_name = "SOURCE", value_enum)]
    pub speculate: Option<SpeculateName>,

    /// Tokens that --speculate guesses for an answer in a step at most. Each request guesses fewer where its guesses are
    /// wrong [default: 8]
    #[arg(long, value_name = "TOKENS")]
    pub draft_tokens: Option<u32>,

    /// Requests of a worker that compute or have a transfer under way at most [default: twice --max-batch]
    #[arg(long, value_name = "REQUESTS")]
    pub max_running: Option<u32>,

    /// Requests that wait in a worker at most. More are refused as busy [default: 1024]
    #[arg(long, value_name = "REQUESTS")]
    pub max_queued: Option<u32>,

    /// Longest prompt + answer in tokens [default: what the model and the pool allow]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<u32>,

    /// Most tokens of a chat answer when the request names no number [default: 1024, or what the context leaves]
    #[arg(long, value_name = "TOKENS")]
    pub default_max_tokens: Option<u32>,

    /// Threads that compute, per worker, shared out to its ranks [default: all cores, shared between the workers on this
    /// machine]
    #[arg(long)]
    pub threads: Option<usize>,

    /// Tensor-parallel ranks of a worker, which share its model and its KV pool, at most 64 [default: 1]
    #[arg(long, value_name = "RANKS")]
    pub tp: Option<u32>,

    /// --tp of prefill workers [default: --tp]
    #[arg(long, value_name = "RANKS")]
    pub prefill_tp: Option<u32>,

    /// --tp of decode workers [default: --tp]
    #[arg(long, value_name = "RANKS")]
    pub decode_tp: Option<u32>,

    /// Do not digest pages on both ends of a transfer
    #[arg(long)]
    #[serde(default)]
    pub no_page_integrity: bool,

    /// How log lines are written [default: text]
    #[arg(long, value_enum)]
    pub log_format: Option<LogFormat>,

    /// What is logged: error, warn, info, debug, or a filter like "host=debug" [default: info]. Lines of the audit log are part of all
    /// but off
    #[arg(long, value_name = "FILTER")]
    pub log_level: Option<String>,

    /// Thresholds and limits of the offload tiers
    #[arg(skip)]
    #[serde(default)]
    pub hicache: Option<HicacheSettings>,

    /// The synthetic executor's sizes and speed
    #[arg(skip)]
    pub synthetic: Option<SyntheticSettings>,

    /// Each plugin's own table, by its name
    #[arg(skip)]
    #[serde(default)]
    pub plugin: toml::Table,

    /// Programs that plugins want beside the workers, to be started too, by name (see `host plugins inspect`) [default: none]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub start_companion: Option<Vec<String>>,

    /// What companions are, by name
    #[arg(skip)]
    #[serde(default)]
    pub companion: BTreeMap<String, CompanionSettings>,

    /// Listening sockets handed down by the supervisor: HTTP, control
    #[arg(long, hide = true, value_delimiter = ',')]
    #[serde(skip)]
    pub listen_fds: Option<Vec<i32>>,

    /// End when standard input ends, and leave signals to the supervisor
    #[arg(long, hide = true)]
    #[serde(skip)]
    pub supervised: bool,
}

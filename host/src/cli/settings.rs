//! Every setting once: as a flag, as a key of `--config`, and with its default. Flags win over the file.

mod hicache;
mod synthetic;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Deserialize;

use super::Refused;
use super::companion::CompanionSettings;
use crate::plugins::Policy;
pub use hicache::HicacheSettings;
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
    /// As flags write it.
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

/// Who computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ExecutorName {
    /// A real model on the CPU
    Cpu,
    /// No model: KV that proves itself, with a modelled speed
    Synthetic,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON object per line
    Json,
}

/// What is set, by flag or file. Unset values have the defaults that the accessors give.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// TOML file with the same settings, by their flags' names; flags win
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Hugging Face directory of the model (config.json, safetensors, tokenizer.json)
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// Name under which the model is served [default: the directory's name]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,

    /// Who computes [default: cpu]
    #[arg(long, value_enum)]
    pub executor: Option<ExecutorName>,

    /// Run only this part; without it, all parts are started on this machine
    #[arg(long, value_enum)]
    pub role: Option<RoleName>,

    /// Plugins to load, by name [default: shm]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub plugins: Option<Vec<String>>,

    /// Directories with plugins, searched in order [default: "plugins" beside the program, and the program's own]
    #[arg(long, value_name = "DIR,...", value_delimiter = ',')]
    pub plugins_dir: Option<Vec<PathBuf>>,

    /// Load plugins that others than root, you, and who may replace this program could change; each is logged
    #[arg(long)]
    #[serde(default)]
    pub insecure_plugin_permissions: bool,

    /// Load plugins built with panic = "abort", whose defects end this process; each is logged
    #[arg(long)]
    #[serde(default)]
    pub plugins_may_abort: bool,

    /// Address that the HTTP API listens on [default: 127.0.0.1]
    #[arg(long, value_name = "IP")]
    pub host: Option<IpAddr>,

    /// Port that the HTTP API listens on; 0 takes a free one [default: 8000]
    #[arg(long)]
    pub port: Option<u16>,

    /// Address that this process's control plane listens on [default: 127.0.0.1, a free port; router: port 8001]
    #[arg(long, value_name = "IP:PORT")]
    pub control: Option<SocketAddr>,

    /// Control addresses of the routers that a worker registers with [default: http://127.0.0.1:8001]
    #[arg(long, value_name = "URL,...")]
    pub router: Option<String>,

    /// How the router chooses workers: prefix, least-loaded, round-robin or random [default: prefix]
    #[arg(long, value_name = "POLICY")]
    pub router_policy: Option<String>,

    /// This worker's name in logs and metrics [default: the role and the process id]
    #[arg(long)]
    pub name: Option<String>,

    /// Tokens in a KV page [default: 16]
    #[arg(long, value_name = "TOKENS")]
    pub page_size: Option<u32>,

    /// Pages in a worker's KV pool [default: what --kv-memory holds]
    #[arg(long, value_name = "PAGES")]
    pub pool_pages: Option<u32>,

    /// Memory for a worker's KV pool, for example 512MiB [default: 256MiB]
    #[arg(long, value_name = "BYTES")]
    pub kv_memory: Option<String>,

    /// Element type of K and V: f32 or bf16 [default: the model's]
    #[arg(long)]
    pub kv_dtype: Option<String>,

    /// Order of a pool's dimensions [default: page-head-layer-kv-token-dim]
    #[arg(long)]
    pub kv_layout: Option<String>,

    /// Prompt tokens computed in one step at most [default: 512]
    #[arg(long, value_name = "TOKENS")]
    pub chunk_tokens: Option<u32>,

    /// Groups of layers in which prefill sends pages while later layers are computed: auto (as many as pay), off, or a
    /// number [default: auto]
    #[arg(long, value_name = "N|auto|off")]
    #[serde(deserialize_with = "word_or_number", default)]
    pub layer_groups: Option<String>,

    /// Prefill and decode workers pack small pieces of KV into large writes: auto (where it pays), always or never [default:
    /// auto]
    #[arg(long, value_name = "MODE")]
    pub staging: Option<String>,

    /// Memory for that, per worker, shared out to its ranks, at least 64KiB for each; 0 for none [default: 128MiB]
    #[arg(long, value_name = "BYTES")]
    pub staging_bytes: Option<String>,

    /// Pieces of at least this size are written directly [default: what the transfer plugin says, or 16KiB]
    #[arg(long, value_name = "BYTES")]
    pub staging_knee: Option<String>,

    /// Decode workers keep the KV of ended requests, and only what they lack of a prompt is sent to them
    #[arg(long)]
    #[serde(default)]
    pub decode_radix_cache: bool,

    /// Prefill and aggregated workers keep the KV of ended requests, and compute only what they lack of a prompt
    #[arg(long)]
    #[serde(default)]
    pub prefill_radix_cache: bool,

    /// Pages that leave a radix cache are kept in host memory, and on the storage tier if there is one
    #[arg(long)]
    #[serde(default)]
    pub hierarchical_cache: bool,

    /// Host memory for pages, per worker, for example 2GiB [default: twice the KV pool]
    #[arg(long, value_name = "BYTES")]
    pub hicache_memory: Option<String>,

    /// Storage tiers for pages, by the names of their plugins: each is written, and a page is read from the first that has
    /// it [default: none]
    #[arg(long, value_name = "PLUGIN,...", value_delimiter = ',')]
    #[serde(deserialize_with = "one_or_several", default)]
    pub hicache_storage: Option<Vec<String>>,

    /// When pages are written down: write_through (when they enter a radix cache), write_through_selective (once they were
    /// used twice) or write_back (when they are about to leave it) [default: write_through]
    #[arg(long, value_name = "POLICY")]
    pub hicache_write_policy: Option<String>,

    /// How long a request waits for pages from storage: best_effort (not at all), timeout (as long as having them computed or
    /// sent would take, at most 1 s and 0.25 s per 1024 tokens) or wait_complete (until all are there); never longer than 30 s
    /// [default: timeout]
    #[arg(long, value_name = "POLICY")]
    pub hicache_prefetch_policy: Option<String>,

    /// Plugin that hands out the pages of a KV pool [default: none, the host does; for models with sliding layers swa]
    #[arg(long, value_name = "PLUGIN")]
    pub allocator: Option<String>,

    /// Gives sliding layers a fixed part of the KV pool: so much window for each token of the full layers, above 0 and at
    /// most 1 [default: none, both share the pool]
    #[arg(long, value_name = "RATIO")]
    pub swa_full_tokens_ratio: Option<f64>,

    /// What leaves a radix cache first: lru, lfu, slru or priority [default: lru]; requests carry no priority yet, so that
    /// the last one is lru
    #[arg(long, value_name = "POLICY")]
    pub radix_eviction: Option<String>,

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

    /// Requests of a worker that compute or have a transfer under way at most [default: twice --max-batch]
    #[arg(long, value_name = "REQUESTS")]
    pub max_running: Option<u32>,

    /// Requests that wait in a worker at most; more are refused as busy [default: 1024]
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

    /// What is logged: error, warn, info, debug, or a filter like "host=debug" [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log_level: Option<String>,

    /// Thresholds and limits of the caches below the pool
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

    /// Programs that plugins want beside the workers, to be started too, by name; see `host plugins inspect` [default: none]
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

/// Reads a key that is a word or a number.
fn word_or_number<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(i64),
        Word(String),
    }
    Ok(Some(match Either::deserialize(value)? {
        Either::Number(number) => number.to_string(),
        Either::Word(word) => word,
    }))
}

/// One name may be written without the brackets of a list.
fn one_or_several<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        One(String),
        Several(Vec<String>),
    }
    Ok(Some(match Either::deserialize(value)? {
        Either::One(name) => vec![name],
        Either::Several(names) => names,
    }))
}

/// Takes each named field from the file where the flag left it unset.
macro_rules! fill_from {
    ($flags:ident, $file:ident, $($field:ident)*) => { $( $flags.$field = $flags.$field.or($file.$field); )* };
}

impl Settings {
    /// These flags over the file that `--config` names.
    ///
    /// # Errors
    /// When the file cannot be read, or holds something that is not a setting.
    pub fn with_file(mut self) -> anyhow::Result<Self> {
        let Some(path) = self.config.clone() else { return Ok(self) };
        let shown = path.display();
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Refused(format!("the configuration {shown} cannot be read: {error}")))?;
        let file: Settings = toml::from_str(&text)
            .map_err(|error| Refused(format!("the configuration {shown} is wrong: {error}")))?;
        fill_from!(self, file,
            model served_model_name executor role plugins plugins_dir host port control router name page_size
            pool_pages kv_memory kv_dtype kv_layout chunk_tokens max_batch max_running max_queued max_model_len
            default_max_tokens reserved_decode_tokens target_itl_ms layer_groups router_policy radix_eviction threads
            allocator swa_full_tokens_ratio hicache_memory hicache_storage hicache_write_policy hicache_prefetch_policy
            tp prefill_tp decode_tp log_format log_level staging staging_bytes staging_knee
            start_companion hicache synthetic
        );
        self.no_page_integrity |= file.no_page_integrity;
        self.insecure_plugin_permissions |= file.insecure_plugin_permissions;
        self.plugins_may_abort |= file.plugins_may_abort;
        self.decode_radix_cache |= file.decode_radix_cache;
        self.hierarchical_cache |= file.hierarchical_cache;
        self.prefill_radix_cache |= file.prefill_radix_cache;
        self.plugin = file.plugin;
        self.companion = file.companion;
        Ok(self)
    }

    /// Who computes.
    #[must_use]
    pub fn executor(&self) -> ExecutorName {
        self.executor.unwrap_or(ExecutorName::Cpu)
    }

    /// Plugins to load.
    #[must_use]
    pub fn plugins(&self) -> Vec<String> {
        let mut plugins = self.movers();
        for name in self.stores().iter().chain(&self.allocator) {
            if !plugins.contains(name) {
                plugins.push(name.clone());
            }
        }
        plugins
    }

    /// Of those, the ones that are there to move pages: what is named for storage alone only stores.
    #[must_use]
    pub fn movers(&self) -> Vec<String> {
        let named = self.plugins.clone();
        match self.role {
            // An undivided worker moves no pages.
            Some(RoleName::Aggregated) => named.unwrap_or_default(),
            _ => named.unwrap_or_else(|| vec!["shm".to_owned()]),
        }
    }

    /// Plugins that store pages, in the order in which they are asked.
    #[must_use]
    pub fn stores(&self) -> &[String] {
        self.hicache_storage.as_deref().unwrap_or_default()
    }

    /// The plugin that hands out the pages of a pool with windows, whether it is installed or not.
    #[must_use]
    pub fn window_allocator(&self) -> String {
        self.allocator.clone().unwrap_or_else(|| "swa".to_owned())
    }

    /// Directories with plugins.
    #[must_use]
    pub fn plugins_dirs(&self) -> Vec<PathBuf> {
        self.plugins_dir.clone().unwrap_or_else(|| {
            let program = std::env::current_exe().ok();
            let beside = program.as_deref().and_then(std::path::Path::parent);
            beside.map(|dir| vec![dir.join("plugins"), dir.to_owned()]).unwrap_or_default()
        })
    }

    /// What is accepted of plugin files.
    #[must_use]
    pub fn plugin_policy(&self) -> Policy {
        Policy { insecure_permissions: self.insecure_plugin_permissions, panic_abort: self.plugins_may_abort }
    }

    /// Where the HTTP API listens.
    #[must_use]
    pub fn http_address(&self) -> SocketAddr {
        SocketAddr::new(self.host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), self.port.unwrap_or(8000))
    }

    /// The model's name in the API.
    #[must_use]
    pub fn model_name(&self) -> String {
        let directory = self.model.as_deref().and_then(std::path::Path::file_name);
        self.served_model_name
            .clone()
            .or_else(|| directory.map(|name| name.to_string_lossy().into_owned()))
            .unwrap_or_else(|| "synthetic".to_owned())
    }
}

/// Reads a size such as `512MiB`, `2GiB`, `64kB` or `1048576`.
///
/// # Errors
/// When the text is not a size.
pub fn parse_bytes(text: &str) -> Result<u64, Refused> {
    let digits = text.trim().trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = text.trim()[digits.len()..].to_ascii_lowercase();
    let factor: u64 = match unit.as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        _ => return Err(Refused(format!("{text:?} is not a size: write for example 512MiB or 2GiB"))),
    };
    let number: u64 = digits
        .trim()
        .parse()
        .map_err(|error| Refused(format!("{text:?} is not a size ({error}): write for example 512MiB")))?;
    number.checked_mul(factor).ok_or_else(|| Refused(format!("{text:?} is too large")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in
            [("12", 12), ("4KiB", 4096), ("3MB", 3_000_000), ("1 GiB", 1 << 30), ("2g", 2 << 30)]
        {
            assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "MiB", "-1", "3 parsecs", "99999999999GiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn flags_win_over_the_file_and_unknown_keys_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("host.toml");
        std::fs::write(&path, "port = 1\npage-size = 32\nlayer-groups = 4\n[plugin.shm]\nrails = 2\n")
            .unwrap();
        let flags = Settings { config: Some(path.clone()), port: Some(2), ..Settings::default() };
        let settings = flags.clone().with_file().unwrap();
        assert_eq!((settings.port, settings.page_size), (Some(2), Some(32)));
        assert_eq!(settings.layer_groups.as_deref(), Some("4"));
        assert!(settings.plugin.contains_key("shm"));
        std::fs::write(&path, "prot = 1\n").unwrap();
        let message = format!("{:#}", flags.with_file().unwrap_err());
        assert!(message.contains("prot") && message.contains("host.toml"), "{message}");
    }
}

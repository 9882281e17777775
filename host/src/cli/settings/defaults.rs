//! The defaults of settings. The texts of the flags give the same numbers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use host_executor::cuda::TENSOR_MATH;
use host_front::text::model::gguf::is_gguf;
use host_plugins::Policy;

use super::{ExecutorName, RoleName, Settings};

/// Default in seconds. It is less than the 30 s that Kubernetes gives a container by default.
const DRAIN_TIMEOUT: u32 = 20;
const REQUEST_TIMEOUT: u32 = 600;
/// Default in seconds: the time of a part of 4 GiB at 35 MB/s, which is slower than any network for KV.
const TRANSFER_TIMEOUT: u32 = 120;

impl Settings {
    /// Limit of a request's total time.
    #[must_use]
    pub fn request_timeout(&self) -> Duration {
        Duration::from_secs(self.request_timeout.unwrap_or(REQUEST_TIMEOUT).into())
    }

    /// How long a prefill worker waits for progress of a transfer.
    #[must_use]
    pub fn transfer_timeout(&self) -> Duration {
        Duration::from_secs(self.transfer_timeout.unwrap_or(TRANSFER_TIMEOUT).into())
    }

    /// How long active requests may continue when a process stops.
    #[must_use]
    pub fn drain_timeout(&self) -> Duration {
        Duration::from_secs(self.drain_timeout.unwrap_or(DRAIN_TIMEOUT).into())
    }

    /// The executor that computes the model.
    #[must_use]
    pub fn executor(&self) -> ExecutorName {
        self.executor.unwrap_or(ExecutorName::Cpu)
    }

    /// The GPU of `--executor cuda`.
    #[must_use]
    pub fn cuda_device(&self) -> u32 {
        self.cuda_device.unwrap_or_default()
    }

    /// Names of the plugins to load.
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

    /// Plugins to load that may transfer pages. A plugin that is named only for storage is not among them.
    #[must_use]
    pub fn movers(&self) -> Vec<String> {
        let named = self.plugins.clone();
        match self.role {
            // An aggregated worker moves no pages.
            Some(RoleName::Aggregated) => named.unwrap_or_default(),
            _ => named.unwrap_or_else(|| vec!["shm".to_owned()]),
        }
    }

    /// Plugins that store pages, in the order in which pages are looked up.
    #[must_use]
    pub fn stores(&self) -> &[String] {
        self.hicache_storage.as_deref().unwrap_or_default()
    }

    /// The plugin that allocates the pages of a pool with windows. It need not be installed.
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
            // In a release the program is in `bin/` and the plugins are in `lib/host/plugins/`.
            let installed =
                beside.and_then(std::path::Path::parent).map(|root| root.join("lib/host/plugins"));
            let own = beside.map(|dir| [dir.join("plugins"), dir.to_owned()]);
            own.into_iter().flatten().chain(installed).collect()
        })
    }

    /// Which plugin files are accepted.
    #[must_use]
    pub fn plugin_policy(&self) -> Policy {
        Policy {
            insecure_permissions: self.insecure_plugin_permissions,
            panic_abort: self.plugins_may_abort,
            publishers: self.plugin_publishers.clone(),
        }
    }

    /// Limit of the time of a plugin's call. `None` means no limit.
    #[must_use]
    pub fn plugin_call_timeout(&self) -> Option<Duration> {
        let seconds = self.plugin_call_timeout.unwrap_or(30);
        (seconds > 0).then(|| Duration::from_secs(seconds.into()))
    }

    /// Whether decode workers keep the KV of ended requests.
    #[must_use]
    pub fn decode_radix_cache(&self) -> bool {
        self.decode_radix_cache.unwrap_or_default()
    }

    /// Whether prefill and aggregated workers keep the KV of ended requests.
    #[must_use]
    pub fn prefill_radix_cache(&self) -> bool {
        self.prefill_radix_cache.unwrap_or_default()
    }

    /// Whether pages are copied to host memory and storage tiers.
    #[must_use]
    pub fn hierarchical_cache(&self) -> bool {
        self.hierarchical_cache.unwrap_or_default()
    }

    /// Workers that share this machine's memory, as far as this process knows.
    #[must_use]
    pub fn workers_here(&self) -> usize {
        if self.role.is_none() || self.supervised { 2 } else { 1 }
    }

    /// The address at which the HTTP API listens.
    #[must_use]
    pub fn http_address(&self) -> SocketAddr {
        SocketAddr::new(self.host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), self.port.unwrap_or(8000))
    }

    /// The model's name in the API: the first one, if there are several.
    #[must_use]
    pub fn model_name(&self) -> String {
        let own = self.model.as_deref().and_then(|model| match is_gguf(model) {
            true => model.file_stem(),
            false => model.file_name(),
        });
        let names = self.served_model_name.as_ref();
        names
            .and_then(|names| names.first().cloned())
            .or_else(|| own.map(|name| name.to_string_lossy().into_owned()))
            .unwrap_or_else(|| "synthetic".to_owned())
    }

    /// Other names of the model in the API.
    #[must_use]
    pub fn model_aliases(&self) -> Vec<String> {
        self.served_model_name.iter().flatten().skip(1).cloned().collect()
    }

    /// Tokens in a KV page.
    #[must_use]
    pub fn page_size(&self) -> u32 {
        self.page_size.unwrap_or(16)
    }

    /// Limit of the prompt tokens in one step, with this math of the model. Tensor cores need more rows than a CPU before they are
    /// busy.
    #[must_use]
    pub fn chunk_tokens(&self, math: &str) -> u32 {
        self.chunk_tokens.unwrap_or(if math == TENSOR_MATH { 2048 } else { 512 })
    }

    /// Limit of the sequences in one step.
    #[must_use]
    pub fn max_batch(&self) -> u32 {
        self.max_batch.unwrap_or(64)
    }

    /// Tokens that are guessed for an answer in a step at most, or 0 for no guesses.
    #[must_use]
    pub fn draft_tokens(&self) -> u32 {
        self.speculate.map_or(0, |_ngram| self.draft_tokens.unwrap_or(8))
    }

    /// Limit of the requests that compute or have a transfer in progress.
    #[must_use]
    pub fn max_running(&self) -> u32 {
        self.max_running.unwrap_or(self.max_batch().saturating_mul(2))
    }

    /// Limit of the requests in a worker's queue.
    #[must_use]
    pub fn max_queued(&self) -> u32 {
        self.max_queued.unwrap_or(1024)
    }

    /// Number of answer tokens for which each request must find room when another request is admitted.
    #[must_use]
    pub fn reserved_decode_tokens(&self) -> u32 {
        self.reserved_decode_tokens.unwrap_or(512)
    }
}

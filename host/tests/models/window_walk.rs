//! Models with windows in all combinations: transfer over shared memory and over the real NIXL, equal and different numbers of
//! ranks, with radix caches and offload tiers or without, with enough pages and with too few. Prompts are shorter than the window,
//! as long, one token longer, and sixty times as long. All answers are those of one aggregated worker without caches.

use std::path::Path;

use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start};
use host_tests::model::TinyModel;
use host_tests::plugin_files;

const ANSWER: u32 = 80;
/// Requests of each short length.
const TIMES: u32 = 6;
/// Ranks of prefill and of decode. The unequal numbers come with the layout of engines' pools, and there all pages go through
/// staging.
const RANKS: [&[&str]; 2] = [
    &["--prefill-tp", "1", "--decode-tp", "1"],
    &[
        "--prefill-tp",
        "4",
        "--decode-tp",
        "2",
        "--kv-layout",
        "layer-kv-page-token-head-dim",
        "--staging",
        "always",
        "--staging-bytes",
        "4MiB",
    ],
];
const RADIX: [&str; 2] = ["--prefill-radix-cache", "--decode-radix-cache"];
const OFFLOAD: [&str; 5] =
    ["--hierarchical-cache", "--hicache-prefetch-policy", "wait_complete", "--hicache-storage", "memory"];

/// A model with a window.
struct Model {
    flags: Vec<String>,
    config: String,
    window: u32,
    /// Sizes of the pool in pages. The last one has room for the longest request and little else, an earlier one for all requests
    /// at once.
    pools: &'static [&'static str],
}

impl Model {
    fn start(&self, plugin: &str, plugin_config: &str, flags: &[&str]) -> (Cluster, tempfile::TempDir) {
        let plugins = plugin_files::directory(&[plugin, "swa", "memory"]);
        let directory = plugins.path().display().to_string();
        let always = ["--plugins", plugin, "--plugins-dir", &directory];
        let flags: Vec<String> = self
            .flags
            .iter()
            .cloned()
            .chain(always.iter().chain(flags).map(|flag| (*flag).to_owned()))
            .collect();
        let workers = if flags.iter().any(|flag| flag == "aggregated") { 1 } else { 2 };
        let offload = if flags.iter().any(|flag| flag == "--hierarchical-cache") { RESTORES } else { "" };
        let config = format!("{}{offload}{plugin_config}", self.config);
        let program = Path::new(env!("CARGO_BIN_EXE_host"));
        (Cluster::start(&Start { program, flags, config, workers }), plugins)
    }

    fn prompts(&self) -> Vec<Vec<u32>> {
        let prompt = |length: u32, seed: u32| -> Vec<u32> {
            (0..length).map(|token| (token * 7 + token * token / 50 + seed * 13) % 200).collect()
        };
        let short = [self.window - 1, self.window, self.window + 1];
        let mut all = vec![prompt(60 * self.window, 99)];
        all.extend((0..TIMES).flat_map(|time| short.map(|length| prompt(length, time * 3 + length % 3))));
        all
    }

    fn walk(&self, plugin: &str, plugin_config: &str) {
        let prompts = self.prompts();
        let (whole, _plugins) = self.start("shm", "", &["--role", "aggregated"]);
        let right = answers(&whole, &prompts);
        let mut resumed = 0.0;
        for ranks in RANKS {
            for caches in [vec![], RADIX.to_vec(), [&RADIX[..], &OFFLOAD].concat()] {
                for pages in self.pools {
                    let pool = ["--pool-pages", pages, "--reserved-decode-tokens", "16", "--max-batch", "32"];
                    let flags = [ranks, &caches, &pool].concat();
                    let how = format!("{plugin}, {flags:?}");
                    let (split, _plugins) = self.start(plugin, plugin_config, &flags);
                    for round in 0..2 {
                        assert_eq!(answers(&split, &prompts), right, "{how}, round {round}");
                        if caches.len() > RADIX.len() {
                            // From here on only storage has pages.
                            split.await_written();
                            split.flush();
                        }
                    }
                    split.wait("everything to be free", || split.all_free());
                    let decode = split.metrics(&split.worker("decode"));
                    let count = |name: &str| decode[&format!("host_{name}_total")];
                    println!(
                        "{how}: {} preemptions, {} tokens found again, {} of them in offload tiers, {} computed again",
                        count("retractions"),
                        count("restored_tokens"),
                        count("restored_offload_tokens"),
                        count("recomputed_tokens")
                    );
                    resumed += count("restored_offload_tokens");
                    assert_eq!(count("integrity_failures"), 0.0, "{how}");
                    assert_eq!(count("retractions") > 0.0, Some(pages) == self.pools.last(), "{how}");
                }
            }
        }
        assert!(resumed > 0.0, "no preempted request found anything in the offload tiers");
    }
}

/// Asks for all answers at once.
fn answers(cluster: &Cluster, prompts: &[Vec<u32>]) -> Vec<Vec<u64>> {
    std::thread::scope(|scope| {
        let clients: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| cluster.generate(prompt, ANSWER).unwrap().tokens))
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

/// Seven layers, five of them sliding: two in a page, so a window part has three pages. Computing takes long enough that the cost
/// model prefers to restore.
fn synthetic() -> Model {
    Model {
        flags: ["--executor", "synthetic"].map(str::to_owned).to_vec(),
        config: "[synthetic]\nlayers = 7\nsliding-layers = 5\nwindow = 40\nkv-heads = 4\n".to_owned(),
        window: 40,
        pools: &["600", "180"],
    }
}

fn gemma3(directory: &Path) -> Model {
    TinyModel { heads: 8, kv_heads: 4, ..TinyModel::gemma3() }.write(directory).unwrap();
    let model = directory.display().to_string();
    Model {
        flags: ["--model", &model, "--threads", "2"].map(str::to_owned).to_vec(),
        config: String::new(),
        window: u32::try_from(TinyModel::gemma3().window).unwrap(),
        pools: &["100"],
    }
}

#[test]
fn a_model_with_a_window_answers_alike_over_shared_memory() {
    synthetic().walk("shm", "");
}

#[test]
fn a_gemma3_answers_alike_over_shared_memory() {
    let directory = tempfile::tempdir().unwrap();
    gemma3(directory.path()).walk("shm", "");
}

/// Tests in the group that runs one at a time, because they use other projects' libraries and programs.
mod external {
    use host_tests::nixl;

    use super::*;

    #[test]
    fn a_model_with_a_window_answers_alike_over_nixl() {
        let Some(config) = nixl::config() else { return };
        synthetic().walk("nixl", &format!("[plugin.nixl]\n{config}"));
    }

    #[test]
    fn a_gemma3_answers_alike_over_nixl() {
        let Some(config) = nixl::config() else { return };
        let directory = tempfile::tempdir().unwrap();
        gemma3(directory.path()).walk("nixl", &format!("[plugin.nixl]\n{config}"));
    }
}

//! Models with sliding layers between workers with different numbers of ranks, and over the real NIXL. The tokens are those of one
//! aggregated worker, with caches on either side and without.

use std::path::Path;

use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start};
use host_tests::model::TinyModel;
use host_tests::plugin_files;

const WINDOW: u32 = 20;
const PAGE: u32 = 8;
/// Lengths: shorter than the window, equal, one more, and 60 windows. The last two prompts share more than one window.
const LENGTHS: [u32; 5] = [WINDOW - 3, WINDOW, WINDOW + 1, 60 * WINDOW, 3 * WINDOW];
const ANSWER_TOKENS: u32 = 40;

/// The model that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Model {
    /// 2 layers that see everything and 5 that see the window.
    Synthetic,
    /// The same as a Gemma-3.
    Gemma3,
}

struct Setting {
    flags: Vec<String>,
    config: String,
    _plugins: tempfile::TempDir,
    _model: tempfile::TempDir,
}

impl Setting {
    fn new(model: Model, plugins: &[&str], config: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut flags =
            vec!["--page-size".to_owned(), PAGE.to_string(), "--threads".to_owned(), "2".to_owned()];
        match model {
            Model::Synthetic => flags.extend(["--executor".into(), "synthetic".into()]),
            Model::Gemma3 => {
                let window = WINDOW as usize;
                TinyModel { heads: 8, kv_heads: 4, window, ..TinyModel::gemma3() }
                    .write(directory.path())
                    .unwrap();
                flags.extend(["--model".into(), directory.path().display().to_string()]);
            }
        }
        let config = format!(
            "{config}\n[synthetic]\nlayers = 7\nsliding-layers = 5\nwindow = {WINDOW}\nkv-heads = 4\n"
        );
        // In addition the allocator for models with sliding layers, which the host chooses by default.
        let plugins = plugin_files::directory(&[plugins, &["swa"]].concat());
        flags.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
        Self { flags, config, _plugins: plugins, _model: directory }
    }

    /// A setting with the transfer plugin `shm`.
    fn shm(model: Model) -> Self {
        Self::new(model, &["shm"], "")
    }

    fn start(&self, more: &[&str]) -> Cluster {
        let mut flags = self.flags.clone();
        flags.extend(more.iter().map(|flag| (*flag).to_owned()));
        let workers = if more.contains(&"aggregated") { 1 } else { 2 };
        let program = Path::new(env!("CARGO_BIN_EXE_host"));
        let offload = if more.contains(&"--hierarchical-cache") { RESTORES } else { "" };
        Cluster::start(&Start { program, flags, config: format!("{}{offload}", self.config), workers })
    }

    /// Answers of an aggregated worker with room for everything, which computes each prompt at once.
    fn right(&self) -> Vec<Vec<u64>> {
        tokens(&self.start(&["--role", "aggregated", "--pool-pages", "8000", "--chunk-tokens", "2000"]))
    }
}

fn prompts() -> Vec<Vec<u32>> {
    LENGTHS.map(|length| (0..length).map(|token| (token * 37 + token / 50) % 250).collect()).to_vec()
}

/// Asks for all prompts at once, so that batches mix.
fn tokens(cluster: &Cluster) -> Vec<Vec<u64>> {
    let prompts = prompts();
    std::thread::scope(|scope| {
        let asks: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| cluster.generate(prompt, ANSWER_TOKENS).unwrap().tokens))
            .collect();
        asks.into_iter().map(|ask| ask.join().unwrap()).collect()
    })
}

const CACHES: [&[&str]; 4] = [
    &[],
    &["--prefill-radix-cache"],
    &["--decode-radix-cache"],
    &["--decode-radix-cache", "--prefill-radix-cache"],
];

/// Compares split servers with these numbers of ranks, with caches and without, each cold and again.
fn split_answers_as_aggregated(setting: &Setting, plugin: &str, ranks: &[(u32, u32)]) {
    let right = setting.right();
    for (caches, (prefill, decode)) in
        CACHES.iter().flat_map(|caches| ranks.iter().map(move |pair| (caches, *pair)))
    {
        for chunk in ["2000", "50"] {
            let (prefill, decode) = (prefill.to_string(), decode.to_string());
            let ranks = ["--prefill-tp", &prefill, "--decode-tp", &decode];
            let rest = ["--plugins", plugin, "--pool-pages", "1500", "--chunk-tokens", chunk];
            let flags = [*caches, &ranks, &rest].concat();
            let cluster = setting.start(&flags);
            for round in 0..2 {
                assert_eq!(tokens(&cluster), right, "{flags:?}, round {round}");
                cluster.wait("all pages to be free", || cluster.all_free());
            }
            assert_eq!(cluster.total("decode", "host_integrity_failures_total", ""), 0.0);
        }
    }
}

#[test]
fn workers_of_different_numbers_of_ranks_answer_as_an_aggregated_one() {
    split_answers_as_aggregated(&Setting::shm(Model::Synthetic), "shm", &[(1, 1), (4, 2), (1, 3)]);
    split_answers_as_aggregated(&Setting::shm(Model::Gemma3), "shm", &[(4, 2)]);
}

/// Tests in the group that runs one at a time, because they use other projects' libraries and programs.
mod external {
    use host_tests::nixl;

    use super::*;

    #[test]
    fn a_split_server_over_nixl_answers_as_an_aggregated_one() {
        let Some(config) = nixl::config() else { return };
        for (model, ranks) in [(Model::Synthetic, (1, 1)), (Model::Gemma3, (4, 2))] {
            let setting = Setting::new(model, &["nixl"], &format!("[plugin.nixl]\n{config}"));
            split_answers_as_aggregated(&setting, "nixl", &[ranks]);
        }
    }

    /// Both caches have offload tiers: host memory, and a test storage tier in each worker's memory. After a flush only the storage
    /// tier has pages.
    #[test]
    fn pages_and_windows_of_the_offload_tiers_serve_over_nixl_as_well() {
        let Some(config) = nixl::config() else { return };
        let config = format!("[plugin.nixl]\n{config}");
        for (model, ranks) in [(Model::Synthetic, ["1", "1"]), (Model::Gemma3, ["4", "2"])] {
            let setting = Setting::new(model, &["nixl", "memory"], &config);
            let right = setting.right();
            let cluster = setting.start(&[
                "--plugins",
                "nixl",
                "--prefill-tp",
                ranks[0],
                "--decode-tp",
                ranks[1],
                "--pool-pages",
                "1500",
                "--decode-radix-cache",
                "--prefill-radix-cache",
                "--hierarchical-cache",
                "--hicache-prefetch-policy",
                "wait_complete",
                "--hicache-storage",
                "memory",
            ]);
            for round in 0..3 {
                assert_eq!(tokens(&cluster), right, "{model:?}, round {round}");
                cluster.await_written();
                cluster.flush();
            }
            let restored = |name| cluster.total("prefill", name, "");
            assert!(restored("host_hicache_loaded_pages_total") > 0.0, "{model:?}");
            // The windows behind them were restored, or computed again if that costs less.
            let windows = restored("host_hicache_promised_window_pages_total")
                + restored("host_window_recomputed_tokens_total");
            assert!(windows > 0.0, "{model:?}");
        }
    }
}

//! Different numbers of ranks, both ways of sending, radix caches and offload tiers on both sides, over the real NIXL and over shm:
//! the tokens are those of one aggregated worker without caches.

use std::path::Path;

use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;

const MODEL: &str = "[synthetic]\nkv-heads = 8\n";
const PAGE_TOKENS: usize = 16;
/// Tokens of an answer.
const ANSWER: u32 = 20;
/// Ranks of prefill and decode.
const RANKS: [(&str, &str); 5] = [("1", "1"), ("4", "2"), ("2", "4"), ("4", "1"), ("3", "2")];

fn start(flags: &[&str], plugins: &Path, config: String) -> Cluster {
    let directory = plugins.display().to_string();
    let always = ["--executor", "synthetic", "--plugins-dir", &directory, "--chunk-tokens", "64"];
    let flags: Vec<String> = always.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    let workers = if flags.iter().any(|flag| flag == "aggregated") { 1 } else { 2 };
    Cluster::start(&Start { program: Path::new(env!("CARGO_BIN_EXE_host")), flags, config, workers })
}

fn first_turns() -> Vec<Vec<u32>> {
    let prompt = |length: u32| (0..length).map(|token| (token * 37 + length) % 250).collect();
    [5, 33, 64, 100, 130, 200].map(prompt).to_vec()
}

/// Asks for all prompts at once, so that batches mix.
fn answers(cluster: &Cluster, prompts: &[Vec<u32>]) -> Vec<Vec<u64>> {
    std::thread::scope(|scope| {
        let asks: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| cluster.generate(prompt, ANSWER).unwrap().tokens))
            .collect();
        asks.into_iter().map(|ask| ask.join().unwrap()).collect()
    })
}

/// The next prompts of the clients: the previous prompt, its answer, and new tokens.
fn next_turns(prompts: &[Vec<u32>], answers: &[Vec<u64>]) -> Vec<Vec<u32>> {
    let turn = |(prompt, answer): (&Vec<u32>, &Vec<u64>)| {
        prompt.iter().copied().chain(answer.iter().map(|token| *token as u32)).chain(7..30).collect()
    };
    prompts.iter().zip(answers).map(turn).collect()
}

fn conversation(plugin: &str, plugin_config: &str) {
    let plugins = plugin_files::directory(&[plugin, "hicache-file"]);
    let alone = start(&["--role", "aggregated"], plugins.path(), MODEL.to_owned());
    let first = first_turns();
    let first_right = answers(&alone, &first);
    let second = next_turns(&first, &first_right);
    let second_right = answers(&alone, &second);
    for (prefill, decode) in RANKS {
        for staging in ["always", "never"] {
            let how = format!("{plugin}, {prefill} to {decode}, staging {staging}");
            let store = tempfile::tempdir().unwrap();
            let config = format!(
                "{MODEL}{RESTORES}{plugin_config}[plugin.hicache-file]\ndir = {:?}\n",
                store.path().join("pages")
            );
            let flags = [
                &["--plugins", plugin, "--prefill-tp", prefill, "--decode-tp", decode, "--staging", staging]
                    [..],
                &["--kv-layout", "layer-kv-page-token-head-dim"],
                if staging == "always" { &["--staging-bytes", "4MiB"] } else { &[] },
                &["--decode-radix-cache", "--prefill-radix-cache", "--hierarchical-cache"],
                &["--hicache-storage", "hicache-file"],
            ];
            let split = start(&flags.concat(), plugins.path(), config);
            assert_eq!(answers(&split, &first), first_right, "{how}, first turn");
            // The last token that was drawn has no KV.
            let pages: usize =
                first.iter().map(|prompt| (prompt.len() + ANSWER as usize - 1) / PAGE_TOKENS).sum();
            split.wait("whole pages to be stored", || {
                split.storage_pages("decode", "written") >= pages as f64 && split.all_free()
            });
            // From here on only storage has pages.
            split.flush();
            assert_eq!(answers(&split, &second), second_right, "{how}, second turn");
            split.wait("everything to be free", || split.all_free());
            assert_eq!(split.total("decode", "host_integrity_failures_total", ""), 0.0, "{how}");
            let staged = split.total("decode", "host_staged_received_bytes_total", "");
            assert_eq!(staged > 0.0, staging == "always", "{how}");
            assert!(
                split.total("decode", "host_hicache_loaded_pages_total", "") > 0.0,
                "{how}: nothing was restored"
            );
        }
    }
}

#[test]
fn every_arrangement_over_shared_memory_answers_as_one_worker_alone() {
    conversation("shm", "");
}

/// Tests in the group that runs one at a time, because they use other projects' libraries and programs.
mod external {
    use host_tests::{mooncake, nixl};

    use super::*;

    #[test]
    fn every_arrangement_over_nixl_answers_as_one_worker_alone() {
        let Some(library) = nixl::config() else { return };
        conversation("nixl", &format!("[plugin.nixl]\n{library}"));
    }

    #[test]
    fn every_arrangement_over_mooncake_answers_as_one_worker_alone() {
        let Some(config) = mooncake::config() else { return };
        conversation("mooncake", &format!("[plugin.mooncake]\n{config}"));
    }
}

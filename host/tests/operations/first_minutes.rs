//! The first commands that an operator types, as typed: plugins are named and nothing else is configured.

use std::path::{Path, PathBuf};

use host_tests::caches::{LOADED, RESTORES};
use host_tests::cluster::{Cluster, Start};
use host_tests::fetched::Artifact;
use host_tests::plugin_files;
use serde_json::{Value, json};

/// A server with `host --executor synthetic` and these flags, and no configuration.
fn serve(flags: &[&str], plugins: &Path, environment: &[(&str, &Path)], workers: usize) -> Cluster {
    configured(String::new(), flags, plugins, environment, workers)
}

fn configured(
    config: String,
    flags: &[&str],
    plugins: &Path,
    environment: &[(&str, &Path)],
    workers: usize,
) -> Cluster {
    let mut all = vec!["--executor".to_owned(), "synthetic".to_owned()];
    all.extend(["--plugins-dir".to_owned(), plugins.display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    Cluster::start_as_given(&Start { program, flags: all, config, workers }, environment)
}

fn prompt() -> Vec<u32> {
    (0..400).map(|token| token * 7 % 200).collect()
}

/// The folders that stores were given in this cache directory.
fn stores(cache: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(cache.join("host/pages")).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// The messages in the server's log.
fn messages(cluster: &Cluster) -> Vec<String> {
    let lines = cluster.log_lines();
    lines.iter().filter_map(|line| Some(line["fields"]["message"].as_str()?.to_owned())).collect()
}

fn said(cluster: &Cluster, parts: &[&str]) {
    let messages = messages(cluster);
    let found = messages.iter().any(|message| parts.iter().all(|part| message.contains(part)));
    assert!(found, "no message has {parts:?}:\n{}", messages.join("\n"));
}

/// Serves, restarts and serves again with these plugins. The second process must find the pages of the first one.
fn serves_stores_and_restores(named: &str, carries: &str, environment: &[(&str, &Path)]) {
    let plugins = plugin_files::directory(&["shm", "nixl", "hicache-file", "swa"]);
    let cache = tempfile::tempdir().unwrap();
    let environment = [&[("XDG_CACHE_HOME", cache.path())], environment].concat();
    let mut cluster = serve(&["--plugins", named], plugins.path(), &environment, 2);
    said(&cluster, &["transfer backend: ", carries, ".so"]);
    said(&cluster, &["storage tier: hicache-file 0.1.0 (", "hicache-file.so)"]);
    said(&cluster, &["hierarchical cache is on: hicache-file stores pages", "--no-hierarchical-cache"]);
    said(&cluster, &["prefix caching is on in prefill and decode", "--no-prefill-radix-cache"]);
    said(&cluster, &["hicache-file keeps pages in", "at most", "--set hicache-file.dir="]);
    said(&cluster, &["available and not used: ", "swa"]);
    said(&cluster, &["KV pool of each worker: ", " tokens"]);
    let first = cluster.generate(&prompt(), 8).unwrap();
    assert!(first.transferred_bytes > 0);
    let again = cluster.generate(&prompt(), 8).unwrap();
    assert_eq!(again.tokens, first.tokens);
    assert!(again.transferred_bytes < first.transferred_bytes / 10, "decode kept its pages: {again:?}");
    assert_eq!(cluster.interrupt(), Some(0), "{}", cluster.log());
    let folder = stores(cache.path());
    assert_eq!(folder.len(), 1, "one model: {folder:?}");
    assert!(folder[0].file_name().unwrap().to_str().unwrap().starts_with("synthetic-"), "{folder:?}");

    // Measured times decide whether restoring pays. These costs make it pay.
    let config = format!("{RESTORES}[plugin.hicache-file]\n{LOADED}");
    let cluster = configured(config, &["--plugins", named], plugins.path(), &environment, 2);
    assert_eq!(cluster.generate(&prompt(), 8).unwrap().tokens, first.tokens);
    cluster.wait("the second life to have read pages", || cluster.all_storage_pages("read") > 0.0);
}

#[test]
fn shm_and_hicache_file_serve_store_and_restore_without_a_configuration() {
    serves_stores_and_restores("shm,hicache-file", "shm", &[]);
}

/// Runs `host --model FILE --plugins NAMES` with a real model, in a folder with the built program and plugins.
fn answers_as_typed(named: &str, environment: &[(&str, &Path)]) {
    let built = Path::new(env!("CARGO_BIN_EXE_host"));
    let folder = tempfile::tempdir_in(built.parent().unwrap()).unwrap();
    let program = folder.path().join("host");
    std::fs::hard_link(built, &program).unwrap();
    for name in ["shm", "nixl", "hicache-file"] {
        std::fs::copy(plugin_files::plugin(name), folder.path().join(format!("{name}.so"))).unwrap();
    }
    let cache = tempfile::tempdir().unwrap();
    let environment = [&[("XDG_CACHE_HOME", cache.path())], environment].concat();
    let model = Artifact::SmolLm2.path().display().to_string();
    let flags = ["--model", &model, "--plugins", named].map(str::to_owned).to_vec();
    let start = Start { program: &program, flags, config: String::new(), workers: 2 };
    let mut cluster = Cluster::start_as_given(&start, &environment);
    let messages = json!([{ "role": "user", "content": "What is the capital of France?" }]);
    let body = json!({ "messages": messages, "temperature": 0, "max_tokens": 24 });
    let (status, text) = cluster.post("/v1/chat/completions", &body.to_string()).unwrap();
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "The capital of France is Paris.", "{text}");
    assert_eq!(cluster.interrupt(), Some(0), "{}", cluster.log());
    let folder = stores(cache.path());
    assert_eq!(folder.len(), 1, "one model: {folder:?}");
}

#[test]
fn the_command_with_shm_answers_in_english_as_typed() {
    answers_as_typed("shm,hicache-file", &[]);
}

#[test]
fn a_key_can_be_set_on_the_command_line() {
    let plugins = plugin_files::directory(&["shm", "hicache-file"]);
    let (cache, chosen) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let chosen = chosen.path().join("pages");
    let set = format!("hicache-file.dir={}", chosen.display());
    let flags = ["--plugins", "shm,hicache-file", "--set", &set, "--set", "hicache-file.size_limit_mib=512"];
    let mut cluster = serve(&flags, plugins.path(), &[("XDG_CACHE_HOME", cache.path())], 2);
    cluster.generate(&prompt(), 2).unwrap();
    assert_eq!(cluster.interrupt(), Some(0), "{}", cluster.log());
    assert!(chosen.is_dir() && stores(cache.path()).is_empty());
}

#[test]
fn of_two_plugins_that_carry_pages_the_chosen_one_does() {
    let plugins = plugin_files::directory(&["shm", "loopback"]);
    let flags = ["--plugins", "loopback,shm", "--transfer", "shm"];
    let cluster = serve(&flags, plugins.path(), &[], 2);
    said(&cluster, &["transfer backend: shm "]);
    said(&cluster, &["loopback does nothing: --transfer shm carries pages"]);
    assert!(cluster.generate(&prompt(), 2).unwrap().transferred_bytes > 0);
}

#[test]
fn prefix_caches_are_on_unless_they_are_switched_off() {
    let plugins = plugin_files::directory(&["shm"]);
    for (flags, decode, prefill) in [
        (&[][..], true, true),
        (&["--no-decode-radix-cache"], false, true),
        (&["--no-prefill-radix-cache"], true, false),
        (&["--no-prefill-radix-cache", "--no-decode-radix-cache"], false, false),
    ] {
        let cluster = serve(flags, plugins.path(), &[], 2);
        let first = cluster.generate(&prompt(), 2).unwrap();
        let second = cluster.generate(&prompt(), 2).unwrap();
        assert_eq!(first.tokens, second.tokens);
        assert_eq!(second.transferred_bytes < first.transferred_bytes, decode, "{flags:?}");
        let found = cluster.total("prefill", "host_prefix_promised_tokens_total", "device");
        assert_eq!(found > 0.0, prefill, "{flags:?}");
    }
}

#[test]
fn a_worker_alone_keeps_what_it_computed() {
    let plugins = plugin_files::directory(&["hicache-file"]);
    let cache = tempfile::tempdir().unwrap();
    let flags = ["--role", "aggregated", "--plugins", "hicache-file"];
    let cluster = serve(&flags, plugins.path(), &[("XDG_CACHE_HOME", cache.path())], 1);
    said(&cluster, &["prefix caching is on in prefill: the default"]);
    said(&cluster, &["storage tier: hicache-file"]);
    let first = cluster.generate(&prompt(), 2).unwrap();
    assert_eq!(cluster.generate(&prompt(), 2).unwrap().tokens, first.tokens);
}

#[test]
fn what_is_installed_and_not_used_is_named_where_no_plugin_is_needed_either() {
    let plugins = plugin_files::directory(&["hicache-file", "shm"]);
    let cluster = serve(&["--role", "aggregated"], plugins.path(), &[], 1);
    said(&cluster, &["available and not used: hicache-file, shm; --plugins puts them to work"]);
}

/// Tests in the group that runs one at a time, because they use other projects' libraries and programs.
mod external {
    use host_tests::nixl;

    use super::*;

    #[test]
    fn the_missions_command_serves_stores_and_restores_without_a_configuration() {
        let Some(library) = nixl::library() else { return };
        serves_stores_and_restores("nixl,hicache-file", "nixl", &[("NIXL_LIBRARY", &library)]);
    }

    #[test]
    fn the_missions_command_answers_in_english_as_typed() {
        let Some(library) = nixl::library() else { return };
        answers_as_typed("nixl,hicache-file", &[("NIXL_LIBRARY", &library)]);
    }
}

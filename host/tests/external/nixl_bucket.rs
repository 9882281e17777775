//! Real workers with NIXL's storage tier in a bucket of a real S3 server. Pages of dead workers are restored by others, no answer
//! changes whatever happens to the bucket, and no log has its key.

use std::path::Path;

use host_tests::caches::{RESTORES, TRIES};
use host_tests::cluster::{Cluster, Start, signal};
use host_tests::s3::{Bucket, PATIENT_MS, SECRET};
use host_tests::{nixl, plugin_files};

/// Large pages, so that there are few objects: each takes the Python server milliseconds, and tens of them on a busy machine.
const PAGE_TOKENS: usize = 64;
/// Tokens of an answer.
const ANSWER: u32 = 20;
const MODEL: &str = "[synthetic]\nkv-heads = 2\n";

fn start(flags: &[&str], plugins: &Path, config: String) -> Cluster {
    let directory = plugins.display().to_string();
    let page = PAGE_TOKENS.to_string();
    let always = [
        "--executor",
        "synthetic",
        "--plugins-dir",
        &directory,
        "--chunk-tokens",
        "64",
        "--page-size",
        &page,
    ];
    let flags: Vec<String> = always.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    let workers = if flags.iter().any(|flag| flag == "aggregated") { 1 } else { 2 };
    Cluster::start(&Start { program: Path::new(env!("CARGO_BIN_EXE_host")), flags, config, workers })
}

fn workers(bucket: &Bucket, plugins: &Path, costs: &str) -> Option<Cluster> {
    // With `TRIES` the bucket hangs, and the tier's deadline ends what is still in flight. So that deadline is short.
    let storage = bucket.storage(if costs == TRIES { 20_000 } else { PATIENT_MS });
    let table = format!("[plugin.nixl]\n{}[plugin.nixl.storage]\n{storage}", nixl::config()?);
    let flags = [
        "--plugins",
        "shm",
        "--decode-radix-cache",
        "--prefill-radix-cache",
        "--hierarchical-cache",
        "--hicache-storage",
        "nixl",
    ];
    Some(start(&flags, plugins, format!("{MODEL}{costs}{table}")))
}

fn prompts() -> Vec<Vec<u32>> {
    let prompt = |length: u32| (0..length).map(|token| (token * 37 + length) % 250).collect();
    [64, 130, 200].map(prompt).to_vec()
}

fn ask(cluster: &Cluster) -> Vec<Vec<u64>> {
    prompts().iter().map(|prompt| cluster.generate(prompt, ANSWER).unwrap().tokens).collect()
}

/// Waits until decode has stored the whole pages of all prompts and answers. The last token that was drawn has no KV.
///
/// If puts failed, asks for everything again, so that their pages are computed and put again. Pages that decode then reads count as
/// stored.
fn await_stored(cluster: &Cluster) {
    let pages: usize =
        prompts().iter().map(|prompt| (prompt.len() + ANSWER as usize - 1) / PAGE_TOKENS).sum();
    let seen = |end| cluster.storage_pages("decode", end);
    let mut before = 0.0;
    cluster.wait("whole pages to be stored", || {
        cluster.await_written();
        let (written, read) = (seen("written"), seen("read"));
        if written >= pages as f64 || written + read - before >= pages as f64 {
            return true;
        }
        before = written + read;
        cluster.flush();
        ask(cluster);
        false
    });
}

#[test]
fn what_dead_workers_stored_others_restore_and_what_is_damaged_is_computed_again() {
    if nixl::library().is_none() {
        return;
    }
    let Some(bucket) = Bucket::new() else { return };
    let plugins = plugin_files::directory(&["shm", "nixl"]);
    let expected = ask(&start(&["--role", "aggregated"], plugins.path(), MODEL.to_owned()));
    let cluster = workers(&bucket, plugins.path(), RESTORES).unwrap();
    assert_eq!(ask(&cluster), expected);
    await_stored(&cluster);
    for role in ["prefill", "decode"] {
        signal(cluster.pid(role).unwrap(), "KILL");
    }
    let log = cluster.log();
    drop(cluster);
    let names = bucket.names();
    assert!(!names.is_empty());

    let cluster = workers(&bucket, plugins.path(), RESTORES).unwrap();
    assert_eq!(ask(&cluster), expected, "restored");
    cluster.await_nothing_held();
    cluster.flush();
    assert!(cluster.all_storage_pages("read") > 0.0);
    for (number, name) in names.iter().enumerate() {
        match number % 3 {
            0 => bucket.edit(name, |bytes| bytes[100] ^= 1),
            1 => bucket.edit(name, |bytes| bytes.truncate(bytes.len() / 2)),
            _ => {}
        }
    }
    assert_eq!(ask(&cluster), expected, "with damaged objects");
    cluster.await_nothing_held();
    let log = log + &cluster.log();
    assert!(log.contains("pages are objects in bucket") && !log.contains(SECRET), "{log}");
    drop(cluster);
    // A worker that met a damaged object has stored it again or left a tombstone.
    let cluster = workers(&bucket, plugins.path(), RESTORES).unwrap();
    assert_eq!(ask(&cluster), expected, "after the damage");
}

#[test]
fn a_bucket_that_hangs_or_dies_under_way_costs_no_answer_and_a_shutdown_ends() {
    if nixl::library().is_none() {
        return;
    }
    let Some(mut bucket) = Bucket::new() else { return };
    let plugins = plugin_files::directory(&["shm", "nixl"]);
    let expected = ask(&start(&["--role", "aggregated"], plugins.path(), MODEL.to_owned()));
    let mut cluster = workers(&bucket, plugins.path(), TRIES).unwrap();
    assert_eq!(ask(&cluster), expected);
    await_stored(&cluster);
    cluster.flush();
    bucket.hang(true);
    for turn in 0..2 {
        assert_eq!(ask(&cluster), expected, "hanging, turn {turn}");
        cluster.flush();
    }
    bucket.hang(false);
    let before = cluster.all_storage_pages("read");
    cluster.wait("pages to be restored again", || {
        cluster.flush();
        assert_eq!(ask(&cluster), expected);
        cluster.all_storage_pages("read") > before
    });
    bucket.kill();
    for turn in 0..2 {
        cluster.flush();
        assert_eq!(ask(&cluster), expected, "dead, turn {turn}");
    }
    cluster.await_nothing_held();
    assert_eq!(cluster.interrupt(), Some(0), "{}", cluster.log());
    drop(cluster);

    let Some(bucket) = Bucket::new_after(bucket) else { return };
    let mut cluster = workers(&bucket, plugins.path(), TRIES).unwrap();
    bucket.hang(true);
    assert_eq!(ask(&cluster), expected, "hanging from the start");
    assert_eq!(cluster.interrupt(), Some(0), "{}", cluster.log());
    assert!(!cluster.log().contains(SECRET));
}

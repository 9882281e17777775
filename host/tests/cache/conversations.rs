//! A thousand conversations over real processes, with radix caches and without: every answer is the same. Some more compare a GPU
//! with caches and a CPU without.
//!
//! Groups of conversations begin with the same tokens. Conversations belong to several tenants, and some are cut off in the middle
//! of an answer and go on. The pools are so small that prefixes are evicted and requests preempted, and at times an operator
//! empties all caches. `HOST_TEST_SEED` chooses another run.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use host_tests::cluster::{Cluster, PATIENCE, Start};
use host_tests::cuda::OnBoth;
use host_tests::plugin_files;
use serde_json::{Value, json};

const AT_ONCE: usize = 24;
const VOCABULARY: u64 = 200;

/// A server with prefill and decode workers that have room for a few conversations.
fn start(executor: &[String], cache: bool) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let mut flags = vec!["--plugins-dir".to_owned(), plugins.path().display().to_string()];
    let small = "--page-size 8 --pool-pages 64 --chunk-tokens 64 --max-batch 16 --reserved-decode-tokens 8";
    flags.extend(executor.iter().cloned().chain(small.split(' ').map(str::to_owned)));
    if cache {
        flags.extend(["--decode-radix-cache", "--prefill-radix-cache"].map(str::to_owned));
    }
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags, config: String::new(), workers: 2 }), plugins)
}

/// A SplitMix64 generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn tokens(&mut self, count: u64) -> Vec<u64> {
        (0..count).map(|_| self.below(VOCABULARY)).collect()
    }
}

fn body(prompt: &[u64], count: u64, salt: &str, stream: bool) -> String {
    let params = json!({"max_new_tokens": count, "temperature": 0, "ignore_eos": true});
    json!({"input_ids": prompt, "sampling_params": params, "cache_salt": salt, "stream": stream}).to_string()
}

fn ask(cluster: &Cluster, prompt: &[u64], count: u64, salt: &str) -> Vec<u64> {
    let (status, text) = cluster.post("/generate", &body(prompt, count, salt, false)).unwrap();
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    answer["output_ids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect()
}

/// Sends a request, reads at most the first `bytes` of the answer's stream, and closes the connection.
fn break_off(cluster: &Cluster, prompt: &[u64], count: u64, salt: &str, bytes: u64) {
    let body = body(prompt, count, salt, true);
    let address = cluster.url.trim_start_matches("http://");
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).unwrap();
    connection.write_all(body.as_bytes()).unwrap();
    connection.take(bytes).read_to_end(&mut Vec::new()).unwrap();
}

/// How much is said, and how often an operator empties all caches.
struct Scale {
    conversations: u64,
    turns_for_a_flush: u64,
}

#[derive(Default)]
struct Seen {
    turns: AtomicU64,
    broken_off: AtomicU64,
    flushes: AtomicU64,
}

/// One conversation, turn by turn on both servers.
fn converse(seed: u64, number: u64, flush: u64, plain: &Cluster, cached: &Cluster, seen: &Seen) {
    let mut random = Random(seed ^ number.wrapping_mul(0x9e37_79b9));
    let mut own = Random(seed ^ random.below(12));
    let beginning = 1 + random.below(120);
    let mut conversation = own.tokens(beginning);
    let salt = ["", "", "tenant a", "tenant b"][random.below(4) as usize];
    for turn in 0..2 + random.below(2) {
        let count = 1 + random.below(48);
        if random.below(5) == 0 {
            let bytes = random.below(3) * 700;
            break_off(cached, &conversation, count, salt, bytes);
            seen.broken_off.fetch_add(1, Ordering::Relaxed);
        }
        if random.below(flush) == 0 {
            cached.flush();
            seen.flushes.fetch_add(1, Ordering::Relaxed);
        }
        let answer = ask(cached, &conversation, count, salt);
        let right = ask(plain, &conversation, count, salt);
        assert_eq!(answer, right, "seed {seed}, conversation {number}, turn {turn}: {conversation:?}");
        seen.turns.fetch_add(1, Ordering::Relaxed);
        conversation.extend(answer);
        let said = random.below(20);
        conversation.extend(random.tokens(said));
    }
}

#[test]
fn a_thousand_conversations_get_the_same_answers_with_caches_as_without() {
    let synthetic = ["--executor", "synthetic"].map(str::to_owned);
    converse_all(&Scale { conversations: 1000, turns_for_a_flush: 100 }, &synthetic, &synthetic);
}

#[test]
fn conversations_get_the_answers_of_a_cpu_without_caches_from_a_gpu_with_caches() {
    let model = OnBoth::new();
    let scale = Scale { conversations: 40, turns_for_a_flush: 10 };
    converse_all(&scale, &model.on("cpu"), &model.on("cuda"));
}

/// Compares the answers of two servers, the second of which has caches. They have these flags for their executors.
fn converse_all(scale: &Scale, plain: &[String], cached: &[String]) {
    let seed = std::env::var("HOST_TEST_SEED").map_or(0x5eed, |seed| seed.parse().unwrap());
    println!("HOST_TEST_SEED={seed}");
    let (plain, _plugins) = start(plain, false);
    let (cached, _more) = start(cached, true);
    let next = AtomicU64::new(0);
    let seen = Seen::default();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= scale.conversations {
                        return;
                    }
                    converse(seed, number, scale.turns_for_a_flush, &plain, &cached, &seen);
                }
            });
        }
    });
    cached.wait("all requests to end", || cached.all_free());
    let decode = cached.metrics(&cached.worker("decode"));
    let count = |name: &str| decode[&format!("host_{name}_total")];
    let [turns, broken_off, flushes] =
        [&seen.turns, &seen.broken_off, &seen.flushes].map(|count| count.load(Ordering::Relaxed));
    println!("{turns} turns, {broken_off} broken off, {flushes} flushes; decode: {decode:?}");
    assert!(turns >= 2 * scale.conversations && broken_off > 0 && flushes > 0);
    assert!(decode["host_prefix_delivered_tokens_total{tier=\"device\"}"] > 0.0);
    assert!(count("pages_evicted") > 0.0 && count("retractions") > 0.0);
    assert_eq!(count("integrity_failures"), 0.0);
    assert_eq!(decode["host_kv_pages_locked"], 0.0);
}

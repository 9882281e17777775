//! The decode-side radix cache, with real processes: only missing pages are transferred, and no answer changes.

use std::path::Path;

use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;

const PAGE_TOKENS: u64 = 16;

fn start(flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let mut all = vec!["--executor".to_owned(), "synthetic".to_owned()];
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags: all, config: String::new(), workers }), plugins)
}

/// Bytes of one page, from a transfer of known size.
fn page_bytes(cluster: &Cluster) -> u64 {
    cluster.generate(&[201; PAGE_TOKENS as usize], 1).unwrap().transferred_bytes
}

#[test]
fn turn_two_of_a_conversation_moves_only_the_new_pages() {
    let (cluster, _plugins) = start(&["--decode-radix-cache", "--prefill-radix-cache"]);
    let page = page_bytes(&cluster);
    let mut conversation: Vec<u32> = (0..160).map(|token| token * 7 % 200).collect();
    let mut cached = 0;
    for turn in 1..=4_u64 {
        let answer = cluster.generate(&conversation, 24).unwrap();
        let whole = (conversation.len() as u64).div_ceil(PAGE_TOKENS);
        println!(
            "turn {turn}: {} tokens, {} of {whole} pages moved",
            conversation.len(),
            answer.transferred_bytes / page
        );
        assert_eq!(answer.transferred_bytes, (whole - cached) * page, "turn {turn}");
        // The last token drawn has no KV yet.
        cached = (conversation.len() as u64 + 24 - 1) / PAGE_TOKENS;
        conversation.extend(answer.tokens.iter().map(|token| *token as u32));
        conversation.extend((0..20).map(|token| (token * 11 + turn as u32) % 200));
    }
    // If decode holds a whole prompt, no page is transferred.
    let again = &conversation[..conversation.len() / 16 * 16 - 32];
    let first = cluster.generate(again, 8).unwrap();
    let second = cluster.generate(again, 8).unwrap();
    assert_eq!(second.transferred_bytes, 0, "a full hit moves zero pages");
    assert_eq!(first.tokens, second.tokens);
    let metrics = cluster.metrics(&cluster.worker("prefill"));
    let written = metrics["host_plugin_counter_total{plugin=\"host.shm\",name=\"bytes_written\"}"];
    assert!(written > 0.0, "what the plugin counts is on its worker's page: {metrics:?}");
    cluster.wait("all requests to end", || cluster.all_free());
}

#[test]
fn of_thirty_two_equal_prompts_at_once_each_page_moves_once() {
    let (cluster, _plugins) = start(&["--decode-radix-cache", "--prefill-radix-cache"]);
    let prompt: Vec<u32> = (0..1000).map(|token| token * 3 % 200).collect();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let ask = || cluster.generate(&prompt, 4).unwrap().tokens;
        let threads: Vec<_> = (0..32).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let [prefill, decode] = ["prefill", "decode"].map(|role| cluster.settled(role, 32.0));
    println!("waited: {}", decode["host_shared_transfers_total"]);
    // Each request has its own partial page at the end.
    assert_eq!(prefill["host_pages_sent_total"], 62.0 + 32.0);
    assert_eq!(decode["host_pages_received_total"], 62.0 + 32.0);
    // Prefill computes the 62 pages once, and the tokens behind them for each request.
    assert_eq!(prefill["host_prefill_tokens_total"], 1000.0 + 31.0 * 8.0);
}

/// For each worker, the number of cached pages that the router knows.
fn indexed(cluster: &Cluster) -> Vec<f64> {
    let (_, text) = cluster.get("/metrics").unwrap();
    let series = text.lines().filter(|line| line.starts_with("host_router_index_pages{"));
    series.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect()
}

#[test]
fn a_flush_makes_every_worker_forget() {
    let (cluster, _plugins) = start(&["--decode-radix-cache", "--prefill-radix-cache"]);
    let prompt: Vec<u32> = (0..160).collect();
    let first = cluster.generate(&prompt, 4).unwrap();
    assert_eq!(cluster.generate(&prompt, 4).unwrap().transferred_bytes, 0);
    cluster.wait("all requests to end", || cluster.all_free());
    cluster.wait("the router to know the pages", || indexed(&cluster) == [10.0, 10.0]);
    let (status, text) = cluster.post("/flush_cache", "").unwrap();
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &answer["flushed"]), (200, &true.into()), "{text}");
    for worker in answer["workers"].as_array().unwrap() {
        assert_eq!((&worker["pages_freed"], &worker["pages_in_use"]), (&10.into(), &0.into()), "{text}");
    }
    for role in ["prefill", "decode"] {
        let worker = cluster.worker(role);
        cluster.wait("the pages to be free", || {
            cluster.metrics(&worker)["host_kv_pages{state=\"cached\"}"] == 0.0
        });
    }
    cluster.wait("the router to hear of it", || indexed(&cluster) == [0.0, 0.0]);
    assert_eq!(cluster.generate(&prompt, 4).unwrap(), first, "moved again, and the same answer");
}

#[test]
fn answers_with_the_cache_equal_those_without_under_eviction() {
    let small = ["--pool-pages", "96", "--max-batch", "8", "--chunk-tokens", "64"];
    let (plain, _plugins) = start(&[&["--role", "aggregated"], small.as_slice()].concat());
    let cached = ["--decode-radix-cache", "--prefill-radix-cache"];
    let (split, _more) = start(&[cached.as_slice(), small.as_slice()].concat());
    let seed = 0x00c0_ffee_u64;
    println!("seed {seed:#x}");
    // 40 conversations in 4 groups with the same beginning. Each has several turns, and eight run at a time.
    let next = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if number >= 40 {
                        return;
                    }
                    let mut state = seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
                    let mut draw = |bound: u64| {
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        (state % bound) as u32
                    };
                    let group = number as u32 % 4;
                    let mut conversation: Vec<u32> =
                        (0..100).map(|token| (token * (group + 3)) % 200).collect();
                    for turn in 0..4 {
                        let count = 1 + draw(20);
                        let right = plain.generate(&conversation, count).unwrap().tokens;
                        let answer = split.generate(&conversation, count).unwrap().tokens;
                        assert_eq!(answer, right, "conversation {number}, turn {turn}");
                        conversation.extend(answer.iter().map(|token| *token as u32));
                        conversation.extend((0..draw(30)).map(|token| token % 200));
                    }
                }
            });
        }
    });
    split.wait("all requests to end", || split.all_free());
    let metrics = split.metrics(&split.worker("decode"));
    println!("{metrics:?}");
    assert!(
        metrics["host_prefix_promised_tokens_total{tier=\"device\"}"] > 0.0
            && metrics["host_pages_evicted_total"] > 0.0,
        "{metrics:?}"
    );
    assert_eq!(metrics["host_integrity_failures_total"], 0.0);
}

//! A transfer plugin that does not declare `settled`: prefill and decode workers use it without a radix cache, and refuse it with
//! one.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use host_tests::cluster::{Answer, Cluster, Start};
use host_tests::hold::Hold;
use host_tests::plugin_files;
use host_tests::program::run_to_end;
use serde_json::json;

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_host"))
}

/// A synthetic server, with the defaults that an operator gets.
fn start(plugins: &Path, workers: usize, more: &[&str], config: String) -> Cluster {
    let flags = ["--executor", "synthetic", "--kv-memory", "64MiB", "--chunk-tokens", "16", "--no-warm-up"];
    let mut flags: Vec<String> = flags.iter().chain(more).map(|flag| (*flag).to_owned()).collect();
    flags.extend(["--plugins-dir".into(), plugins.display().to_string()]);
    Cluster::start_as_given(&Start { program: program(), flags, config, workers }, &[])
}

/// A conversation. Each prompt is the previous one with its answer and new tokens.
fn conversation(cluster: &Cluster) -> Vec<Answer> {
    let mut text: Vec<u32> = (0..40).collect();
    let turns = (0..4).map(|turn| {
        let answer = cluster.generate(&text, 8).unwrap();
        text.extend(answer.tokens.iter().map(|token| u32::try_from(*token).unwrap()));
        text.extend(turn..turn + 20);
        answer
    });
    turns.collect()
}

fn tokens(answers: &[Answer]) -> Vec<&Vec<u64>> {
    answers.iter().map(|answer| &answer.tokens).collect()
}

/// Sends a request whose client will leave before the answer.
fn ask(url: &str, prompt: &[u32]) -> TcpStream {
    let address = url.trim_start_matches("http://");
    let body = json!({ "input_ids": prompt, "sampling_params": { "max_new_tokens": 8 } }).to_string();
    let mut connection = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).unwrap();
    connection.write_all(body.as_bytes()).unwrap();
    connection
}

#[test]
fn a_conversation_is_served_and_pages_of_an_aborted_transfer_come_back_behind_a_fence() {
    let plugins = plugin_files::directory(&["unsettled"]);
    let whole = start(plugins.path(), 1, &["--role", "aggregated"], String::new());
    let right = conversation(&whole);
    let hold = Hold::new();
    let config = format!("[synthetic]\n{}", hold.prompts_from(800));
    let cluster = start(plugins.path(), 2, &["--plugins", "unsettled"], config);
    let answers = conversation(&cluster);
    assert_eq!(tokens(&answers), tokens(&right));
    assert!(answers.iter().all(|answer| answer.transferred_bytes > 0), "{answers:?}");
    assert!(
        cluster.log().contains("prefix caching is off in prefill and decode: unsettled does not declare")
    );
    let prefill = cluster.worker("prefill");
    let counted = |name: &str| cluster.metrics(&prefill).get(name).copied().unwrap_or(0.0);
    let before = counted("host_pages_sent_total");
    let cut = |cluster: &Cluster| cluster.log().contains("was cut: a transfer over it ended early");
    let prompt: Vec<u32> = (0..1600).map(|token| token % 256).collect();
    let beside: Vec<u32> = (0..1600).map(|token| token % 255).collect();
    std::thread::scope(|scope| {
        let held = hold.begin();
        // The first request waits in the hold after some of its pages were sent. A second request waits behind it.
        let leaves = ask(&cluster.url, &prompt);
        cluster.wait("pages to be sent", || counted("host_pages_sent_total") > before + 30.0);
        let other = scope.spawn(|| cluster.generate(&beside, 8));
        cluster.wait("the other request to be under way", || {
            let active = cluster.metrics(&prefill);
            active.get("host_requests_active").is_some_and(|active| *active >= 2.0)
        });
        assert!(!cut(&cluster), "a peer was fenced before anything was aborted");
        drop(leaves);
        cluster.wait("the peer to be fenced", || cut(&cluster));
        // The decode worker learns of the fence from the peer, and does not wait for a timeout.
        cluster.wait("the peer to hear of it", || cluster.log().contains("it has cut this worker off"));
        held.end();
        // The router tries the second request again, over the next connection.
        assert_eq!(other.join().unwrap().unwrap().tokens, whole.generate(&beside, 8).unwrap().tokens);
    });
    cluster.wait("all pages to be free", || cluster.all_free());
    assert_eq!(tokens(&conversation(&cluster)), tokens(&right));
    cluster.wait("all pages to be free", || cluster.all_free());
}

#[test]
fn it_is_refused_with_a_radix_cache_and_with_a_storage_tier() {
    let plugins = plugin_files::directory(&["unsettled", "shm", "memory"]);
    let refused = |flags: &[&str]| {
        let mut host = Command::new(program());
        host.args(["--executor", "synthetic", "--port", "0"]);
        host.args(["--plugins-dir", plugins.path().to_str().unwrap()]).args(flags);
        let ended = run_to_end("host", &mut host);
        assert_eq!(ended.code(), Some(2), "{flags:?}: {ended}");
        ended.stderr
    };
    let decode = "DecodeRadixCache needs settled, because pages in the tree outlive the request, also one that was aborted during its \
                  transfer: plugin \"unsettled\" declares page_writes, arrival_notification, peer_restart; use instead: shm; or give \
                  --no-decode-radix-cache";
    let prefill = "CachedPagesSent needs settled, because pages in the tree are evicted and used again, also those that a transfer was \
                   reading when it was aborted: plugin \"unsettled\" declares page_writes, arrival_notification, peer_restart; use \
                   instead: shm; or give --no-prefill-radix-cache";
    let said = refused(&["--plugins", "unsettled", "--decode-radix-cache"]);
    assert!(said.contains(decode) && !said.contains(prefill), "{said}");
    let said = refused(&["--plugins", "unsettled", "--prefill-radix-cache"]);
    assert!(said.contains(prefill) && !said.contains(decode), "{said}");
    let said = refused(&["--plugins", "unsettled,memory"]);
    assert!(said.contains(decode) && said.contains(prefill), "{said}");
}

//! A full disk under running servers: every answer is the same as without a cache, refused pages are counted, and storing goes on
//! when there is room again.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;
use host_tests::skip::skipped;

const PAIR: &[&str] = &["--decode-radix-cache", "--prefill-radix-cache"];
/// Large pages, so that few of them fill the disk.
const LARGE: &str = "[synthetic]\nhead-dim = 1024\n";

fn start(flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm", "hicache-file"]);
    let mut all = vec!["--executor".to_owned(), "synthetic".to_owned()];
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers }), plugins)
}

/// Prompts of a turn, some with the same beginning. Turns share no prompts.
fn prompts(turn: u32) -> Vec<Vec<u32>> {
    let prompt = |number: u32| {
        (0..300 + number % 3 * 50).map(|at| (at * (7 + turn) + number / 2 + turn) % 200).collect()
    };
    (0..6).map(prompt).collect()
}

fn ask(cluster: &Cluster, turn: u32) -> Vec<Vec<u64>> {
    let prompts = prompts(turn);
    std::thread::scope(|scope| {
        let clients: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| cluster.generate(prompt, 9).unwrap().tokens))
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

#[test]
fn a_disk_that_fills_under_running_servers_changes_no_answer_and_is_used_again_when_it_has_room() {
    let above = tempfile::tempdir().unwrap();
    let script = "set -e; mount -t tmpfs -o size=24m,mode=700 tmpfs \"$FULL_DISK\"; \
                  exec \"$0\" hierarchical_full_disk::inside --exact --nocapture";
    let output = Command::new("unshare")
        .args(["-Urm", "bash", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .env("FULL_DISK", above.path())
        .output();
    let Ok(output) = output else { return skipped("there is no unshare") };
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if said.contains("INSIDE") {
        assert!(output.status.success() && said.contains("INSIDE DONE"), "{said}");
    } else {
        skipped(&format!("nothing can be mounted here: {said}"));
    }
}

/// Ends the other writer when the test ends, also when it fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Not a test of its own: another test runs it in a process with a small file system mounted.
#[test]
fn inside() {
    let Some(disk) = std::env::var_os("FULL_DISK").map(PathBuf::from) else { return };
    println!("INSIDE");
    let (plain, _plugins) = start(&["--role", "aggregated"], LARGE);
    let config = format!(
        "{LARGE}{RESTORES}[plugin.hicache-file]\ndir = {:?}\nsegment_mib = 1\nsize_limit_mib = 64\nfree_floor_mib = 0\n",
        disk.join("pages")
    );
    let offload = ["--hierarchical-cache", "--hicache-storage", "hicache-file"];
    let (cluster, _plugins) = start(&[PAIR, &offload].concat(), &config);
    let check = |turn: u32| assert_eq!(ask(&cluster, turn), ask(&plain, turn), "turn {turn}");
    check(0);
    cluster.await_written();
    let (written, refused) =
        (cluster.all_storage_pages("written"), cluster.all_storage_pages("write_refused"));
    // The turn has more pages than the disk holds, so the pages that were stored first were evicted.
    assert!(written > 0.0, "{written} pages were written, {refused} refused\n{}", cluster.log());
    // Another program fills the disk, and takes also the room that eviction frees.
    let mut turn = 0;
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&enough);
        let mut other = std::fs::File::create(disk.join("other")).unwrap();
        let enough = &enough;
        scope.spawn(move || {
            while !enough.load(Ordering::SeqCst) {
                if other.write_all(&[1; 4096]).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        cluster.wait("puts to be refused", || {
            turn += 1;
            check(turn);
            cluster.await_written();
            cluster.all_storage_pages("write_refused") > refused
        });
    });
    // Now nothing is in the pools, and the disk takes no pages.
    cluster.flush();
    check(turn);
    check(0);
    std::fs::remove_file(disk.join("other")).unwrap();
    let before = cluster.all_storage_pages("written");
    cluster.wait("pages to be written again", || {
        turn += 1;
        check(turn);
        cluster.await_written();
        cluster.all_storage_pages("written") > before
    });
    // The disk holds fewer pages than a turn has. It can hold all pages of one prompt while nothing else is stored.
    let prompt = prompts(turn + 1).remove(0);
    let right = plain.generate(&prompt, 9).unwrap().tokens;
    let before = cluster.all_storage_pages("read");
    cluster.wait("a prompt to come back from the disk", || {
        cluster.flush();
        assert_eq!(cluster.generate(&prompt, 9).unwrap().tokens, right);
        cluster.await_written();
        cluster.all_storage_pages("read") > before
    });
    cluster.wait("all requests to end", || cluster.all_free());
    println!("INSIDE DONE");
}

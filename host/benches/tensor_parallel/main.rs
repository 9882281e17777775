//! Measures the cost of moving KV pages between workers of different tensor-parallel sizes, compared with equal sizes.
//!
//! `cargo build --release --workspace && cargo bench -p host --bench tensor_parallel -- MODE [PLUGIN [WORD...]]`
//!
//! - `hand-over`: one prompt at a time. An aggregated server, which hands nothing over, and servers with prefill and decode workers
//!   of several sizes run at once and get requests in turn. A hand-over is the time that a server takes beyond the aggregated one,
//!   up to the first token.
//! - `at-once`: 1 to 256 prompts sent at the same moment. The figure is the best of four mean times to the first token, as in the
//!   table of SGLang's pull request 22536.
//!
//! Each mode uses two layouts: one in which a head range of a page is one piece, and the layer-first one of engines, in which it is
//! one piece per token. The second layout runs with staging and without. PLUGIN is `shm` by default. WORDs such as `p4d4 p2d4`
//! select the sizes to compare, and the first of them must be the equal one. Other words, such as `page-head-first`, select the
//! arms that have them in their names, and `plain` leaves out digests. All servers of a table run at once. Idle ones take memory
//! and a little of the processors, so compare pairs.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

mod at_once;
mod client;
mod hand_over;

use std::path::Path;

use host_tests::cluster::{Cluster, Start};

/// One pair of sizes with a layout and a way of staging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arm {
    /// Tensor-parallel ranks of the prefill and of the decode worker.
    pub ranks: (u32, u32),
    /// Whether pools have the layer-first layout, as engines have it.
    pub layer_first: bool,
    /// The value of `--staging`.
    pub staging: &'static str,
}

impl Arm {
    /// The name in a table's row.
    pub fn name(&self) -> String {
        let (prefill, decode) = self.ranks;
        let layout = if self.layer_first { "layer-first" } else { "page-head-first" };
        format!("p{prefill}d{decode}, {layout}, staging {}", self.staging)
    }

    /// The server's flags for this arm.
    fn flags(&self) -> Vec<String> {
        let layout =
            if self.layer_first { "layer-kv-page-token-head-dim" } else { "page-head-layer-kv-token-dim" };
        let (prefill, decode) = (self.ranks.0.to_string(), self.ranks.1.to_string());
        let flags = [
            "--prefill-tp",
            &prefill,
            "--decode-tp",
            &decode,
            "--staging",
            self.staging,
            "--kv-layout",
            layout,
        ];
        flags.map(str::to_owned).to_vec()
    }
}

const fn arm(prefill: u32, decode: u32, layer_first: bool, staging: &'static str) -> Arm {
    Arm { ranks: (prefill, decode), layer_first, staging }
}

/// The arms of both modes unless sizes are given. The first arm of each layout has equal sizes.
const ARMS: [Arm; 11] = [
    arm(4, 4, false, "auto"),
    arm(2, 2, false, "auto"),
    arm(2, 4, false, "auto"),
    arm(4, 2, false, "auto"),
    arm(3, 4, false, "auto"),
    arm(4, 4, true, "never"),
    arm(2, 2, true, "never"),
    arm(2, 4, true, "never"),
    arm(2, 4, true, "always"),
    arm(4, 2, true, "never"),
    arm(4, 2, true, "always"),
];

/// The ranks of prefill and decode that a word such as `p2d4` names.
fn sizes(word: &str) -> Option<(u32, u32)> {
    let (prefill, decode) = word.strip_prefix('p')?.split_once('d')?;
    Some((prefill.parse().ok()?, decode.parse().ok()?))
}

/// Selects arms by words. With sizes, the arms of these sizes in this order, else the usual ones. Of these, the arms that have all
/// other words in their names.
pub fn arms(words: &[String]) -> Vec<Arm> {
    let named: Vec<(u32, u32)> = words.iter().filter_map(|word| sizes(word)).collect();
    let of_sizes = |&(prefill, decode): &(u32, u32)| {
        let stagings = [(false, "auto"), (true, "never"), (true, "always")];
        // Equal sizes need no staging.
        let stagings =
            stagings.into_iter().filter(move |(_, staging)| prefill != decode || *staging != "always");
        stagings.map(move |(layer_first, staging)| arm(prefill, decode, layer_first, staging))
    };
    let all = if named.is_empty() { ARMS.to_vec() } else { named.iter().flat_map(of_sizes).collect() };
    let wanted =
        |arm: &Arm| words.iter().all(|word| sizes(word).is_some() || arm.name().contains(word.as_str()));
    all.into_iter().filter(wanted).collect()
}

/// Starts a server for an arm, or an aggregated worker without one.
pub fn start(arm: Option<&Arm>, plugin: &str, synthetic: &str, flags: &[&str]) -> Cluster {
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let directory = program.parent().unwrap_or(program).display().to_string();
    let common = ["--executor", "synthetic", "--kv-dtype", "bf16", "--plugins-dir", &directory];
    let mut all: Vec<String> = common.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    match arm {
        Some(arm) => {
            all.extend(["--plugins".to_owned(), plugin.to_owned()]);
            all.extend(arm.flags());
        }
        None => all.extend(["--role", "aggregated", "--tp", "4"].map(str::to_owned)),
    }
    let workers = if arm.is_some() { 2 } else { 1 };
    Cluster::start(&Start { program, flags: all, config: format!("[synthetic]\n{synthetic}"), workers })
}

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let plugin = words.get(1).map_or("shm", String::as_str);
    let wanted = words.get(2..).unwrap_or_default();
    match words.first().map(String::as_str) {
        Some("hand-over") => hand_over::run(plugin, wanted),
        Some("at-once") => at_once::run(plugin, wanted),
        _ => anyhow::bail!("say what to measure: hand-over or at-once"),
    }
}

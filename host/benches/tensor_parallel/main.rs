//! What it costs to move KV pages between workers of different tensor-parallel sizes, against equal ones.
//!
//! `cargo build --release --workspace && cargo bench -p host --bench tensor_parallel -- MODE [PLUGIN [WORD...]]`
//!
//! - `hand-over`: one prompt at a time. An aggregated server, which hands nothing over, and split ones of several sizes run at
//!   once and get requests in turn. A hand-over is what a split server takes beyond the aggregated one, to the first token.
//! - `at-once`: 1 to 256 prompts sent at the same moment. The figure is the best of four mean times to the first token, as in the
//!   table of SGLang's pull request 22536.
//!
//! Each does so in the layout in which a head range of a page is one piece, and in the layer-first one that engines fix, where
//! it is one piece per token: there with and without staging. PLUGIN is `shm` unless said otherwise. WORDs such as `p4d4 p2d4`
//! name the sizes to compare, the first of them the equal one. Others, such as `page-head-first`, leave only the arms in whose
//! names they are, and `plain` leaves out digests. All servers of a table run at once, so that idle ones take memory and a little
//! of the processors: compare pairs.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

mod at_once;
mod client;
mod hand_over;

use std::path::Path;

use host_tests::cluster::{Cluster, Start};

/// One way to divide the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arm {
    /// Tensor-parallel ranks of the prefill and of the decode worker.
    pub ranks: (u32, u32),
    /// Layer-first pools, as engines have them.
    pub layer_first: bool,
    /// `--staging`.
    pub staging: &'static str,
}

impl Arm {
    /// For a table's row.
    pub fn name(&self) -> String {
        let (prefill, decode) = self.ranks;
        let layout = if self.layer_first { "layer-first" } else { "page-head-first" };
        format!("p{prefill}d{decode}, {layout}, staging {}", self.staging)
    }

    /// The flags that make it.
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

/// What both modes compare unless sizes are given. The first of each layout is the equal one.
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

/// The arms that words ask for: those in whose names all words are that are no sizes, and of these the ones of the sizes named,
/// in that order, whether they are among the usual ones or not.
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

/// Starts a server: one arm, or without one an aggregated worker.
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

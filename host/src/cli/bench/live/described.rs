//! Describes a server for the simulation: its workers, and what a step of them takes.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use host_core::Dtype;
use host_simulate::cluster::MeasuredStep;
use host_simulate::traffic::{Ask, Prompt};
use host_simulate::{Cluster, Workload};
use serde::Deserialize;

use super::drive::{Run, drive};
use super::measured::Server;
use super::random_salt;
use crate::cli::Refused;
use crate::cli::launch;
use crate::cli::settings::{ExecutorName, RouterPolicyName, Settings};

/// The link between workers of this machine, and the machine for what is not a step: copies and digests of pages. Assumed.
const LINK: &str = "link = { gigabytes_per_second = 2.0, latency_us = 100.0 }";
const MACHINE: &str = "cpu-2";
/// Microseconds of the router for each request: HTTP, the tokenizer and the route. Assumed.
const ROUTER_US: f64 = 300.0;
/// Requests at once of the second probe.
const TOGETHER: usize = 8;
/// Tokens of the answers of probes.
const ANSWER: u32 = 17;

/// The part of `/health` that is read.
#[derive(Deserialize)]
struct Health {
    workers: Option<Vec<Worker>>,
}

#[derive(Deserialize)]
struct Worker {
    role: String,
    pages: Pages,
}

#[derive(Deserialize)]
struct Pages {
    total: u32,
}

/// Checks that the simulation can have a server with these settings.
///
/// # Errors
/// When the settings cannot work, or the model is none that the simulation knows.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    let shape = launch::plan(settings)?.shape;
    if shape.state_layers > 0 {
        let message = "the simulation has no layers with a state: measure such a model with --url";
        return Err(Refused(message.to_owned()));
    }
    Ok(())
}

/// The cluster that this server is.
///
/// # Errors
/// [`Refused`] when the simulation has no such workers. Another error when the server cannot be asked.
pub async fn cluster(settings: &Settings, server: &Server) -> anyhow::Result<Cluster> {
    let plan = launch::plan(settings)?;
    let shape = &plan.shape;
    let policy = match settings.router_policy.unwrap_or(RouterPolicyName::Prefix) {
        RouterPolicyName::Prefix => "prefix",
        // With one worker of each role all policies are the same.
        _ => "round-robin",
    };
    let chunk_tokens = settings.chunk_tokens(&shape.math);
    let step = match settings.executor() {
        ExecutorName::Synthetic => {
            let synthetic = settings.synthetic.clone().unwrap_or_default();
            MeasuredStep {
                base_us: synthetic.step_us as f64,
                prompt_token_us: synthetic.prefill_token_us as f64,
                sequence_us: synthetic.sequence_us as f64,
            }
        }
        ExecutorName::Cpu | ExecutorName::Cuda => {
            probed(server, chunk_tokens.min(plan.max_tokens / 2).max(2)).await?
        }
    };
    let mut answer = server.client.get("/health").await?;
    let health: Health =
        serde_json::from_str(&answer.rest_up_to(1 << 24).await.map_err(anyhow::Error::msg)?)?;
    let page = settings.page_size();
    let dtype = match shape.kv_dtype {
        Dtype::F32 => "f32",
        Dtype::Bf16 => "bf16",
    };
    let sliding = shape.sliding.map_or(0, |sliding| sliding.layers);
    // The simulation counts a key and a value for each of `head_dim`.
    let mut text = format!(
        "kv = '{dtype}'\npage_tokens = {page}\nrouter = '{policy}'\nrouter_us = {ROUTER_US:?}\n{LINK}\n[model]\n\
         parameters = 1.0\nlayers = {}\nheads = {heads}\nkv_heads = {heads}\nhead_dim = {}\n",
        shape.layers - sliding,
        shape.head_dim,
        heads = shape.kv_heads,
    );
    if let Some(host_executor::Sliding { layers, window }) = shape.sliding {
        writeln!(text, "sliding = {{ layers = {layers}, tokens = {window} }}")?;
    }
    let MeasuredStep { base_us, prompt_token_us, sequence_us } = step;
    let workers = health.workers.context(
        "the server's /health does not list its workers: leave out --admin, or give HOST_API_KEY an operator's key",
    )?;
    for Worker { role, pages } in workers {
        let cached =
            if role == "decode" { settings.decode_radix_cache() } else { settings.prefill_radix_cache() };
        writeln!(
            text,
            "[[workers]]\nrole = '{role}'\nmachine = '{MACHINE}'\npool_tokens = {}\nchunk_tokens = {chunk_tokens}\n\
             max_batch = {}\nmax_queued = {}\nreserved_decode_tokens = {}\nradix_cache = {cached}\n\
             step = {{ base_us = {base_us:?}, prompt_token_us = {prompt_token_us:?}, sequence_us = {sequence_us:?} }}",
            u64::from(pages.total) * u64::from(page),
            settings.max_batch(),
            settings.max_queued(),
            settings.reserved_decode_tokens(),
        )?;
        if let Some(target) = settings.target_itl_ms {
            writeln!(text, "target_itl_ms = {target:?}")?;
        }
    }
    let cluster = Cluster::parse("the server's workers", &text);
    Ok(cluster.map_err(|wrong| Refused(format!("the simulation cannot have this server: {wrong}")))?)
}

/// What a step takes, from three probes: one short request, several at once, and prompts of two lengths.
async fn probed(server: &Server, chunk_tokens: u32) -> anyhow::Result<MeasuredStep> {
    let mut next = 0;
    let mut asks = |count: usize, tokens: u32, answer: u32| -> Vec<Ask> {
        let ask = |_number| {
            next += 1;
            let prompt = Prompt { blocks: vec![next], block_tokens: tokens, tokens };
            Ask { at: Duration::ZERO, prompt, answer }
        };
        (0..count).map(ask).collect()
    };
    let (short, long) = ((chunk_tokens / 2).min(32), chunk_tokens);
    let mut runs = Vec::new();
    for (asks, concurrency) in [
        (asks(3, short, ANSWER), 1),
        (asks(TOGETHER, short, ANSWER), TOGETHER),
        (asks(5, short, 1), 1),
        (asks(5, long, 1), 1),
    ] {
        let run = drive(server, &Workload::Closed { asks, concurrency }, random_salt()?, |_ended| {}).await;
        if let Some(why) = run.first_failure {
            anyhow::bail!("a probe failed: {why}");
        }
        runs.push(run);
    }
    // Tokens of a fast model come several at once, so their single gaps say nothing.
    let itl = |run: &Run| run.figures.tpot_ms.p50 * 1e3;
    let ttft = |run: &Run| run.figures.ttft_ms.p50 * 1e3;
    let sequence_us = ((itl(&runs[1]) - itl(&runs[0])) / (TOGETHER - 1) as f64).max(0.0);
    let prompt_token_us = ((ttft(&runs[3]) - ttft(&runs[2])) / f64::from(long - short)).max(0.0);
    Ok(MeasuredStep { base_us: (itl(&runs[0]) - sequence_us).max(1.0), prompt_token_us, sequence_us })
}

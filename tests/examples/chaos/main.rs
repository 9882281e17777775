//! Injects faults into real processes under a mixed load, and compares every answer with that of one aggregated worker.
//!
//! ```text
//! cargo xtask chaos --faults 1000 --seed 7
//! ```
//!
//! Two routers, two prefill and three decode workers share a storage tier. Clients send requests of several kinds, stream answers,
//! and hang up. Meanwhile processes are killed, frozen and drained, their links cut, their plugins made to hang
//! and lie, their disk and memory taken. The report counts the injected faults and the outcomes of requests. The exit code is 1
//! if a request was lost, a token was wrong, or something leaked.
//!
//! As root the runner runs itself again in namespaces ([`sandbox`]), so that all that it makes ends with them. Without root,
//! faults that need namespaces are left out, and the report names them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot go on ends with what was seen")]

mod cast;
mod disk;
mod faults;
mod footprint;
mod hostile;
mod load;
mod memory;
mod network;
mod report;
mod sandbox;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_tests::built::profile;
use host_tests::mixed_load::{Aggregated, Model, draw};

use cast::Cast;
use hostile::Hostile;
use load::Load;

/// The options of the command line.
struct Options {
    host: PathBuf,
    faults: u32,
    seed: u64,
    clients: u32,
    every: Duration,
    /// Time to run, whatever the number of faults.
    lasts: Option<Duration>,
    hostile: u32,
    model: Model,
    /// Each process gets a network namespace of its own, where possible.
    network: bool,
    transfer: Option<String>,
    /// Only faults whose names contain one of these.
    only: Vec<String>,
}

const USAGE: &str = "\
Usage: chaos [--faults N] [--seed N] [--clients N] [--every-ms N] [--for MINUTES] [--hostile N]
             [--executor NAME] [--network] [--transfer NAME] [--only WORDS[,WORDS...]] [--host PROGRAM]

  --faults N      Faults to inject [default: 100]
  --seed N        What is drawn: faults, victims, prompts [default: 1]
  --clients N     Clients at once [default: 8]
  --every-ms N    Mean time between two faults [default: 1000]
  --for MINUTES   Run so long, however many faults that makes; with --faults 0 without any, and nothing is ended
  --hostile N     Clients beside that read and send slowly, hang up, reset, and send giant JSON [default: 0]
  --executor NAME What computes the answers [default: synthetic]
                  synthetic: KV that proves itself
                  cpu: a small made-up model; clients also request chats, answers held to grammars, and calls of tools
                  cuda: the same model and requests on the stand-in for a GPU, and with HOST_CUDA=device on a GPU
  --network       Each process has a network of its own (as root), links fail, and pages travel over TCP
                  (remote-wire, nixl or mooncake)
  --transfer NAME The transfer plugin: corrupting (shm, with faults), shm, remote-wire, nixl or mooncake
                  [default: corrupting; with --network remote-wire]
  --only WORDS    Only faults whose names contain one of these, as the report names them
  --host PROGRAM  The program [default: the one built beside this]";

impl Options {
    fn read() -> Result<Self, String> {
        let mut options = Self {
            host: profile().join("host"),
            faults: 100,
            seed: 1,
            clients: 8,
            every: Duration::from_secs(1),
            lasts: None,
            hostile: 0,
            model: Model::Synthetic,
            network: false,
            transfer: None,
            only: Vec::new(),
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(flag) = arguments.next() {
            if flag == "--network" {
                options.network = true;
                continue;
            }
            let value = arguments.next().ok_or_else(|| format!("{flag} needs a value\n\n{USAGE}"))?;
            let number = || value.parse::<u32>().map_err(|error| format!("{flag} {value:?}: {error}"));
            match flag.as_str() {
                "--faults" => options.faults = number()?,
                "--seed" => options.seed = number()?.into(),
                "--clients" => options.clients = number()?.max(1),
                "--every-ms" => options.every = Duration::from_millis(number()?.into()),
                "--for" => options.lasts = Some(Duration::from_secs(60) * number()?),
                "--hostile" => options.hostile = number()?,
                "--executor" => {
                    let all = [Model::Synthetic, Model::Cpu, Model::Cuda];
                    options.model =
                        Model::read(&value, &all).map_err(|wrong| format!("{wrong}\n\n{USAGE}"))?;
                }
                "--transfer" => options.transfer = Some(value),
                "--only" => options.only.extend(value.split(',').map(str::to_owned)),
                "--host" => options.host = value.into(),
                _ => return Err(format!("there is no {flag}\n\n{USAGE}")),
            }
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    let options = match Options::read() {
        Ok(options) => options,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    if let Some(ended) = sandbox::again_inside() {
        return ended;
    }
    println!("seed {}, {} faults, {} clients", options.seed, options.faults, options.clients);
    let mut random = fastrand::Rng::with_seed(options.seed);
    let model = tempfile::tempdir().unwrap();
    let executor = options.model.flags(model.path());
    let jobs = draw(&mut random, options.model);
    let reference = options.model.reference().flags(model.path());
    let aggregated = Arc::new(Aggregated::start(&options.host, &reference, jobs));
    println!("{} different requests were answered by one aggregated worker", aggregated.jobs().len());

    let mut cast = Cast::start(&options, &executor);
    cast.wait_until_ready();
    let load = Load::start(&aggregated, cast.routers(), options.clients, options.seed);
    load.wait_for_answers(u64::from(options.clients) * 4, &aggregated);
    let before = cast.footprints();
    let hostile = Hostile::start(cast.routers(), options.hostile, options.seed);
    let began = Instant::now();
    let injected = faults::inject(&mut cast, &mut random, &load.strikes, &options);
    let lasted = began.elapsed();
    let hostile = hostile.stop();
    cast.heal();
    cast.wait_until_ready();
    let tally = load.stop();
    let leaks = cast.leaks(&before);

    for (act, count) in &hostile {
        println!("{count} times a hostile client {act}");
    }
    if report::print(&cast, &injected, &tally, &leaks, lasted) {
        return ExitCode::SUCCESS;
    }
    println!("logs: {}", cast.keep_logs().display());
    ExitCode::FAILURE
}

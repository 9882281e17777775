//! Rolls a cluster from one build to another under load, and back. Compares every answer with that of one aggregated worker.
//!
//! ```text
//! cargo xtask roll --from HEAD~1 --to HEAD
//! ```
//!
//! A router, a prefill and a decode worker run on this machine. For each worker, one of the other build
//! starts, and the old one is drained. The router is last: clients are sent to its successor, and it gets SIGTERM. The way back
//! tests other combinations, such as a new router with old workers. The exit code is 1 if a request was lost or a token was
//! wrong.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot go on ends with what was seen")]

mod cast;
mod load;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use host_tests::mixed_load::{Aggregated, Job, Model, draw};

use cast::{Build, Cast};
use load::Load;

/// The options of the command line.
struct Options {
    from: PathBuf,
    to: PathBuf,
    clients: u32,
    answers: u64,
    seed: u64,
    model: Model,
}

const USAGE: &str = "\
Usage: roll --from FOLDER --to FOLDER [--clients N] [--answers N] [--seed N] [--executor NAME]

  --from FOLDER  Program (host) and plugin (shm.so) of the first build
  --to FOLDER    Those of the second one
  --clients N    Clients at once [default: 6]
  --answers N    Complete answers that are waited for before each step [default: 300]
  --seed N       What is drawn: prompts and their order [default: 1]
  --executor NAME
                 What computes the answers: synthetic, or cpu, a small made-up model, of which clients request chats, answers held
                 to grammars, and calls of tools, too [default: synthetic]";

impl Options {
    fn read() -> Result<Self, String> {
        let (mut from, mut to) = (None, None);
        let (mut clients, mut answers, mut seed, mut model) = (6, 300, 1, Model::Synthetic);
        let mut arguments = std::env::args().skip(1);
        while let Some(flag) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{flag} needs a value\n\n{USAGE}"))?;
            let number = || value.parse::<u32>().map_err(|error| format!("{flag} {value:?}: {error}"));
            match flag.as_str() {
                "--from" => from = Some(value.into()),
                "--to" => to = Some(value.into()),
                "--clients" => clients = number()?.max(1),
                "--answers" => answers = number()?.into(),
                "--seed" => seed = number()?.into(),
                "--executor" => {
                    let all = [Model::Synthetic, Model::Cpu];
                    model = Model::read(&value, &all).map_err(|wrong| format!("{wrong}\n\n{USAGE}"))?;
                }
                _ => return Err(format!("there is no {flag}\n\n{USAGE}")),
            }
        }
        match (from, to) {
            (Some(from), Some(to)) => Ok(Self { from, to, clients, answers, seed, model }),
            _ => Err(format!("both builds have to be named\n\n{USAGE}")),
        }
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
    let builds = [&options.from, &options.to].map(|folder| Build::in_folder(folder));
    let model = tempfile::tempdir().unwrap();
    let executor = options.model.flags(model.path());
    let mut jobs = draw(&mut fastrand::Rng::with_seed(options.seed), options.model);
    // An older build may not tell the seeds that it draws.
    jobs.retain(|job| !job.is_unseeded);
    let [one, other] = [0, 1].map(|build| Aggregated::start(&builds[build].program, &executor, jobs.clone()));
    let differs = |job: &Job, other: &Job| match (&job.right, &other.right) {
        (Some(right), Some(other)) => right.difference(other, true).is_some(),
        _ => true,
    };
    if one.jobs().iter().zip(other.jobs()).any(|(job, other)| differs(job, other)) {
        println!(
            "the aggregated workers of both builds answer differently: pages and streams cannot go from one to the other"
        );
        return ExitCode::FAILURE;
    }
    drop(other);
    println!("{} different requests were answered by one aggregated worker of each build", jobs.len());

    let mut cast = Cast::start(&builds[0], executor);
    let began = Instant::now();
    let load = Load::start(&Arc::new(one), cast.url(), options.clients, options.seed);
    let mut roll = |there: &str, to: &Build| {
        for role in ["prefill", "decode"] {
            load.wait_for_answers(options.answers);
            cast.replace_worker(role, to);
            println!("{there}: the {role} worker was replaced");
        }
        load.wait_for_answers(options.answers);
        cast.replace_router(to, |url| load.moves_to(url));
        println!("{there}: the router was replaced");
    };
    roll("there", &builds[1]);
    roll("and back", &builds[0]);
    load.wait_for_answers(options.answers);
    let tally = load.stop();
    let troubles = tally.print(began.elapsed());
    if !troubles {
        return ExitCode::SUCCESS;
    }
    println!("logs: {}", cast.keep_logs().display());
    ExitCode::FAILURE
}

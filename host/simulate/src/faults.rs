//! Simulations of clusters with all kinds of faults, seed by seed.
//!
//! A seed draws a small cluster, its clients, and the faults between them ([`Scene`]). Messages are lost, repeated or
//! late. Connections are cut in one direction. Workers die, freeze or are slow, and their clocks jump. Storage and
//! plugins fail. Requests go by way of the router's own [choice](host_core::routing::choose) and
//! [retries](host_core::routing::Tries). Pages have contents, so that a wrong page leads to a wrong answer.
//!
//! A run fails when a [`World`](host_sim::World) finds something broken (its checks are listed there), or when
//!
//! - a client gets a token that is not the next one of the right answer,
//! - a request ends neither answered nor refused with a reason, or ends after its deadline,
//! - a request that comes long after the last mishap is refused.
//!
//! A failing case is [shrunk](shrink): requests and mishaps are left out for as long as the same check fails.
//!
//! A failed check is a panic, which is caught. A caller that does not want its message printed sets a panic hook of its
//! own.

mod case;
mod caught;
mod jobs;
mod scene;
mod shrink;

use std::fmt::{self, Display};

use host_sim::{Erratic, Mishap, Outcome, World};

pub use case::{Case, NoCase};
use jobs::Jobs;
pub use jobs::Tally;
use scene::Scene;
pub use shrink::shrink;

/// The result of one run.
#[derive(Clone, Debug)]
pub struct Run {
    /// What happened in the cluster.
    pub outcome: Outcome,
    /// How requests ended.
    pub tally: Tally,
    /// The mishaps that struck, if they were recorded.
    pub mishaps: Vec<Mishap>,
    /// The check that failed, if one did.
    pub broken: Option<Broken>,
}

/// A check that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// The message of the check.
    pub what: String,
}

/// A case that fails, as short as it could be made.
#[derive(Clone, Debug)]
pub struct FailingCase {
    /// The seed of the original case.
    pub seed: u64,
    /// The shortened case.
    pub case: Case,
    /// The check that fails in the shortened case.
    pub broken: Broken,
    /// The mishaps in the shortened case.
    pub mishaps: Vec<Mishap>,
}

impl Display for FailingCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} fails: {}", self.seed, self.broken.what)?;
        for mishap in &self.mishaps {
            writeln!(f, "  {:.3} s, mishap {}: {}", mishap.at.0.as_secs_f64(), mishap.number, mishap.what)?;
        }
        writeln!(f, "run it again with --replay '{}'", self.case)
    }
}

/// Runs a case. With `noted`, its mishaps are recorded.
#[must_use]
pub fn run(case: &Case, noted: bool) -> Run {
    played(case, |world| {
        if noted {
            world.keep_mishaps();
        }
    })
    .0
}

/// Like [`run`], and also returns the events and the actions of all workers.
#[must_use]
pub fn traced(case: &Case) -> (Run, Vec<String>) {
    let (run, world) = played(case, |world| {
        world.keep_mishaps();
        world.keep_trace();
    });
    (run, world.trace().to_vec())
}

fn played(case: &Case, prepare: impl FnOnce(&mut World<Jobs>)) -> (Run, World<Jobs>) {
    let scene = Scene::draw(case.seed);
    let jobs = Jobs::new(&scene);
    let mut world = World::new(case.seed, scene.kv, scene.faults, Erratic, jobs);
    for (config, limits) in &scene.workers {
        world.add(config.clone(), *limits);
    }
    prepare(&mut world);
    if let Some(only) = &case.mishaps {
        world.only_mishaps(only.clone());
    }
    let broken = caught::catch(|| play(&mut world, &scene, case)).err();
    let mishaps = world.mishaps().to_vec();
    // Counters come from the workers, which may be broken after a failed check.
    let outcome = if broken.is_some() { Outcome::default() } else { world.outcome() };
    (Run { outcome, tally: world.clients.tally(), mishaps, broken }, world)
}

fn play(world: &mut World<Jobs>, scene: &Scene, case: &Case) {
    for (number, arrival) in (0..).zip(&scene.arrivals) {
        if case.requests.as_ref().is_some_and(|only| !only.contains(&number)) {
            continue;
        }
        world.run_until(arrival.at);
        let now = world.now();
        let ask = world.clients.arrive(now, arrival);
        world.ask(ask);
    }
    world.run();
    world.clients.check();
}

/// The results of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Seeds that were run.
    pub runs: u64,
    /// What happened in all of them.
    pub outcome: Outcome,
    /// How requests ended.
    pub tally: Tally,
    /// Cases that fail.
    pub found: Vec<FailingCase>,
}

impl Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { answered, refused, left, tries } = self.tally;
        writeln!(
            f,
            "{} seeds: {answered} requests answered in {tries} tries, {refused} refused, {left} given up by their clients",
            self.runs
        )?;
        let Outcome {
            deaths,
            disconnects,
            integrity_failures,
            retractions,
            restores_failed,
            renegotiated,
            ..
        } = self.outcome;
        writeln!(
            f,
            "{deaths} deaths, {disconnects} broken connections, {integrity_failures} damaged transfers, {retractions} preemptions, \
             {restores_failed} failed restores, {renegotiated} renegotiations"
        )?;
        self.found.iter().try_for_each(|found| write!(f, "{found}"))?;
        writeln!(f, "{} cases fail", self.found.len())
    }
}

/// Runs seeds until `most` fail. `watch` is told of each seed before it runs.
pub fn search(seeds: impl Iterator<Item = u64>, most: usize, watch: &mut dyn FnMut(u64)) -> Summary {
    let mut summary = Summary::default();
    for seed in seeds {
        watch(seed);
        let case = Case::of(seed);
        let run = run(&case, false);
        summary.runs += 1;
        summary.outcome += run.outcome;
        summary.tally += run.tally;
        if let Some(broken) = run.broken {
            summary.found.push(shrink(&case, &broken));
            if summary.found.len() >= most {
                break;
            }
        }
    }
    summary
}

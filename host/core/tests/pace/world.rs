//! One worker that answers, its clients, and a prefill worker whose work takes no time.

use std::collections::BTreeMap;
use std::time::Duration;

use host_core::pool::PoolLimits;
use host_core::scheduler::Stats;
use host_core::{Batch, Config, Role, Room, Time};
use host_sim::{Ask, Clients, Faults, Kv, OpenRequest, Random, Work, World};

const TRANSFER: Duration = Duration::from_millis(30);

/// The contents of a step, and the time at which it begins.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub at: f64,
    pub sequences: f64,
    pub tokens: f64,
    pub context: f64,
}

impl Step {
    fn of(now: Time, batch: &Batch) -> Self {
        let (short, long): (Vec<_>, Vec<_>) = batch.sequences.iter().partition(|s| s.tokens.len() == 1);
        Self {
            at: seconds(now),
            sequences: short.len() as f64,
            tokens: long.iter().map(|s| s.tokens.len()).sum::<usize>() as f64,
            context: batch.sequences.iter().map(|s| s.end()).sum::<usize>() as f64,
        }
    }
}

fn seconds(time: Time) -> f64 {
    time.0.as_secs_f64()
}

pub fn config(role: Role, target_ms: Option<u64>) -> Config {
    let long = Duration::from_secs(1_000_000);
    Config {
        page_tokens: 16,
        max_tokens: 100_000,
        vocabulary: 100,
        chunk_tokens: 512,
        reserved_decode_tokens: 64,
        draft_tokens: 0,
        target_itl: target_ms.map(Duration::from_millis),
        max_batch: 256,
        max_running: 512,
        bootstrap_timeout: long,
        request_timeout: long,
        peer_patience: long,
        ..host_sim::config(role, 20_000)
    }
}

/// A number of clients that are always waiting for an answer, and what they measured.
#[derive(Default)]
pub struct Callers {
    answers: usize,
    prefill: Option<usize>,
    pub prompt: usize,
    answer: u32,
    /// Whether clients leave at their next token and ask no more.
    pub leave: bool,
    waiting: usize,
    last: BTreeMap<Room, Time>,
    /// (when, gap) of every token but the first ones.
    pub gaps: Vec<(f64, f64)>,
    /// (when, time to the first token).
    pub waits: Vec<(f64, f64)>,
    /// (when it began, sequences) of every step.
    pub steps: Vec<(f64, usize)>,
    pub finished: u64,
}

impl Callers {
    fn ask(&mut self, random: &mut Random) -> Ask {
        self.waiting += 1;
        // Answers differ in length, so that they do not begin and end together.
        let answer = self.answer / 2 + (random.unit() * f64::from(self.answer)) as u32;
        Ask {
            request: host_sim::request(0, &vec![1; self.prompt], answer),
            answers: (self.answers, Duration::ZERO),
            prefill: self.prefill.map(|place| (place, Duration::ZERO)),
            leaves: None,
        }
    }
}

impl Clients for Callers {
    fn begun(&mut self, now: Time, place: usize, batch: &Batch) {
        if place == self.answers {
            let step = Step::of(now, batch);
            self.steps.push((step.at, step.sequences as usize));
        }
    }

    fn token(&mut self, now: Time, open: &OpenRequest) -> bool {
        match self.last.insert(open.request.room, now) {
            None => self.waits.push((seconds(now), now.since(open.since).as_secs_f64())),
            Some(last) => self.gaps.push((seconds(now), now.since(last).as_secs_f64())),
        }
        !self.leave
    }

    fn ended(&mut self, _now: Time, open: &OpenRequest, complete: bool, random: &mut Random) -> Vec<Ask> {
        assert!(complete || self.leave, "{open:?} failed");
        self.last.remove(&open.request.room);
        self.finished += u64::from(complete);
        self.waiting -= 1;
        if self.leave { Vec::new() } else { vec![self.ask(random)] }
    }
}

/// The world around one worker that answers.
pub struct Pace {
    pub world: World<Callers>,
}

impl Pace {
    pub fn new(config: Config, cost: impl Fn(Step) -> f64 + 'static) -> Self {
        Self::noisy(config, 0.0, cost)
    }

    /// A world whose steps take up to the fraction `noise` more or less.
    pub fn noisy(config: Config, noise: f64, cost: impl Fn(Step) -> f64 + 'static) -> Self {
        let answers = usize::from(config.role == Role::Decode);
        let times = move |now: Time, work: Work<'_>, random: &mut Random| match work {
            Work::Step { at, batch } if at == answers => {
                let noise = 1.0 + noise * (2.0 * random.unit() - 1.0);
                Duration::from_secs_f64(cost(Step::of(now, batch)) * noise)
            }
            Work::Write { .. } => TRANSFER,
            _ => Duration::ZERO,
        };
        let callers = Callers {
            answers,
            prefill: (answers > 0).then_some(0),
            prompt: 100,
            answer: 60,
            ..Callers::default()
        };
        let mut world = World::new(1, Kv::blank(16, 100), Faults::default(), times, callers);
        world.audit_every(64);
        let limits = PoolLimits::shared(config.pages);
        if answers > 0 {
            world.add(Config { role: Role::Prefill, target_itl: None, ..config.clone() }, limits);
        }
        world.add(config, limits);
        Self { world }
    }

    /// Runs until this many seconds with so many clients. A client asks again as soon as it has its answer.
    pub fn run(&mut self, until: f64, clients: usize) {
        while self.world.clients.waiting < clients {
            let ask = self.world.clients.ask(&mut self.world.random);
            self.world.ask(ask);
        }
        self.world.run_until(Time(Duration::from_secs_f64(until)));
    }

    pub fn stats(&self) -> Stats {
        self.world.scheduler(self.world.clients.answers).stats()
    }

    pub fn seen(&self) -> &Callers {
        &self.world.clients
    }

    /// Mean time between tokens, in milliseconds, from one second to another.
    pub fn itl(&self, from: f64, to: f64) -> f64 {
        let gaps = self.seen().gaps.iter().filter(|(at, _)| (from..to).contains(at));
        let gaps: Vec<f64> = gaps.map(|(_, gap)| *gap).collect();
        assert!(gaps.len() > 100, "{} tokens from {from} to {to}", gaps.len());
        1e3 * gaps.iter().sum::<f64>() / gaps.len() as f64
    }

    /// Mean sequences in a step, from one second to another.
    pub fn sequences(&self, from: f64, to: f64) -> f64 {
        let steps = self.seen().steps.iter().filter(|(at, _)| (from..to).contains(at));
        let steps: Vec<usize> = steps.map(|(_, count)| *count).collect();
        steps.iter().sum::<usize>() as f64 / steps.len() as f64
    }
}

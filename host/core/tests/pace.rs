//! A target for the time between tokens, against a made-up executor in virtual time.

use std::collections::BTreeMap;
use std::time::Duration;

use host_core::aux_row::AuxRow;
use host_core::integrity::Found;
use host_core::notice::Notice;
use host_core::radix::NamespaceKey;
use host_core::request::{PeerRef, Request};
use host_core::{
    Action, Batch, Config, Event, Instance, Role, Room, Sampled, Sampling, Scheduler, SequenceOutput, Time,
};

const PREFILL: Instance = Instance(7);
const TRANSFER: Duration = Duration::from_millis(30);

/// What a step is made of, and when it begins.
#[derive(Clone, Copy, Debug)]
struct Step {
    at: f64,
    sequences: f64,
    tokens: f64,
    context: f64,
}

fn config(role: Role, target_ms: Option<u64>) -> Config {
    Config {
        role,
        pages: 20_000,
        page_tokens: 16,
        max_tokens: 100_000,
        vocabulary: 100,
        chunk_tokens: 512,
        radix_cache: None,
        hierarchy: None,
        reserved_decode_tokens: 64,
        window: None,
        layer_groups: host_core::layer_groups::LayerGroups::off(1),
        target_itl: target_ms.map(Duration::from_millis),
        cache_events: false,
        identity: host_core::radix::PageHash([0; 32]),
        seed: 0,
        max_batch: 256,
        max_running: 512,
        max_queued: 10_000,
        max_attempts: 3,
        bootstrap_timeout: Duration::from_secs(1_000_000),
        request_timeout: Duration::from_secs(1_000_000),
        peer_patience: Duration::from_secs(1_000_000),
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[derive(Default)]
struct Client {
    prompt: usize,
    submitted: Time,
    first: Option<Time>,
    last: Time,
}

/// One worker and as many clients as are always waiting for an answer.
struct World<'a> {
    scheduler: Scheduler,
    cost: &'a dyn Fn(Step) -> f64,
    /// Steps take up to so much more or less, relatively.
    noise: f64,
    random: Random,
    now: Time,
    batch: Option<(Time, Batch)>,
    arrivals: BTreeMap<(Time, Room), ()>,
    clients: BTreeMap<Room, Client>,
    next_room: u64,
    prompt: usize,
    answer: u32,
    /// (when, gap) of every token but the first ones.
    gaps: Vec<(f64, f64)>,
    /// (when, time to the first token).
    waits: Vec<(f64, f64)>,
    /// (when it began, sequences) of every step.
    steps: Vec<(f64, usize)>,
    finished: u64,
}

impl<'a> World<'a> {
    fn new(config: Config, cost: &'a dyn Fn(Step) -> f64) -> Self {
        let mut world = Self {
            scheduler: Scheduler::new(config.clone()),
            cost,
            noise: 0.0,
            random: Random(1),
            now: Time::default(),
            batch: None,
            arrivals: BTreeMap::new(),
            clients: BTreeMap::new(),
            next_room: 0,
            prompt: 100,
            answer: 60,
            gaps: Vec::new(),
            waits: Vec::new(),
            steps: Vec::new(),
            finished: 0,
        };
        if config.role == Role::Decode {
            // The first request makes the connection.
            world.submit();
            world.handle(Event::PeerReady { peer: PREFILL, floor: 0, session: 1 });
        }
        world
    }

    fn submit(&mut self) {
        self.next_room += 1;
        let room = Room(self.next_room);
        let request = Request {
            room,
            prompt: vec![1; self.prompt],
            // Not all of one length, so that they do not begin and end together.
            max_new_tokens: self.answer / 2 + (self.random.unit() * f64::from(self.answer)) as u32,
            stop_tokens: Vec::new(),
            ignore_stop: true,
            sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None },
            namespace: NamespaceKey::default(),
            no_cache: false,
            prefill: Some(PeerRef { instance: PREFILL, address: String::new() }),
        };
        self.clients.insert(room, Client { prompt: self.prompt, submitted: self.now, ..Client::default() });
        self.handle(Event::Submit(request));
    }

    fn handle(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.scheduler.handle(self.now, event, &mut actions);
        self.act(actions);
    }

    fn act(&mut self, actions: Vec<Action>) {
        let seconds = self.now.0.as_secs_f64();
        for action in actions {
            match action {
                Action::Run(batch) => {
                    let long = |s: &&host_core::Sequence| s.tokens.len() > 1;
                    let step = Step {
                        at: seconds,
                        sequences: batch.sequences.iter().filter(|s| !long(s)).count() as f64,
                        tokens: batch.sequences.iter().filter(long).map(|s| s.tokens.len()).sum::<usize>()
                            as f64,
                        context: batch.sequences.iter().map(|s| s.end()).sum::<usize>() as f64,
                    };
                    self.steps.push((seconds, step.sequences as usize));
                    let noise = 1.0 + self.noise * (2.0 * self.random.unit() - 1.0);
                    let due = self.now.after(Duration::from_secs_f64((self.cost)(step) * noise));
                    self.batch = Some((due, batch));
                }
                Action::Send { message, .. }
                    if matches!(message.body, host_core::message::Body::Reserve(_)) =>
                {
                    self.arrivals.insert((self.now.after(TRANSFER), message.room), ());
                }
                Action::Emit { room, .. } => {
                    let Some(client) = self.clients.get_mut(&room) else { panic!("{room:?} is unknown") };
                    match client.first {
                        None => {
                            client.first = Some(self.now);
                            self.waits.push((seconds, self.now.since(client.submitted).as_secs_f64()));
                        }
                        Some(_) => self.gaps.push((seconds, self.now.since(client.last).as_secs_f64())),
                    }
                    client.last = self.now;
                }
                Action::Finish { room, .. } => {
                    self.clients.remove(&room);
                    self.finished += 1;
                }
                Action::Fail { room, failure } => panic!("{room:?}: {failure:?}"),
                _ => {}
            }
        }
    }

    fn arrive(&mut self, room: Room) {
        let prompt = self.clients[&room].prompt;
        self.handle(Event::Arrived(Notice { room, attempt: 1, sequence: 0, pages: 1, last: true }));
        let row = AuxRow {
            room,
            attempt: 1,
            prompt_tokens: prompt as u32,
            cached_tokens: 0,
            pages: prompt.div_ceil(16) as u32,
            first: Sampled { token: 3, logprob: None, top: Vec::new() },
        };
        let found = Box::new(Found { aux_row: row.encode(), lanes: None });
        self.handle(Event::Verified { room, attempt: 1, found });
    }

    /// Runs until this many seconds with so many clients; each asks again when it was answered.
    fn run(&mut self, until: f64, clients: usize) {
        while self.now.0.as_secs_f64() < until {
            while self.clients.len() < clients {
                self.submit();
            }
            let mut actions = Vec::new();
            self.scheduler.tick(self.now, &mut actions);
            self.act(actions);
            if self.steps.len().is_multiple_of(64) {
                self.scheduler.audit();
            }
            let batch = self.batch.as_ref().map(|(due, _)| *due);
            let arrival = self.arrivals.keys().next().map(|(at, _)| *at);
            let Some(next) = batch.into_iter().chain(arrival).min() else {
                panic!("nothing happens any more")
            };
            self.now = next;
            if batch == Some(next)
                && let Some((_, batch)) = self.batch.take()
            {
                let sampled = Sampled { token: 3, logprob: None, top: Vec::new() };
                let outputs = batch.sequences.iter().map(|sequence| SequenceOutput {
                    room: sequence.room,
                    sampled: sequence.sample.map(|_| sampled.clone()),
                });
                self.handle(Event::BatchDone(outputs.collect()));
            }
            while let Some(((at, room), ())) = self.arrivals.pop_first() {
                if at > self.now {
                    self.arrivals.insert((at, room), ());
                    break;
                }
                self.arrive(room);
            }
        }
    }

    /// Mean time between tokens, in milliseconds, from one second to another.
    fn itl(&self, from: f64, to: f64) -> f64 {
        let gaps: Vec<f64> =
            self.gaps.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, gap)| *gap).collect();
        assert!(gaps.len() > 100, "{} tokens from {from} to {to}", gaps.len());
        1e3 * gaps.iter().sum::<f64>() / gaps.len() as f64
    }

    /// Mean sequences in a step, from one second to another.
    fn sequences(&self, from: f64, to: f64) -> f64 {
        let steps: Vec<usize> =
            self.steps.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, count)| *count).collect();
        steps.iter().sum::<usize>() as f64 / steps.len() as f64
    }
}

/// 4 ms and half a millisecond per sequence.
fn plain(step: Step) -> f64 {
    4e-3 + 5e-4 * step.sequences + 2e-5 * step.tokens
}

fn between(what: &str, value: f64, low: f64, high: f64) {
    println!("{what}: {value:.3}, {low} to {high}");
    assert!((low..=high).contains(&value), "{what}: {value} is not between {low} and {high}");
}

#[test]
fn the_target_is_held_and_the_room_below_it_used() {
    for role in [Role::Decode, Role::Aggregated] {
        for noise in [0.0, 0.5] {
            println!("{role:?}, noise {noise}");
            let mut world = World::new(config(role, Some(20)), &plain);
            world.noise = noise;
            world.run(60.0, 200);
            // 32 sequences take 20 ms. An aggregated worker keeps part of each step for prompts.
            let (fewest, most) = if role == Role::Decode { (28.0, 32.0) } else { (22.0, 32.0) };
            between("sequences", world.sequences(5.0, 60.0), fewest, most);
            between("time between tokens", world.itl(5.0, 60.0), 17.0, 20.2);
        }
    }
}

#[test]
fn without_a_target_as_many_run_as_fit() {
    let mut world = World::new(config(Role::Decode, None), &plain);
    world.run(20.0, 200);
    between("sequences", world.sequences(5.0, 20.0), 150.0, 200.0);
    assert_eq!(world.scheduler.stats().pace.limit, 0);
}

#[test]
fn it_begins_with_few_and_never_hurts_while_learning() {
    let mut world = World::new(config(Role::Decode, Some(20)), &plain);
    world.run(3.0, 200);
    assert_eq!(world.steps[0].1, 1, "nothing is known of the first step");
    let longest = world.steps.iter().map(|(_, sequences)| *sequences).max().unwrap();
    between("sequences in the largest step", longest as f64, 25.0, 33.0);
}

#[test]
fn a_cost_that_is_no_straight_line_is_felt_out() {
    // So cheap at first that any number seems to fit; each sequence beyond 64 costs ten times as much.
    let cost = |step: Step| 1e-4 + 1e-4 * step.sequences + 9e-4 * (step.sequences - 64.0).max(0.0);
    let mut world = World::new(config(Role::Decode, Some(20)), &cost);
    world.noise = 0.2;
    world.run(60.0, 250);
    let mut largest = 0;
    for (_, sequences) in &world.steps {
        assert!(*sequences <= largest * 5 / 4 + 1, "{sequences} after at most {largest}");
        largest = largest.max(*sequences);
    }
    between("time between tokens", world.itl(10.0, 60.0), 17.0, 20.5);
    between("sequences", world.sequences(10.0, 60.0), 70.0, 78.0);
}

#[test]
fn a_cost_that_changes_is_followed_in_both_directions() {
    // Twice as slow from second 30 to 60.
    let cost = |step: Step| plain(step) * if (30.0..60.0).contains(&step.at) { 2.0 } else { 1.0 };
    let mut world = World::new(config(Role::Decode, Some(20)), &cost);
    world.noise = 0.2;
    world.run(90.0, 200);
    between("before", world.itl(5.0, 30.0), 18.0, 20.2);
    // Those that run when it becomes slow are not sent away: it takes an answer's length.
    between("slow", world.itl(34.0, 60.0), 17.0, 20.4);
    between("sequences while slow", world.sequences(34.0, 60.0), 9.0, 12.5);
    between("after", world.itl(64.0, 90.0), 18.0, 20.2);
    between("sequences after", world.sequences(64.0, 90.0), 28.0, 32.0);
}

#[test]
fn long_contexts_count() {
    let cost = |step: Step| 2e-3 + 1e-4 * step.sequences + 1e-6 * step.context;
    let mut world = World::new(config(Role::Decode, Some(20)), &cost);
    world.prompt = 1_000;
    world.run(30.0, 40);
    between("short", world.itl(5.0, 30.0), 17.5, 20.2);
    world.prompt = 4_000;
    world.run(60.0, 40);
    between("long", world.itl(40.0, 60.0), 17.0, 20.4);
    between("sequences", world.sequences(40.0, 60.0), 3.5, 4.6);
}

#[test]
fn prompts_take_only_what_the_target_leaves() {
    let mut world = World::new(config(Role::Aggregated, Some(12)), &plain);
    world.prompt = 2_000;
    world.run(60.0, 80);
    between("time between tokens", world.itl(5.0, 60.0), 8.0, 12.3);
    assert!(world.finished > 100, "prompts came to nothing: {} answers", world.finished);
    let mut free = World::new(config(Role::Aggregated, None), &plain);
    free.prompt = 2_000;
    free.run(60.0, 80);
    println!("with a target {} answers, without {}", world.finished, free.finished);
    between("time between tokens without a target", free.itl(5.0, 60.0), 20.0, 100.0);
}

#[test]
fn a_target_out_of_reach_is_said_and_one_at_a_time_goes_on() {
    let cost = |_| 50e-3;
    let mut world = World::new(config(Role::Decode, Some(20)), &cost);
    world.run(200.0, 4);
    let pace = world.scheduler.stats().pace;
    assert!(pace.out_of_reach);
    assert_eq!(pace.limit, 1);
    assert!(world.finished > 50, "{} answers", world.finished);
    assert!(world.steps.iter().all(|(_, sequences)| *sequences <= 1));
}

#[test]
fn the_limit_does_not_flap() {
    let mut world = World::new(config(Role::Decode, Some(20)), &plain);
    world.noise = 0.3;
    world.run(10.0, 200);
    let mut limits = Vec::new();
    for tenth in 0..300 {
        world.run(10.0 + f64::from(tenth) / 10.0, 200);
        limits.push(world.scheduler.stats().pace.limit);
    }
    let (low, high) = (limits.iter().min().unwrap(), limits.iter().max().unwrap());
    println!("limits {low} to {high}");
    assert!(high - low <= 6, "{limits:?}");
}

#[test]
fn nobody_waits_for_ever_and_the_oldest_comes_first() {
    let mut world = World::new(config(Role::Decode, Some(20)), &plain);
    world.run(60.0, 100);
    // 100 clients, about 30 of them served at a time, an answer takes about 60 x 20 ms: a wait is about 3 s.
    let waits = || world.waits.iter().filter(|(at, _)| *at > 10.0).map(|(_, wait)| *wait);
    let longest = waits().fold(0.0, f64::max);
    let mean = waits().sum::<f64>() / waits().count() as f64;
    between("longest wait over the mean", longest / mean, 1.0, 1.5);
}

#[test]
fn the_same_input_gives_the_same_decisions() {
    let run = || {
        let mut world = World::new(config(Role::Decode, Some(20)), &plain);
        world.noise = 0.4;
        world.run(10.0, 100);
        (world.steps, world.gaps)
    };
    assert!(run() == run());
}

#[test]
fn an_idle_hour_is_no_step() {
    let mut world = World::new(config(Role::Aggregated, Some(20)), &plain);
    world.run(1.0, 1);
    // The only request is cancelled between two of its steps.
    assert!(world.batch.is_none());
    let room = *world.clients.keys().next().unwrap();
    world.clients.clear();
    world.scheduler.handle(world.now, Event::Cancel(room), &mut Vec::new());
    world.scheduler.tick(world.now, &mut Vec::new());
    assert!(world.scheduler.is_idle());
    world.now = world.now.after(Duration::from_secs(3600));
    let until = world.now.0.as_secs_f64() + 1.0;
    world.run(until, 1);
    let steps = world.scheduler.stats().pace.steps.sum();
    assert!(steps < Duration::from_secs(3), "{steps:?} of steps in two seconds of work");
}

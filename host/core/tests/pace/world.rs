//! One worker and its clients, in virtual time.

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
pub struct Step {
    pub at: f64,
    pub sequences: f64,
    pub tokens: f64,
    pub context: f64,
}

pub fn config(role: Role, target_ms: Option<u64>) -> Config {
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
pub struct Client {
    prompt: usize,
    submitted: Time,
    first: Option<Time>,
    last: Time,
}

/// One worker and as many clients as are always waiting for an answer.
pub struct World<'a> {
    pub scheduler: Scheduler,
    cost: &'a dyn Fn(Step) -> f64,
    /// Steps take up to so much more or less, relatively.
    pub noise: f64,
    random: Random,
    pub now: Time,
    pub batch: Option<(Time, Batch)>,
    arrivals: BTreeMap<(Time, Room), ()>,
    pub clients: BTreeMap<Room, Client>,
    next_room: u64,
    pub prompt: usize,
    answer: u32,
    /// (when, gap) of every token but the first ones.
    pub gaps: Vec<(f64, f64)>,
    /// (when, time to the first token).
    pub waits: Vec<(f64, f64)>,
    /// (when it began, sequences) of every step.
    pub steps: Vec<(f64, usize)>,
    pub finished: u64,
}

impl<'a> World<'a> {
    pub fn new(config: Config, cost: &'a dyn Fn(Step) -> f64) -> Self {
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
            names: Vec::new(),
            prefill: Some(PeerRef { instance: PREFILL, address: String::new() }),
        };
        self.clients.insert(room, Client { prompt: self.prompt, submitted: self.now, ..Client::default() });
        self.handle(Event::Submit(request));
    }

    pub fn handle(&mut self, event: Event) {
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
    pub fn run(&mut self, until: f64, clients: usize) {
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
    pub fn itl(&self, from: f64, to: f64) -> f64 {
        let gaps: Vec<f64> =
            self.gaps.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, gap)| *gap).collect();
        assert!(gaps.len() > 100, "{} tokens from {from} to {to}", gaps.len());
        1e3 * gaps.iter().sum::<f64>() / gaps.len() as f64
    }

    /// Mean sequences in a step, from one second to another.
    pub fn sequences(&self, from: f64, to: f64) -> f64 {
        let steps: Vec<usize> =
            self.steps.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, count)| *count).collect();
        steps.iter().sum::<usize>() as f64 / steps.len() as f64
    }
}

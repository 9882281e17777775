//! How long everything takes on given machines: the [`Times`] of a world.
//!
//! Executors follow [the roofline](step). Links, copies and storage are queues that serve one request after the other at
//! a fixed bandwidth. Messages between threads and between processes of a cluster take fixed times.

mod lanes;
mod queue;
mod step;

use std::time::Duration;

use host_core::Time;
use host_core::hierarchy::Direction;
use host_core::scheduler::PageWrite;
use host_core::staging::LONGEST_PIECE;
use host_sim::{Random, Times, Work};

use crate::cluster::{Cluster, Role, Tier};
use lanes::{Effort, Lanes};
use queue::Queue;
pub use step::{Roofline, StepCost};

/// The time of a message from one thread of a worker to another.
const NEWS: Duration = Duration::from_micros(20);
/// The time of each half of a handshake between two workers.
const HANDSHAKE: Duration = Duration::from_millis(1);
/// The share of its memory's bandwidth with which a worker digests pages that have arrived, and with which a rank gathers or
/// scatters.
const COPY_SHARE: f64 = 0.25;

/// Most bytes of a staged piece.
const LONGEST: usize = LONGEST_PIECE as usize;

/// One worker's machine.
#[derive(Clone, Debug)]
struct Machine {
    step: StepCost,
    /// Its entry in the cluster's `workers`.
    entry: usize,
    /// The network card that it sends and receives with.
    card: usize,
    /// How often its ranks together hold each head ([`Cluster::held`]).
    held: f64,
    /// Copies of pages between pool and host memory, in each direction.
    copies: [Queue; 2],
    /// Bytes per second that it digests.
    digests: f64,
    /// Bytes that each of its ranks gathers into staging memory and scatters from it, one write after the other.
    staged: [Queue; 2],
    /// Reads and writes of the tiers that are not shared, one queue for each tier.
    tiers: Vec<Queue>,
}

/// All machines of a cluster, and the network and storage between them.
#[derive(Clone, Debug)]
pub struct Hardware {
    machines: Vec<Machine>,
    /// The queues in which each card sends and receives.
    cards: Vec<[Queue; 2]>,
    /// Tiers that are shared.
    shared: Vec<Option<Queue>>,
    tiers: Vec<Tier>,
    /// From workers of one entry to those of another, where the runs of a write cost something.
    lanes: Vec<Vec<Option<Lanes>>>,
    page_bytes: f64,
    layers: f64,
    latency: Duration,
    page: Duration,
    run: Duration,
}

impl Hardware {
    /// The hardware of a cluster that [was checked](Cluster::check), its workers in the order of the file.
    #[must_use]
    pub fn new(cluster: &Cluster) -> Self {
        let (model, link, page_bytes) = (cluster.model(), cluster.link(), cluster.page_bytes());
        let (mut machines, mut cards) = (Vec::new(), Vec::new());
        let own = |tier: &Tier| Queue::new(tier.gigabytes_per_second * 1e9);
        for (entry, workers) in cluster.workers.iter().enumerate() {
            let machine = cluster.machine(workers);
            let devices = workers.tp as f64;
            let step = workers.step.map_or_else(
                || {
                    let kv = model.kv_bytes(cluster.kv) * cluster.held(workers.tp);
                    StepCost::Roofline(Roofline::new(&model, cluster.weights, kv, &machine, devices))
                },
                StepCost::Measured,
            );
            for place in 0..workers.count {
                if place.is_multiple_of(link.workers_per_card) {
                    cards.push([Queue::new(link.gigabytes_per_second * 1e9); 2]);
                }
                machines.push(Machine {
                    step,
                    entry,
                    card: cards.len() - 1,
                    held: cluster.held(workers.tp),
                    copies: [Queue::new(machine.host_bandwidth * devices); 2],
                    digests: machine.bandwidth * devices * COPY_SHARE,
                    staged: [Queue::new(machine.bandwidth * COPY_SHARE); 2],
                    tiers: cluster.tiers.iter().map(own).collect(),
                });
            }
        }
        Self {
            machines,
            cards,
            shared: cluster.tiers.iter().map(|tier| tier.shared.then(|| own(tier))).collect(),
            tiers: cluster.tiers.clone(),
            lanes: lanes(cluster),
            page_bytes,
            layers: f64::from(model.layers),
            latency: micros(link.latency_us),
            page: micros(link.page_us),
            run: micros(link.run_us),
        }
    }

    /// A write occupies both cards until its last byte has left. Its notice arrives one latency later.
    ///
    /// Staged pieces are gathered, sent and scattered at the same time, so the slowest of the three decides. The question for the
    /// first piece, its gathering, and the scattering of the last one come on top. A rank gathers, and scatters, for one write after
    /// the other.
    fn write(&mut self, now: Time, from: usize, to: usize, write: &PageWrite) -> Duration {
        let pages = write.source.len();
        let layers = f64::from(write.layers.end - write.layers.start) / self.layers;
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let [source, target] = [from, to].map(|place| &self.machines[place]);
        // Each rank of the receiver gets the heads that it holds.
        let bytes = pages as f64 * layers * self.page_bytes * target.held;
        let lanes = self.lanes[source.entry][target.entry].as_ref();
        let Effort { writes, gathered, scattered } =
            lanes.map_or(Effort::default(), |lanes| lanes.effort(write));
        let names = self.page * count(pages) + self.run * count(writes);
        let (sender, receiver) = (source.card, target.card);
        let free = self.cards[sender][0].free().max(self.cards[receiver][1].free()).max(now);
        let sent = self.cards[sender][0].take(free, bytes, names);
        let received = self.cards[receiver][1].take(free, bytes, names);
        let mut done = sent.max(received).after(self.latency);
        if gathered > 0 {
            let mut first_and_last = Duration::ZERO;
            for (place, copied, half) in [(from, gathered, 0), (to, scattered, 1)] {
                let queue = &mut self.machines[place].staged[half];
                done = done.max(queue.take(free, copied as f64, Duration::ZERO));
                first_and_last += queue.moves(copied.min(LONGEST) as f64);
            }
            done = done.after(2 * (self.latency + NEWS) + first_and_last);
        }
        done.since(now)
    }

    fn tier(&mut self, now: Time, at: usize, tier: usize) -> Duration {
        let queue = match &mut self.shared[tier] {
            Some(shared) => shared,
            None => &mut self.machines[at].tiers[tier],
        };
        let done = queue.take(now, self.page_bytes, Duration::ZERO);
        done.after(micros(self.tiers[tier].latency_us)).since(now)
    }
}

/// The lanes from each entry of the cluster's workers to each.
fn lanes(cluster: &Cluster) -> Vec<Vec<Option<Lanes>>> {
    let between = |from: usize, to: usize| {
        let [from, to] = [from, to].map(|entry| &cluster.workers[entry]);
        let sends = (from.role, to.role) == (Role::Prefill, Role::Decode);
        sends.then(|| Lanes::new(cluster, from, to)).flatten()
    };
    let entries = 0..cluster.workers.len();
    entries.clone().map(|from| entries.clone().map(|to| between(from, to)).collect()).collect()
}

fn micros(micros: f64) -> Duration {
    seconds(micros / 1e6)
}

/// A time of at most 30 years, which is as good as never.
pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.min(1e9))
}

impl Times for Hardware {
    fn takes(&mut self, now: Time, work: Work<'_>, _random: &mut Random) -> Duration {
        match work {
            Work::Step { at, batch } => self.machines[at].step.takes(batch),
            Work::Message { .. } => self.latency + NEWS,
            Work::Handshake { .. } => HANDSHAKE,
            Work::Write { from, to, write } => self.write(now, from, to, write),
            Work::Fence { .. } | Work::Loss { .. } | Work::News { .. } | Work::Cancel => NEWS,
            Work::Verify { at, pages } | Work::Scatter { at, pages } => {
                NEWS + seconds(pages as f64 * self.page_bytes / self.machines[at].digests)
            }
            Work::Copy { at, direction, pages } => {
                let held = self.machines[at].held;
                let queue = &mut self.machines[at].copies[usize::from(direction == Direction::Load)];
                queue.take(now, pages as f64 * self.page_bytes * held, NEWS).since(now)
            }
            Work::Query { tier, .. } => micros(self.tiers[tier].latency_us),
            Work::Read { at, tier } | Work::Store { at, tier } => self.tier(now, at, tier),
        }
    }
}

#[cfg(test)]
mod tests {
    use host_core::notice::Notice;
    use host_core::transfer::Tag;
    use host_core::{Instance, PageId, Room};

    use super::*;

    fn write(pages: u32) -> PageWrite {
        let all: Vec<PageId> = (0..pages).map(PageId).collect();
        PageWrite {
            tag: Tag(1),
            to: Instance(2),
            session: 1,
            notice: Notice { room: Room(1), attempt: 1, sequence: 0, last: true, pages },
            source: all.clone(),
            target: all,
            first_page: 0,
            layers: 0..64,
            aux: None,
        }
    }

    fn hardware(link: &str) -> Hardware {
        let text = format!(
            "model = 'qwen3-32b'\nkv = 'fp8'\nlink = {link}\n\
             [[workers]]\nrole = 'prefill'\ncount = 2\nmachine = 'b200'\ntp = 2\n\
             [[workers]]\nrole = 'decode'\nmachine = 'b200'\ntp = 2"
        );
        Hardware::new(&Cluster::parse("c.toml", &text).unwrap())
    }

    #[test]
    fn writes_to_one_card_take_turns_and_all_of_them_take_what_their_bytes_do() {
        let mut hardware = hardware("{ gigabytes_per_second = 8.388608, latency_us = 10 }");
        let mut random = Random::new(1);
        let mut takes = |from, to| {
            let write = write(100);
            hardware.takes(Time::default(), Work::Write { from, to, write: &write }, &mut random)
        };
        // A page of 64 tokens has 8 MiB, so it takes a millisecond.
        assert_eq!(takes(0, 2), Duration::from_micros(100_010));
        assert_eq!(takes(1, 2), Duration::from_micros(200_010), "the receiver's card is busy");
        assert_eq!(takes(1, 0), Duration::from_micros(300_010), "and so is the sender's");
        assert_eq!(takes(2, 1), Duration::from_micros(100_010), "the other direction is free");
    }

    #[test]
    fn staged_writes_wait_for_the_gathering_of_those_before() {
        let text = "model = 'qwen3-32b'\nkv = 'fp8'\nstaging = 'always'\n\
             link = { gigabytes_per_second = 1000000, latency_us = 10 }\n\
             [[workers]]\nrole = 'prefill'\nmachine = SLOW\ntp = 2\n\
             [[workers]]\nrole = 'decode'\nmachine = 'b200'\ntp = 2\ncount = 2";
        // A rank gathers 4.194304 GB/s: a quarter of its bandwidth.
        let slow = "{ flops = 1e15, bandwidth = 16.777216e9, memory = 192e9, host_bandwidth = 1e9 }";
        let mut hardware = Hardware::new(&Cluster::parse("c.toml", &text.replace("SLOW", slow)).unwrap());
        let mut random = Random::new(1);
        let write = write(100);
        let mut takes = |to| {
            let taken =
                hardware.takes(Time::default(), Work::Write { from: 0, to, write: &write }, &mut random);
            (taken.as_secs_f64() * 1e6).round()
        };
        // Of 100 pages of 8 MiB a rank has half: it gathers for 100 ms. Beside it: two messages of 10 µs of latency and 20 µs of a
        // change of threads, the gathering of a piece of 4 MiB, and scattering it at 2 TB/s.
        let beside = 2.0 * 30.0 + 1_000.0 + 2.0;
        assert_eq!(takes(1), 100_000.0 + beside);
        assert_eq!(takes(2), 200_000.0 + beside, "another receiver, but the same gathering ranks");
    }

    #[test]
    fn ranks_that_hold_the_same_head_each_get_it() {
        let takes = |ranks: usize| {
            let text = format!(
                "model = 'smollm2-135m'\nlink = {{ gigabytes_per_second = 1, latency_us = 0 }}\n\
                 [[workers]]\nrole = 'prefill'\nmachine = 'h200'\n\
                 [[workers]]\nrole = 'decode'\nmachine = 'h200'\ntp = {ranks}"
            );
            let cluster = Cluster::parse("c.toml", &text).unwrap();
            let write = PageWrite { layers: 0..30, ..write(100) };
            let work = Work::Write { from: 0, to: 1, write: &write };
            Hardware::new(&cluster).takes(Time::default(), work, &mut Random::new(1)).as_secs_f64()
        };
        let (three, six) = (takes(3), takes(6));
        assert!(
            (six / three - 2.0).abs() < 1e-6,
            "three heads over three ranks: {three} s, over six: {six} s"
        );
    }

    #[test]
    fn neighbours_may_share_a_card() {
        let mut hardware =
            hardware("{ gigabytes_per_second = 8.388608, latency_us = 0, workers_per_card = 2 }");
        let mut random = Random::new(1);
        let write = write(100);
        for (from, taken) in [(0, 100), (1, 200)] {
            let work = Work::Write { from, to: 2, write: &write };
            assert_eq!(hardware.takes(Time::default(), work, &mut random), Duration::from_millis(taken));
        }
    }
}

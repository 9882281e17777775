//! Clients that send requests without a pause, and a tally of the answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_tests::mixed_load::{Aggregated, Manner, Outcome, ask};
use host_tests::wait::until;

/// Start, end and kind of each injected fault.
pub type Strikes = Arc<Mutex<Vec<(Instant, Instant, &'static str)>>>;

/// A router as clients know it: its address, and a count of its interruptions.
#[derive(Clone, Debug)]
pub struct Address {
    pub url: String,
    /// Odd while the router is killed or its link is cut. Counted up at the beginning and at the end of that time.
    pub killed: Arc<AtomicU64>,
}

/// Counts of answers, and a line for each that was wrong or lost.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub right: u64,
    pub reconnected: u64,
    pub left: u64,
    pub wrong: Vec<String>,
    pub lost: Vec<String>,
    /// Right answers by the kind of request.
    pub kinds: BTreeMap<&'static str, u64>,
    /// Counts of requests by the kind of fault that lasted meanwhile.
    pub during: BTreeMap<&'static str, During>,
}

/// Counts of requests during a fault.
#[derive(Clone, Copy, Debug, Default)]
pub struct During {
    pub right: u64,
    pub reconnected: u64,
    pub wrong: u64,
    pub lost: u64,
}

/// Clients that run.
pub struct Load {
    stop: Arc<AtomicBool>,
    tally: Arc<Mutex<Tally>>,
    clients: Vec<JoinHandle<()>>,
    pub strikes: Strikes,
}

/// Time before a client whose connection broke asks a router again.
const AGAIN: Duration = Duration::from_millis(100);

impl Load {
    pub fn start(aggregated: &Arc<Aggregated>, routers: &[Address], clients: u32, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let strikes = Strikes::default();
        let clients = (0..clients)
            .map(|client| {
                let client = Client {
                    random: fastrand::Rng::with_seed(seed.wrapping_mul(1000).wrapping_add(client.into())),
                    aggregated: Arc::clone(aggregated),
                    routers: routers.to_vec(),
                    tally: Arc::clone(&tally),
                    strikes: Arc::clone(&strikes),
                };
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || client.run(&stop))
            })
            .collect();
        Self { stop, tally, clients, strikes }
    }

    /// Waits for so many right answers, and for one of each kind.
    pub fn wait_for_answers(&self, count: u64, aggregated: &Aggregated) {
        let kinds: BTreeSet<_> = aggregated.jobs().iter().map(|job| job.kind).collect();
        until("answers of all kinds", || {
            let tally = self.tally.lock().unwrap();
            let missing: Vec<_> = kinds.iter().filter(|kind| !tally.kinds.contains_key(*kind)).collect();
            if tally.right >= count && missing.is_empty() {
                return Ok(());
            }
            let (wrong, lost) = (&tally.wrong, &tally.lost);
            Err(format!("{} answers, none of {missing:?}; wrong: {wrong:?}, lost: {lost:?}", tally.right))
        });
    }

    pub fn stop(self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().unwrap();
        }
        Arc::into_inner(self.tally).unwrap().into_inner().unwrap()
    }
}

struct Client {
    random: fastrand::Rng,
    aggregated: Arc<Aggregated>,
    routers: Vec<Address>,
    tally: Arc<Mutex<Tally>>,
    strikes: Strikes,
}

impl Client {
    fn run(mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            self.once();
        }
    }

    fn once(&mut self) {
        let job = self.random.choice(self.aggregated.jobs()).cloned().unwrap();
        let manner = match self.random.u32(0..10) {
            0..3 => Manner::Whole,
            3..8 => Manner::Stream,
            _ => Manner::Leave(self.random.usize(1..=job.events)),
        };
        let first = Instant::now();
        let mut reconnects = 0_u64;
        loop {
            let router = self.random.choice(&self.routers).cloned().unwrap();
            let life = router.killed.load(Ordering::SeqCst);
            let began = Instant::now();
            let outcome = ask(&router.url, &job, manner);
            if matches!(outcome, Outcome::Broken(_)) {
                // The count of interruptions may change a moment after the connection breaks.
                std::thread::sleep(AGAIN);
            }
            let kinds = self.kinds_since(first);
            let difference = self.aggregated.difference(&job, &outcome);
            let mut tally = self.tally.lock().unwrap();
            let mut during = |count: fn(&mut During) -> &mut u64| {
                kinds.iter().for_each(|kind| *count(tally.during.entry(kind).or_default()) += 1);
            };
            if let Some(difference) = difference {
                during(|during| &mut during.wrong);
                tally.wrong.push(format!("{manner:?} of {}: {difference}", job.kind));
                return;
            }
            match outcome {
                Outcome::Answer(_) => {
                    during(|during| &mut during.right);
                    if reconnects > 0 {
                        during(|during| &mut during.reconnected);
                    }
                    tally.right += 1;
                    tally.reconnected += u64::from(reconnects > 0);
                    *tally.kinds.entry(job.kind).or_default() += 1;
                    return;
                }
                Outcome::Left(_) => {
                    tally.left += 1;
                    return;
                }
                // A broken connection is excused when the router was killed or cut off meanwhile, or when it does not listen yet.
                Outcome::Broken(why) => {
                    let refused = why.contains("refused");
                    let unreachable = life % 2 == 1;
                    let same = router.killed.load(Ordering::SeqCst) == life;
                    if same && !refused && !unreachable || reconnects > 600 {
                        during(|during| &mut during.lost);
                        let after = began.elapsed();
                        tally.lost.push(format!(
                            "{manner:?} of {} at {} after {after:?}, life {life}: {why}",
                            job.kind, router.url
                        ));
                        return;
                    }
                    reconnects += 1;
                }
                Outcome::Refused(why) => {
                    during(|during| &mut during.lost);
                    tally.lost.push(format!("{manner:?} of {} at {}: {why}", job.kind, router.url));
                    return;
                }
            }
        }
    }

    /// The kinds of faults that lasted at some time since `then`.
    fn kinds_since(&self, then: Instant) -> BTreeSet<&'static str> {
        let strikes = self.strikes.lock().unwrap();
        strikes.iter().rev().filter(|(_, end, _)| *end > then).map(|(.., kind)| *kind).collect()
    }
}

//! Clients that ask without a pause, and what they found.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use host_tests::wait::until;

use crate::jobs::{Job, Manner, Outcome, ask};

/// A router, as clients know it: its address, and which life it lives.
#[derive(Clone, Debug)]
pub struct Address {
    pub url: String,
    /// Counted up before the router is killed, and when it is dead.
    pub killed: Arc<AtomicU64>,
}

/// What clients found.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub right: u64,
    pub reconnected: u64,
    pub left: u64,
    pub wrong: Vec<String>,
    pub lost: Vec<String>,
}

/// Clients under way.
pub struct Load {
    stop: Arc<AtomicBool>,
    tally: Arc<Mutex<Tally>>,
    clients: Vec<JoinHandle<()>>,
}

/// Wait before a client whose connection was refused asks another router.
const AGAIN: Duration = Duration::from_millis(100);

impl Load {
    pub fn start(jobs: &[Job], routers: &[Address], clients: u32, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let clients = (0..clients)
            .map(|client| {
                let client = Client {
                    random: fastrand::Rng::with_seed(seed.wrapping_mul(1000).wrapping_add(client.into())),
                    jobs: jobs.to_vec(),
                    routers: routers.to_vec(),
                    tally: Arc::clone(&tally),
                };
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || client.run(&stop))
            })
            .collect();
        Self { stop, tally, clients }
    }

    pub fn wait_for_answers(&self, count: u64) {
        until("answers", || {
            let right = self.tally.lock().unwrap().right;
            if right >= count { Ok(()) } else { Err(right) }
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
    jobs: Vec<Job>,
    routers: Vec<Address>,
    tally: Arc<Mutex<Tally>>,
}

impl Client {
    fn run(mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            self.once();
        }
    }

    fn once(&mut self) {
        let job = self.random.choice(&self.jobs).cloned().unwrap();
        let manner = match self.random.u32(0..10) {
            0..3 => Manner::Whole,
            3..8 => Manner::Stream,
            _ => Manner::Leave(self.random.usize(1..=job.count as usize)),
        };
        let mut reconnects = 0_u64;
        loop {
            let router = self.random.choice(&self.routers).cloned().unwrap();
            let life = router.killed.load(Ordering::SeqCst);
            let began = std::time::Instant::now();
            let outcome = ask(&router.url, &job, manner);
            if matches!(outcome, Outcome::Broken(_)) {
                // The killer counts a moment later than the connection breaks.
                std::thread::sleep(AGAIN);
            }
            let mut tally = self.tally.lock().unwrap();
            match outcome {
                Outcome::Answer(tokens) if tokens == job.right => {
                    tally.right += 1;
                    tally.reconnected += u64::from(reconnects > 0);
                    return;
                }
                Outcome::Answer(tokens) => {
                    let at = tokens.iter().zip(&job.right).take_while(|(one, other)| one == other).count();
                    let (got, wanted) = (tokens.len(), job.right.len());
                    let prompt = job.prompt.len();
                    tally.wrong.push(format!(
                        "{manner:?} of {prompt} tokens differs from token {at} on, {got} of {wanted}"
                    ));
                    return;
                }
                Outcome::Left => {
                    tally.left += 1;
                    return;
                }
                // A router that was killed has nothing to say; until it is there again, nothing listens.
                Outcome::Broken(why) => {
                    let refused = why.contains("refused");
                    if router.killed.load(Ordering::SeqCst) == life && !refused || reconnects > 600 {
                        let after = began.elapsed();
                        tally.lost.push(format!(
                            "{manner:?} at {} after {after:?}, life {life}: {why}",
                            router.url
                        ));
                        return;
                    }
                    reconnects += 1;
                }
                Outcome::Refused(why) => {
                    tally.lost.push(format!("{manner:?} at {}: {why}", router.url));
                    return;
                }
            }
        }
    }
}

//! Clients that send requests without a pause, and a tally of the answers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use host_tests::mixed_load::{Aggregated, Manner, Outcome, ask};
use host_tests::wait::until;

/// Counts of answers, and a line for each that was wrong or lost.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    right: u64,
    /// Those of `right` that an ending router refused and its successor answered.
    moved: u64,
    wrong: Vec<String>,
    lost: Vec<String>,
}

impl Tally {
    /// Prints the tally. True when a request was lost or an answer was wrong.
    pub fn print(&self, lasted: Duration) -> bool {
        let (wrong, lost) = (self.wrong.len(), self.lost.len());
        println!("\n| Answers, equal | Of them refused by a router that ends | Wrong | Lost | Time |");
        println!("| ---: | ---: | ---: | ---: | ---: |");
        println!("| {} | {} | {wrong} | {lost} | {:.0} s |", self.right, self.moved, lasted.as_secs_f64());
        for (what, found) in [("wrong", &self.wrong), ("lost", &self.lost)] {
            found.iter().take(10).for_each(|one| println!("{what}: {one}"));
        }
        wrong + lost > 0
    }
}

/// The router to which clients send requests, and how often that has changed: the part of a load balancer.
#[derive(Clone, Debug)]
struct Target {
    url: String,
    moves: u64,
}

/// Clients that run.
pub struct Load {
    stop: Arc<AtomicBool>,
    target: Arc<Mutex<Target>>,
    tally: Arc<Mutex<Tally>>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    pub fn start(aggregated: &Arc<Aggregated>, url: &str, clients: u32, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let target = Arc::new(Mutex::new(Target { url: url.to_owned(), moves: 0 }));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let clients = (0..clients)
            .map(|client| {
                let client = Client {
                    random: fastrand::Rng::with_seed(seed.wrapping_mul(1000).wrapping_add(client.into())),
                    aggregated: Arc::clone(aggregated),
                    target: Arc::clone(&target),
                    tally: Arc::clone(&tally),
                };
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || client.run(&stop))
            })
            .collect();
        Self { stop, target, tally, clients }
    }

    /// Sends new requests to another router.
    pub fn moves_to(&self, url: &str) {
        let mut target = self.target.lock().unwrap();
        target.url = url.to_owned();
        target.moves += 1;
    }

    /// Waits until so many more requests have ended.
    pub fn wait_for_answers(&self, count: u64) {
        let ended = || {
            let tally = self.tally.lock().unwrap();
            tally.right + (tally.wrong.len() + tally.lost.len()) as u64
        };
        let before = ended();
        until("answers", || if ended() >= before + count { Ok(()) } else { Err(ended() - before) });
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
    target: Arc<Mutex<Target>>,
    tally: Arc<Mutex<Tally>>,
}

impl Client {
    fn run(mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            self.once();
        }
    }

    fn once(&mut self) {
        let job = self.random.choice(self.aggregated.jobs()).unwrap();
        let manner = if self.random.bool() { Manner::Whole } else { Manner::Stream };
        let mut moved = 0;
        loop {
            let target = self.target.lock().unwrap().clone();
            let outcome = ask(&target.url, job, manner);
            let has_moved = self.target.lock().unwrap().moves > target.moves;
            let difference = self.aggregated.difference(job, &outcome);
            let mut tally = self.tally.lock().unwrap();
            if let Some(difference) = difference {
                tally.wrong.push(format!("{manner:?} of {}: {difference}", job.kind));
                return;
            }
            match outcome {
                Outcome::Answer(_) => {
                    tally.right += 1;
                    tally.moved += moved;
                    return;
                }
                // The request was on its way when the router began to end. Requests that had begun before are answered.
                Outcome::Broken(why) if has_moved && moved == 0 && why.contains("Connection refused") => {
                    moved = 1
                }
                Outcome::Refused(why) if has_moved && moved == 0 && why.starts_with("503") => moved = 1,
                Outcome::Broken(why) | Outcome::Refused(why) => {
                    tally.lost.push(format!("{manner:?} of {} at {}: {why}", job.kind, target.url));
                    return;
                }
                Outcome::Left(_) => return,
            }
        }
    }
}

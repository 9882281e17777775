//! Clients behind the router: each request is tried again as the live router does, and each token is checked.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use host_core::radix::CacheEvent;
use host_core::request::FailureCode;
use host_core::routing::{Answer, Choice, Retry, Tries};
use host_core::{Role, Room, Time};
use host_sim::{Ask, Clients, Ending, Kv, OpenRequest, Random};

use super::scene::{Arrival, Scene, turn};
use crate::cluster::{Policy, Role as Kind};
use crate::router::{Router, Wanted, chain_seed, names};

/// The longest time from the router to a worker.
const HOP: Duration = Duration::from_millis(300);
/// The longest time after its deadline at which a request may end, because the router is never late.
const SLACK: Duration = Duration::from_millis(1);

/// How requests ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// With their answer.
    pub answered: u64,
    /// With a reason.
    pub refused: u64,
    /// Because their clients left.
    pub left: u64,
    /// Tries of all requests.
    pub tries: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.answered += other.answered;
        self.refused += other.refused;
        self.left += other.left;
        self.tries += other.tries;
    }
}

/// One request, over all its tries.
struct Job {
    answer: Answer<Vec<u32>>,
    /// The right answer.
    expected: Vec<u32>,
    tries: Tries<Time>,
    /// Workers that took part in a try which failed.
    failed: Vec<usize>,
    /// The request must have ended by then.
    deadline: Time,
    /// When its client leaves.
    leaves: Option<Time>,
    turns: u32,
    must: bool,
    seed: u64,
}

pub(super) struct Jobs {
    kv: Kv,
    retry: Retry,
    router: Router,
    /// Open requests, by the number of their current try.
    open: BTreeMap<u64, Job>,
    tally: Tally,
}

impl Jobs {
    pub fn new(scene: &Scene) -> Self {
        let mut router = Router::new(Policy::Prefix, scene.kv.page_tokens as u32);
        for (config, _) in &scene.workers {
            let kind = match config.role {
                Role::Prefill => Kind::Prefill,
                Role::Decode => Kind::Decode,
                Role::Aggregated => Kind::Aggregated,
            };
            router.add(kind, config.pages, config.cache_events);
        }
        let retry = Retry { longest: Duration::from_secs(120), ..Retry::default() };
        Self { kv: scene.kv, retry, router, open: BTreeMap::new(), tally: Tally::default() }
    }

    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// A client's first request.
    pub fn arrive(&mut self, now: Time, arrival: &Arrival) -> Ask {
        let (prompt, count) = (arrival.prompt.clone(), arrival.count);
        let leaves = arrival.leaves.map(|wait| now.after(wait));
        let job = self.job(now, prompt, count);
        self.try_it(
            now,
            Duration::ZERO,
            Job { leaves, turns: arrival.turns, must: arrival.must, seed: arrival.seed, ..job },
        )
    }

    fn job(&self, now: Time, prompt: Vec<u32>, count: u32) -> Job {
        let expected = self.kv.answer_to(&prompt, count as usize);
        let mut answer = Answer::new(prompt);
        answer.limit(count);
        Job {
            answer,
            expected,
            tries: Tries::default(),
            failed: Vec::new(),
            deadline: now.after(self.retry.longest),
            leaves: None,
            turns: 0,
            must: false,
            seed: 0,
        }
    }

    /// Begins a try after a wait.
    fn try_it(&mut self, now: Time, wait: Duration, mut job: Job) -> Ask {
        self.tally.tries += 1;
        let number = self.tally.tries;
        job.tries.begin(now.after(wait));
        let prompt = job.answer.prompt().clone();
        let keys = names::chain(chain_seed(), &prompt, self.kv.page_tokens);
        let wanted =
            Wanted { room: Room(number), tokens: prompt.len() as u64, keys, avoid: job.failed.clone() };
        let Choice { prefill, answers } = self.router.route(now, wanted);
        let mut request = host_sim::request(number, &prompt, job.answer.left());
        // The seed holds the number of the try, because the world draws the room.
        request.sampling.seed = number;
        let ends = job.leaves.map_or(job.deadline, |leaves| leaves.min(job.deadline));
        let legs = mixed(number);
        let hop = |leg: usize| wait + HOP.mul_f64(legs[leg]);
        self.open.insert(number, job);
        Ask {
            request,
            answers: (answers, hop(0)),
            prefill: prefill.map(|place| (place, hop(1))),
            leaves: Some(ends.since(now)),
        }
    }

    /// Handles a failed try. Returns the next try, if there is one.
    fn failed(&mut self, now: Time, mut job: Job, ending: &Ending) -> Option<Ask> {
        let (places, retryable, apart, why) = match ending {
            Ending::Complete => return None,
            Ending::Left if job.leaves.is_some_and(|leaves| leaves <= now) => {
                self.tally.left += 1;
                return None;
            }
            Ending::Left => (Vec::new(), false, false, "the request took too long".to_owned()),
            Ending::Failed { place, failure } => {
                let apart = failure.code == FailureCode::PeerRefused;
                (vec![*place], failure.retryable, apart, failure.message.clone())
            }
            Ending::Lost { place } => (vec![*place], true, false, "a worker was lost".to_owned()),
        };
        if job.answer.left() == 0 {
            // The answer has its last token already.
            return self.answered(now, job);
        }
        job.failed.extend(places);
        let wait = match (retryable, apart) {
            (false, _) => None,
            (true, true) => job.tries.after_apart(&self.retry, now),
            (true, false) => job.tries.after_loss(&self.retry, now, job.answer.brought(), false),
        };
        match wait.filter(|wait| now.after(*wait) < job.deadline) {
            Some(wait) => {
                job.answer.keep(|prompt| prompt);
                Some(self.try_it(now, wait, job))
            }
            None => {
                self.refuse(now, &job, &why);
                None
            }
        }
    }

    fn refuse(&mut self, now: Time, job: &Job, why: &str) {
        assert!(!why.is_empty(), "a request is refused without a reason");
        assert!(!job.must, "a request is refused when everything is well again: {why}");
        assert!(
            now <= job.deadline.after(SLACK),
            "a request ended {:?} after its deadline",
            now.since(job.deadline)
        );
        self.tally.refused += 1;
    }

    /// Handles a whole answer. Returns the turn that follows.
    fn answered(&mut self, now: Time, job: Job) -> Option<Ask> {
        assert_eq!(job.answer.left(), 0, "an answer ends before its last token");
        assert!(
            now <= job.deadline.after(SLACK),
            "an answer came {:?} after its deadline",
            now.since(job.deadline)
        );
        self.tally.answered += 1;
        let turns = job.turns.checked_sub(1)?;
        let said = [&job.answer.prompt()[..job.answer.given()], &job.expected].concat();
        let (prompt, count) = turn(&said, job.seed)?;
        let next = self.job(now, prompt, count);
        Some(self.try_it(now, Duration::ZERO, Job { turns, seed: job.seed.wrapping_add(1), ..next }))
    }

    /// Checks that every request has ended.
    pub fn check(&self) {
        assert!(self.open.is_empty(), "{} requests never ended", self.open.len());
    }

    fn number(open: &OpenRequest) -> u64 {
        open.request.sampling.seed
    }
}

/// Two random shares of a hop for the legs of a try, so that either leg may come first.
fn mixed(number: u64) -> [f64; 2] {
    let mut random = Random::new(number);
    [random.unit(), random.unit()]
}

impl Clients for Jobs {
    fn cache_changed(&mut self, place: usize, changes: &[CacheEvent]) {
        self.router.cache_changed(place, changes);
    }

    fn token(&mut self, _now: Time, open: &OpenRequest) -> bool {
        let number = Self::number(open);
        let (Some(job), Some(token)) = (self.open.get_mut(&number), open.tokens.last()) else { return true };
        job.tries.came_together();
        let place = job.answer.answered() as usize;
        assert!(job.answer.push(*token), "more tokens than the request asked for");
        assert_eq!(
            job.expected.get(place),
            Some(token),
            "token {place} of an answer is wrong, repeated or skipped"
        );
        self.router.computed(Room(number));
        true
    }

    fn ended(&mut self, now: Time, open: &OpenRequest, _complete: bool, _random: &mut Random) -> Vec<Ask> {
        let number = Self::number(open);
        self.router.ended(now, Room(number));
        let (Some(job), Some(ending)) = (self.open.remove(&number), &open.ending) else { return Vec::new() };
        let next = match ending {
            Ending::Complete => self.answered(now, job),
            ending => self.failed(now, job, ending),
        };
        next.into_iter().collect()
    }

    fn died(&mut self, _now: Time, place: usize, _random: &mut Random) -> Vec<Ask> {
        self.router.replaced(place);
        Vec::new()
    }
}

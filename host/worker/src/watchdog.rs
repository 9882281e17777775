//! Notices calls of plugins that do not return.
//!
//! If a thread of the worker hangs in a plugin, the worker still tells its routers that it is there, but answers no
//! request. Only the end of the process can end the call. So the program that is told of a [`Hung`] call ends, with every
//! connection and every registration of memory. Peers fence a worker that is gone, and its supervisor starts it again.
//!
//! [`Watchdog::look`] decides, and the program gives it the calls in progress and the time.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use host_core::Time;
use host_plugins::CallInProgress;
use parking_lot::Mutex;

/// Calls that may wait for others (open, register, connect, disconnect …) have this many times as long: they have deadlines of
/// their own, which operators set, and registering a large pool takes a while.
const WAITING: u32 = 10;
/// The number of looks within the bound, so that a call is noticed at most a tenth late.
const LOOKS: u32 = 10;
/// The longest pause between two looks.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A call that must not block is reported when it has taken so long. Contracts ask for microseconds, but a busy machine
/// may keep a thread waiting for a while.
const SLOW: Duration = Duration::from_secs(1);
/// As [`SLOW`], for a call that may wait for others.
const SLOW_TO_WAIT: Duration = Duration::from_secs(10);

/// As [`SLOW`], for calls that a peer waits for. The peer gives a handshake up after 5 s.
const SLOW_TO_MEET: Duration = Duration::from_secs(3);
const MEETING: [&str; 2] = ["connect", "disconnect"];

/// Calls that were slow, by plugin and call.
static SLOW_CALLS: Mutex<BTreeMap<(String, &'static str), u64>> = Mutex::new(BTreeMap::new());

fn count_slow(call: &CallInProgress) {
    *SLOW_CALLS.lock().entry((call.plugin.clone(), call.call)).or_default() += 1;
}

/// Calls of this process that were slow, by plugin and call.
pub(crate) fn slow_calls() -> Vec<((String, &'static str), u64)> {
    SLOW_CALLS.lock().iter().map(|(call, count)| (call.clone(), *count)).collect()
}

/// The age of the call that is in progress longest, in milliseconds, as of the last look.
static LONGEST: AtomicU64 = AtomicU64::new(0);

/// How long the plugin call that is in progress longest has taken so far, as of this process's last look.
pub(crate) fn longest() -> Duration {
    Duration::from_millis(LONGEST.load(Ordering::Relaxed))
}

/// A call that took longer than it may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hung {
    /// The call.
    pub call: CallInProgress,
    /// How long it has taken so far, as far as looks have seen it.
    pub age: Duration,
    /// How long it may take.
    pub bound: Duration,
}

impl fmt::Display for Hung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CallInProgress { plugin, call, thread, .. } = &self.call;
        write!(
            f,
            "plugin {plugin:?} has not returned from {call} for {:.1} s on thread {thread:?} ({:.1} s are allowed): this worker \
             ends, because only a new process is rid of the call; --plugin-call-timeout sets the bound",
            self.age.as_secs_f64(),
            self.bound.as_secs_f64()
        )
    }
}

/// A call that takes or took longer than the plugin API allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slow {
    /// The call.
    pub call: CallInProgress,
    /// How long it has taken so far, or took, as far as looks have seen it.
    pub age: Duration,
    /// Whether it has returned.
    pub returned: bool,
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CallInProgress { plugin, call, thread, peer, may_wait, .. } = &self.call;
        let took = if self.returned { "took" } else { "has taken" };
        write!(f, "plugin {plugin:?}: {call} {took} {:.1} s", self.age.as_secs_f64())?;
        if let Some(peer) = peer {
            write!(f, " for the peer {peer:?}")?;
        }
        if !self.returned {
            write!(f, " so far")?;
        }
        let rule = if *may_wait { "it may wait for others" } else { "the plugin API allows it no waiting" };
        write!(f, " on thread {thread:?}; {rule}, and this worker's requests wait with it")
    }
}

/// The result of a look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// The call that took longest beyond its bound, if any did.
    pub hung: Option<Hung>,
    /// Calls that have become slow since the look before, and slow ones that have come back.
    pub slow: Vec<Slow>,
}

/// Remembers how long each call is in progress.
#[derive(Debug)]
pub struct Watchdog {
    bound: Duration,
    last: Option<Time>,
    ages: HashMap<(u64, u64), Duration>,
    /// Slow calls that were reported.
    told: Vec<CallInProgress>,
}

impl Watchdog {
    /// A watchdog that lets calls take `bound`, and calls that may wait for others ten times as long.
    #[must_use]
    pub fn new(bound: Duration) -> Self {
        Self { bound, last: None, ages: HashMap::new(), told: Vec::new() }
    }

    /// The time between two looks.
    #[must_use]
    pub fn pause(&self) -> Duration {
        (self.bound / LOOKS).min(LONGEST_PAUSE)
    }

    /// Looks at the calls that are in progress now.
    ///
    /// A call is as old as the time since the look that saw it first. If a pause is much longer than it should be, only
    /// the planned pause counts: the whole process had stopped, and no call could have returned.
    pub fn look(&mut self, now: Time, calls: &[CallInProgress]) -> Looked {
        let passed = self.last.map_or(Duration::ZERO, |last| now.0.saturating_sub(last.0));
        let passed = if passed > self.pause() * 3 { self.pause() } else { passed };
        self.last = Some(now);
        let mut slow = Vec::new();
        for call in self.told.extract_if(.., |told| calls.iter().all(|call| call.id != told.id)) {
            let age = self.ages.get(&call.id).copied().unwrap_or_default() + passed;
            slow.push(Slow { call, age, returned: true });
        }
        let age = |call: &CallInProgress| self.ages.get(&call.id).map_or(Duration::ZERO, |age| *age + passed);
        self.ages = calls.iter().map(|call| (call.id, age(call))).collect();
        let longest = self.ages.values().max().copied().unwrap_or_default();
        LONGEST.store(u64::try_from(longest.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        let mut hung: Option<Hung> = None;
        for call in calls {
            let age = self.ages.get(&call.id).copied().unwrap_or_default();
            let bound = self.bound_of(call);
            if age >= bound && hung.as_ref().is_none_or(|hung| hung.age <= age) {
                hung = Some(Hung { call: call.clone(), age, bound });
            }
            let allowed = match call.may_wait {
                false => SLOW,
                true if MEETING.contains(&call.call) => SLOW_TO_MEET,
                true => SLOW_TO_WAIT,
            };
            if age >= allowed && self.told.iter().all(|told| told.id != call.id) {
                count_slow(call);
                slow.push(Slow { call: call.clone(), age, returned: false });
                self.told.push(call.clone());
            }
        }
        Looked { hung, slow }
    }

    fn bound_of(&self, call: &CallInProgress) -> Duration {
        if call.may_wait { self.bound.saturating_mul(WAITING) } else { self.bound }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(10);

    fn call(thread: u64, number: u64, call: &'static str, may_wait: bool) -> CallInProgress {
        let (thread_name, plugin) = (format!("transfer-{thread}"), "shm".to_owned());
        CallInProgress { id: (thread, number), thread: thread_name, plugin, call, may_wait, peer: None }
    }

    fn at(seconds: u64) -> Time {
        Time(Duration::from_secs(seconds))
    }

    #[test]
    fn a_call_is_hung_when_looks_over_the_whole_bound_have_found_the_same() {
        let mut watchdog = Watchdog::new(BOUND);
        assert_eq!(watchdog.pause(), Duration::from_secs(1));
        let (stuck, other) = (call(1, 7, "submit", false), |number| call(2, number, "poll", false));
        for second in 0..10 {
            // The other thread is in a call at every look, each time in another.
            assert_eq!(
                watchdog.look(at(second), &[stuck.clone(), other(second)]).hung,
                None,
                "second {second}"
            );
        }
        let hung = watchdog.look(at(10), &[other(10), stuck.clone()]).hung.unwrap();
        assert_eq!((&hung.call, hung.age, hung.bound), (&stuck, BOUND, BOUND));
        let said = hung.to_string();
        assert!(said.contains("plugin \"shm\" has not returned from submit for 10.0 s"), "{said}");
        assert!(said.contains("thread \"transfer-1\"") && said.contains("--plugin-call-timeout"), "{said}");
    }

    #[test]
    fn a_call_that_returned_between_two_looks_is_another() {
        let mut watchdog = Watchdog::new(BOUND);
        for second in 0..100 {
            let again = call(1, second / 9, "put", false);
            assert_eq!(watchdog.look(at(second), &[again]).hung, None, "second {second}");
        }
    }

    #[test]
    fn calls_that_wait_for_others_have_ten_times_as_long() {
        let mut watchdog = Watchdog::new(BOUND);
        let connect = call(1, 1, "connect", true);
        for second in 0..100 {
            assert_eq!(
                watchdog.look(at(second), std::slice::from_ref(&connect)).hung,
                None,
                "second {second}"
            );
        }
        assert_eq!(watchdog.look(at(100), &[connect]).hung.unwrap().bound, BOUND * 10);
    }

    #[test]
    fn time_in_which_the_process_stood_still_does_not_count() {
        let mut watchdog = Watchdog::new(BOUND);
        let stuck = call(1, 1, "poll", false);
        let mut look = |second| watchdog.look(at(second), std::slice::from_ref(&stuck)).hung;
        assert_eq!(look(0), None);
        // Stopped for an hour: as if for one pause.
        assert_eq!(look(3600), None);
        for second in 1..9 {
            assert_eq!(look(3600 + second), None, "second {second} after it went on");
        }
        assert_eq!(look(3609).unwrap().age, BOUND);
    }

    #[test]
    fn of_two_that_hang_the_older_one_is_named() {
        let mut watchdog = Watchdog::new(BOUND);
        let (old, young) = (call(1, 1, "poll", false), call(2, 1, "put", false));
        assert_eq!(watchdog.look(at(0), std::slice::from_ref(&old)).hung, None);
        for second in 1..10 {
            assert_eq!(watchdog.look(at(second), &[young.clone(), old.clone()]).hung, None);
        }
        assert_eq!(watchdog.look(at(11), &[young, old.clone()]).hung.unwrap().call, old);
    }

    #[test]
    fn a_slow_call_is_told_once_while_it_lasts_and_once_when_it_has_returned() {
        let mut watchdog = Watchdog::new(BOUND);
        let mut submit = call(1, 1, "submit", false);
        submit.peer = Some("decode-1".to_owned());
        let mut told = Vec::new();
        for second in 0..5 {
            told.extend(watchdog.look(at(second), std::slice::from_ref(&submit)).slow);
        }
        assert_eq!((told.len(), told[0].age, told[0].returned), (1, Duration::from_secs(1), false));
        let said = told[0].to_string();
        assert!(said.contains("\"shm\": submit has taken 1.0 s for the peer \"decode-1\" so far"), "{said}");
        let after = watchdog.look(at(5), &[]).slow;
        assert_eq!((after.len(), after[0].age, after[0].returned), (1, Duration::from_secs(5), true));
        assert!(after[0].to_string().contains("submit took 5.0 s"), "{}", after[0]);
        assert_eq!(watchdog.look(at(6), &[]).slow, []);
        // Other tests add to the same counters.
        assert!(
            slow_calls()
                .iter()
                .any(|((plugin, call), count)| plugin == "shm" && *call == "submit" && *count > 0)
        );
    }

    #[test]
    fn a_call_that_may_wait_is_slow_later() {
        for (name, seconds) in [("register", 10), ("connect", 3)] {
            let mut watchdog = Watchdog::new(BOUND);
            let of = call(seconds, 1, name, true);
            let mut slow = |second| watchdog.look(at(second), std::slice::from_ref(&of)).slow;
            assert!((0..seconds).all(|second| slow(second).is_empty()), "{name}");
            assert_eq!(slow(seconds).len(), 1, "{name}");
        }
    }
}

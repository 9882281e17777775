//! Records for each thread which call of which plugin it is in.
//!
//! A call that does not return blocks its thread until the process ends. The host cannot end the call, but it can notice it. Before
//! a call the thread stores a note in one atomic word, and after the call it takes the note back. [`in_progress`] reads the notes
//! of all threads. Notes need no clock: each has a number. Two readings with the same number saw the same call, which lasted at
//! least the time between them.
//!
//! [`timings`] has the durations of calls: of each call that may wait for others, and of one in [`SAMPLE`] of the hot calls, which
//! take less time than reading the clock.
//!
//! A plugin's `shutdown` has no note. It has a deadline of its own ([`Running`](super::Running)).

use std::cell::Cell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use host_plugin_api::ErrorCode;
use parking_lot::Mutex;

/// Bits of a note that name the call, and bits that name the plugin. The other bits number the thread's calls.
const CALL_BITS: u32 = 8;
const PLUGIN_BITS: u32 = 16;
const NUMBERS: u64 = u64::MAX >> (CALL_BITS + PLUGIN_BITS);

/// Of the calls that must not block, one in `SAMPLE` is timed.
///
/// It is a prime, so that a loop of a few calls does not always time the same one.
pub const SAMPLE: u64 = 61;

/// Upper bounds of the buckets of durations, in nanoseconds. One more bucket takes longer durations.
const BOUNDS_NS: [u64; 8] =
    [1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000, 10_000_000_000];

macro_rules! calls {
    ($($call:ident $name:literal $may_wait:literal)*) => {
        /// The calls that a plugin can get.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Call { $($call),* }

        /// Each call's name, and whether it may wait for others: peers, devices, servers.
        const CALLS: &[(&str, bool)] = &[$(($name, $may_wait)),*];
    };
}

calls! {
    Open "open" true
    Limits "limits" false
    Register "register" true
    Deregister "deregister" true
    Endpoint "endpoint" true
    Connect "connect" true
    Disconnect "disconnect" true
    Submit "submit" false
    Poll "poll" false
    Notifications "notifications" false
    Cancel "cancel" false
    Settled "settled" false
    EventFd "event_fd" false
    Exists "exists" false
    Get "get" false
    Put "put" false
    Delete "delete" false
    Scan "scan" true
    Usage "usage" true
    Components "components" false
    Alloc "alloc" false
    Free "free" false
}

/// How long one kind of call of one plugin took.
#[derive(Default)]
struct Times {
    buckets: [AtomicU64; BOUNDS_NS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Times {
    fn add(&self, took: Duration) {
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_NS.partition_point(|bound| *bound < nanoseconds);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

/// A plugin's name, and its times for each call.
type Plugin = (String, &'static [Times]);

/// The plugins. Notes refer to a plugin by its index here.
static PLUGINS: Mutex<Vec<Plugin>> = Mutex::new(Vec::new());

/// Names of peers, by the instance and the peer's id.
static PEERS: Mutex<BTreeMap<u64, String>> = Mutex::new(BTreeMap::new());

/// The notes of all threads that have called plugins.
static THREADS: Mutex<Vec<Arc<Thread>>> = Mutex::new(Vec::new());

static LAST_THREAD: AtomicU64 = AtomicU64::new(0);

/// The part of a thread's state that other threads read.
struct Thread {
    /// A number of this process. The system's thread ids would be used again.
    number: u64,
    name: String,
    /// The current note, or 0 outside of calls.
    note: AtomicU64,
    /// The key in [`PEERS`] of the peer that the call is about, or 0 without a peer.
    about: AtomicU64,
}

/// The state of the current thread.
struct Own {
    thread: Arc<Thread>,
    /// Calls so far.
    calls: Cell<u64>,
}

impl Own {
    fn new() -> Self {
        let number = LAST_THREAD.fetch_add(1, Ordering::Relaxed) + 1;
        let name = std::thread::current().name().unwrap_or("unnamed").to_owned();
        let thread = Arc::new(Thread { number, name, note: AtomicU64::new(0), about: AtomicU64::new(0) });
        THREADS.lock().push(thread.clone());
        Self { thread, calls: Cell::new(0) }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        THREADS.lock().retain(|thread| !Arc::ptr_eq(thread, &self.thread));
    }
}

thread_local! {
    static OWN: Own = Own::new();
}

/// A plugin that threads can call.
#[derive(Clone, Copy)]
pub(crate) struct Called {
    place: u16,
    times: &'static [Times],
}

/// The peers of one instance.
#[derive(Debug)]
pub(crate) struct Peers(u64);

impl Peers {
    /// Makes the list for a new instance.
    pub(crate) fn new() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self((LAST.fetch_add(1, Ordering::Relaxed) + 1) << u32::BITS)
    }

    /// Names the peer that has this id from now on.
    pub(crate) fn add(&self, peer: u32, name: &str) {
        PEERS.lock().insert(self.of(peer), name.to_owned());
    }

    /// Forgets the peer.
    pub(crate) fn remove(&self, peer: u32) {
        PEERS.lock().remove(&self.of(peer));
    }

    /// A name for the peer that a call connects to, which has no id yet, until the call is over.
    pub(crate) fn connecting(&self, name: &str) -> Connecting {
        static LAST: AtomicU64 = AtomicU64::new(0);
        // These keys differ from those of connected peers, because instances are numbered from 1.
        let about = (LAST.fetch_add(1, Ordering::Relaxed) & u64::from(u32::MAX)) + 1;
        PEERS.lock().insert(about, name.to_owned());
        Connecting(about)
    }

    #[inline]
    fn of(&self, peer: u32) -> u64 {
        self.0 | u64::from(peer)
    }
}

/// A connection attempt. Dropping it removes the peer's name.
pub(crate) struct Connecting(u64);

impl Drop for Connecting {
    fn drop(&mut self) {
        PEERS.lock().remove(&self.0);
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        PEERS.lock().retain(|peer, _name| peer >> u32::BITS != self.0 >> u32::BITS);
    }
}

impl Called {
    /// The plugin of this name.
    pub(crate) fn plugin(name: &str) -> Self {
        let mut plugins = PLUGINS.lock();
        let place = plugins.iter().position(|(known, _times)| known == name).unwrap_or_else(|| {
            let times: Vec<Times> = CALLS.iter().map(|_call| Times::default()).collect();
            plugins.push((name.to_owned(), Vec::leak(times)));
            plugins.len() - 1
        });
        let times = plugins.get(place).map_or(&[][..], |(_name, times)| times);
        // Indices do not fit into notes beyond 65,535 plugins. Calls of later plugins are noted with a wrong name.
        Self { place: u16::try_from(place).unwrap_or(u16::MAX), times }
    }

    /// As [`enter`](Self::enter), into a call about this peer.
    #[inline]
    pub(crate) fn enter_about(self, call: Call, peers: &Peers, peer: u32) -> Note {
        self.note(call, peers.of(peer))
    }

    /// As [`enter`](Self::enter), into a call that connects to this peer.
    pub(crate) fn enter_connecting(self, peer: &Connecting) -> Note {
        self.note(Call::Connect, peer.0)
    }

    /// Checks the count that a call returned. Returns `INTERNAL` if the count is larger than the caller's slice, else the answer.
    #[inline]
    pub(crate) fn counted(self, call: Call, answer: i32, room: usize) -> i32 {
        if answer > 0 && answer as usize > room { self.claims_too_many(call, answer, room) } else { answer }
    }

    #[cold]
    fn claims_too_many(self, call: Call, answer: i32, room: usize) -> i32 {
        let plugins = PLUGINS.lock();
        let plugin = plugins.get(usize::from(self.place)).map_or("", |(name, _times)| name.as_str());
        let method = CALLS.get(call as usize).map_or("", |(name, _may_wait)| name);
        tracing::error!(
            "plugin {plugin:?}: {method} claims {answer} entries, and there was room for {room}: the answer counts as INTERNAL ({})",
            ErrorCode::INTERNAL.0
        );
        ErrorCode::INTERNAL.0
    }

    /// Notes that this thread goes into a call. Dropping the note ends it.
    #[inline]
    pub(crate) fn enter(self, call: Call) -> Note {
        self.note(call, 0)
    }

    #[inline]
    #[expect(clippy::disallowed_methods, reason = "it is measured, and nothing is decided by it")]
    fn note(self, call: Call, about: u64) -> Note {
        // A thread that is ending has lost its `OWN` and makes no note.
        let noted = OWN.try_with(|own| {
            let number = own.calls.get().wrapping_add(1) & NUMBERS;
            own.calls.set(number);
            let code = u64::from(call as u8) + 1;
            let note = (number << (CALL_BITS + PLUGIN_BITS)) | (u64::from(self.place) << CALL_BITS) | code;
            // Relaxed is enough: only this thread writes its note.
            let outer = (own.thread.note.load(Ordering::Relaxed), own.thread.about.load(Ordering::Relaxed));
            own.thread.about.store(about, Ordering::Relaxed);
            own.thread.note.store(note, Ordering::Relaxed);
            (outer, number)
        });
        let (outer, number) = noted.unwrap_or(((0, 0), 1));
        let is_timed =
            number % SAMPLE == 0 || CALLS.get(call as usize).is_some_and(|(_name, may_wait)| *may_wait);
        let times = if is_timed { self.times.get(call as usize) } else { None };
        Note { outer, timed: times.map(|times| (Instant::now(), times)), here: PhantomData }
    }
}

/// A thread is in a call as long as this lives.
#[must_use]
pub(crate) struct Note {
    /// The note and the peer of the outer call, if this plugin is built on another plugin that made the call.
    outer: (u64, u64),
    /// When the call began, if it is timed.
    timed: Option<(Instant, &'static Times)>,
    /// Keeps the note on the thread that made it: not `Send`.
    here: PhantomData<*const ()>,
}

impl Drop for Note {
    #[inline]
    fn drop(&mut self) {
        let _ending = OWN
            .try_with(|own| {
                own.thread.note.store(self.outer.0, Ordering::Relaxed);
                own.thread.about.store(self.outer.1, Ordering::Relaxed);
            })
            .is_err();
        if let Some((since, times)) = &self.timed {
            times.add(since.elapsed());
        }
    }
}

/// A call that a thread is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallInProgress {
    /// The number of the thread and the number of the call. Two readings with the same id saw the same call.
    pub id: (u64, u64),
    /// The thread's name.
    pub thread: String,
    /// The plugin's name.
    pub plugin: String,
    /// The call's name in the plugin API. `open` is loading, checking the configuration and the factory.
    pub call: &'static str,
    /// Whether the call may wait for others: connecting waits for a peer, registering waits for the device.
    pub may_wait: bool,
    /// The name of the peer that it is about, if there is one.
    pub peer: Option<String>,
}

/// How long one kind of call of one plugin took.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// The plugin's name.
    pub plugin: String,
    /// The call's name.
    pub call: &'static str,
    /// For each bucket the upper bound in seconds (the last one is infinite) and the number of timed calls in it.
    pub buckets: Vec<(f64, u64)>,
    /// The sum of the durations of the timed calls.
    pub sum: Duration,
}

/// The times of all calls that were made and timed, see [`SAMPLE`].
#[must_use]
pub fn timings() -> Vec<Timing> {
    let plugins = PLUGINS.lock();
    let of = |(plugin, times): &Plugin, at: usize| {
        let times = times.get(at)?;
        let counts = times.buckets.each_ref().map(|count| count.load(Ordering::Relaxed));
        let bounds = BOUNDS_NS.iter().map(|bound| *bound as f64 / 1e9).chain([f64::INFINITY]);
        let sum = Duration::from_nanos(times.nanoseconds.load(Ordering::Relaxed));
        let (call, _may_wait) = CALLS.get(at)?;
        let timing = Timing { plugin: plugin.clone(), call, buckets: bounds.zip(counts).collect(), sum };
        (counts.iter().sum::<u64>() > 0).then_some(timing)
    };
    plugins.iter().flat_map(|plugin| (0..CALLS.len()).filter_map(move |at| of(plugin, at))).collect()
}

/// The calls that threads of this process are in now.
#[must_use]
pub fn in_progress() -> Vec<CallInProgress> {
    let plugins = PLUGINS.lock();
    let threads = THREADS.lock();
    let of = |thread: &Arc<Thread>| {
        let note = thread.note.load(Ordering::Relaxed);
        let call = usize::try_from(note & u64::from(u8::MAX)).ok()?.checked_sub(1)?;
        let (call, may_wait) = *CALLS.get(call)?;
        let about = thread.about.load(Ordering::Relaxed);
        let plugin = usize::try_from(note >> CALL_BITS & u64::from(u16::MAX)).ok()?;
        Some(CallInProgress {
            id: (thread.number, note >> (CALL_BITS + PLUGIN_BITS)),
            thread: thread.name.clone(),
            plugin: plugins.get(plugin).map(|(name, _times)| name.clone()).unwrap_or_default(),
            call,
            may_wait,
            peer: PEERS.lock().get(&about).cloned(),
        })
    };
    threads.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// Calls in progress of a plugin that this test alone has.
    fn of(plugin: &str) -> Vec<CallInProgress> {
        in_progress().into_iter().filter(|call| call.plugin == plugin).collect()
    }

    #[test]
    fn a_call_is_named_while_a_thread_is_in_it_and_another_has_another_number() {
        let called = Called::plugin("test-named");
        assert_eq!(of("test-named"), []);
        let outer = called.enter(Call::Connect);
        let first = of("test-named");
        assert_eq!((first[0].call, first[0].may_wait, first.len()), ("connect", true, 1));
        assert_eq!(of("test-named"), first, "the same call");
        {
            let _inner = Called::plugin("test-inner").enter(Call::Settled);
            assert_eq!((of("test-inner")[0].call, of("test-named").len()), ("settled", 0));
        }
        assert_eq!(of("test-named"), first, "the call around it goes on");
        drop(outer);
        assert_eq!(of("test-named"), []);
        let _again = called.enter(Call::Connect);
        assert_ne!(of("test-named")[0].id, first[0].id);
    }

    #[test]
    fn threads_are_told_apart_and_forgotten_when_they_end() {
        let (inside, is_inside) = channel();
        let (leave, may_leave) = channel::<()>();
        let thread = std::thread::Builder::new().name("test-thread".into()).spawn(move || {
            let _note = Called::plugin("test-threads").enter(Call::Put);
            inside.send(()).unwrap();
            may_leave.recv().unwrap_err();
        });
        is_inside.recv().unwrap();
        let found = of("test-threads");
        assert_eq!(
            (found[0].thread.as_str(), found[0].call, found[0].may_wait),
            ("test-thread", "put", false)
        );
        drop(leave);
        thread.unwrap().join().unwrap();
        assert_eq!(of("test-threads"), []);
        assert!(THREADS.lock().iter().all(|thread| thread.number != found[0].id.0));
    }

    #[test]
    fn a_call_about_a_peer_names_it_as_long_as_the_instance_has_it() {
        let (called, peers) = (Called::plugin("test-peers"), Peers::new());
        peers.add(7, "decode-1");
        let names = || of("test-peers").into_iter().map(|call| call.peer).collect::<Vec<_>>();
        {
            let _note = called.enter_about(Call::Submit, &peers, 7);
            assert_eq!(names(), [Some("decode-1".to_owned())]);
            drop(called.enter(Call::Poll));
            drop(called.enter_about(Call::Submit, &Peers::new(), 7));
            assert_eq!(names(), [Some("decode-1".to_owned())], "the call around them goes on");
        }
        let _poll = called.enter(Call::Poll);
        assert_eq!(names(), [None]);
        let about = called.enter_about(Call::Disconnect, &peers, 7);
        peers.remove(7);
        assert_eq!(names(), [None]);
        peers.add(8, "decode-2");
        drop((about, peers));
        assert!(PEERS.lock().values().all(|name| name != "decode-2"));
    }

    #[test]
    fn a_call_that_connects_names_the_peer_that_has_no_id_yet() {
        let (called, peers) = (Called::plugin("test-connecting"), Peers::new());
        let connecting = [peers.connecting("decode-3"), peers.connecting("decode-4")];
        let _outer = called.enter_connecting(&connecting[0]);
        {
            let _inner = called.enter_connecting(&connecting[1]);
            assert_eq!(of("test-connecting")[0].peer.as_deref(), Some("decode-4"));
        }
        assert_eq!(of("test-connecting")[0].peer.as_deref(), Some("decode-3"));
        drop(connecting);
        assert!(PEERS.lock().values().all(|name| name != "decode-3" && name != "decode-4"));
    }

    #[test]
    fn a_count_larger_than_the_room_is_a_code() {
        let called = Called::plugin("test-counts");
        let counted = [-3, 0, 64, 65].map(|answer| called.counted(Call::Poll, answer, 64));
        assert_eq!(counted, [-3, 0, 64, ErrorCode::INTERNAL.0]);
    }

    #[test]
    fn calls_that_may_wait_are_timed_and_hot_ones_now_and_then() {
        let called = Called::plugin("test-times");
        for _call in 0..2 * SAMPLE {
            drop(called.enter(Call::Poll));
        }
        drop(called.enter(Call::Connect));
        let timings: Vec<Timing> =
            timings().into_iter().filter(|timing| timing.plugin == "test-times").collect();
        let count = |call| {
            let of = timings.iter().find(|timing| timing.call == call);
            of.map_or(0, |timing| timing.buckets.iter().map(|(_bound, count)| count).sum())
        };
        assert_eq!((count("poll"), count("connect"), count("submit")), (2, 1, 0), "{timings:?}");
    }

    #[test]
    fn a_panic_takes_the_note_back() {
        let panicked = std::panic::catch_unwind(|| {
            let _note = Called::plugin("test-panics").enter(Call::Poll);
            panic!("on the way");
        });
        assert!(panicked.is_err());
        assert_eq!(of("test-panics"), []);
    }
}

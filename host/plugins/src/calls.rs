//! Which call of which plugin each thread is in.
//!
//! A call that never returns takes the thread with it, and nothing but the end of the process ends it. What the host can do is
//! notice. A thread notes a call in one word before it goes in, and takes the note back when it comes out;
//! [`in_progress`] reads the words of all threads. No clock is read on the way: every note has a number, so two looks that
//! find the same number have found the same call, and the time between them is part of what it took.
//!
//! A plugin's `shutdown` is not noted. It has a deadline of its own ([`Running`](super::Running)).

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Bits of a note for the call, and for the plugin; the others number the thread's calls.
const CALL_BITS: u32 = 8;
const PLUGIN_BITS: u32 = 16;
const NUMBERS: u64 = u64::MAX >> (CALL_BITS + PLUGIN_BITS);

macro_rules! calls {
    ($($call:ident $name:literal $may_wait:literal)*) => {
        /// What a plugin can be called for.
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
    Prepare "prepare" false
    Release "release" false
    Submit "submit" false
    Post "post" false
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
    Budgets "budgets" false
    Alloc "alloc" false
    Free "free" false
    Need "need" false
    Extend "extend" false
    ExtendTail "extend_tail" false
    Step "step" false
    FirstLive "first_live" false
}

/// Names of plugins, by their place in notes.
static PLUGINS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// What all threads that have called plugins note.
static THREADS: Mutex<Vec<Arc<Thread>>> = Mutex::new(Vec::new());

static LAST_THREAD: AtomicU64 = AtomicU64::new(0);

/// A thread, as others see it.
struct Thread {
    /// Not the system's, which are used again.
    number: u64,
    name: String,
    /// 0 while it is in no call.
    note: AtomicU64,
}

/// A thread, as it sees itself.
struct Own {
    thread: Arc<Thread>,
    /// Calls so far.
    calls: Cell<u64>,
}

impl Own {
    fn new() -> Self {
        let number = LAST_THREAD.fetch_add(1, Ordering::Relaxed) + 1;
        let name = std::thread::current().name().unwrap_or("unnamed").to_owned();
        let thread = Arc::new(Thread { number, name, note: AtomicU64::new(0) });
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

/// A plugin that is called.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Called(u16);

impl Called {
    /// The plugin of this name.
    pub(crate) fn plugin(name: &str) -> Self {
        let mut plugins = PLUGINS.lock();
        let place = plugins.iter().position(|known| known == name).unwrap_or_else(|| {
            plugins.push(name.to_owned());
            plugins.len() - 1
        });
        // A process that loads more plugins than can be told apart names the later ones wrongly, and notices them all the same.
        Self(u16::try_from(place).unwrap_or(u16::MAX))
    }

    /// Notes that this thread goes into a call. It comes out when the note is dropped.
    #[inline]
    pub(crate) fn enter(self, call: Call) -> Note {
        // A thread that is ending notes nothing.
        let outer = OWN.try_with(|own| {
            let number = own.calls.get().wrapping_add(1) & NUMBERS;
            own.calls.set(number);
            let call = u64::from(call as u8) + 1;
            let note = (number << (CALL_BITS + PLUGIN_BITS)) | (u64::from(self.0) << CALL_BITS) | call;
            // The thread alone writes it.
            let outer = own.thread.note.load(Ordering::Relaxed);
            own.thread.note.store(note, Ordering::Relaxed);
            outer
        });
        Note { outer: outer.unwrap_or(0), here: PhantomData }
    }
}

/// A thread is in a call as long as this lives.
#[must_use]
pub(crate) struct Note {
    /// The call around it, of a plugin that is built on another.
    outer: u64,
    /// It is the thread's own.
    here: PhantomData<*const ()>,
}

impl Drop for Note {
    #[inline]
    fn drop(&mut self) {
        let _ending = OWN.try_with(|own| own.thread.note.store(self.outer, Ordering::Relaxed)).is_err();
    }
}

/// A call that a thread is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallInProgress {
    /// Equal in two looks when the call is the same: the thread's number and the call's.
    pub id: (u64, u64),
    /// The thread's name.
    pub thread: String,
    /// The plugin's name.
    pub plugin: String,
    /// The call's name in the plugin API; `open` is loading, checking the configuration and the factory.
    pub call: &'static str,
    /// Whether it may wait for others, as a connection does for a peer and a registration for the device.
    pub may_wait: bool,
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
        let plugin = usize::try_from(note >> CALL_BITS & u64::from(u16::MAX)).ok()?;
        Some(CallInProgress {
            id: (thread.number, note >> (CALL_BITS + PLUGIN_BITS)),
            thread: thread.name.clone(),
            plugin: plugins.get(plugin).cloned().unwrap_or_default(),
            call,
            may_wait,
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
            let _inner = Called::plugin("test-inner").enter(Call::FirstLive);
            assert_eq!((of("test-inner")[0].call, of("test-named").len()), ("first_live", 0));
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
    fn a_panic_takes_the_note_back() {
        let panicked = std::panic::catch_unwind(|| {
            let _note = Called::plugin("test-panics").enter(Call::Poll);
            panic!("on the way");
        });
        assert!(panicked.is_err());
        assert_eq!(of("test-panics"), []);
    }
}

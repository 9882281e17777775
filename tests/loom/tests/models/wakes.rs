//! Wake-ups of the host's threads by plugins.

use host_loom::services::event::Event;
use host_loom::services::waker;
use host_loom::services::waker::Waker;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::model::every_order;

/// A waker, and its descriptor.
fn new() -> (Arc<Waker>, Event) {
    let event = Event::new().unwrap();
    (Arc::new(waker(event.clone())), event)
}

/// Waits as a thread of the host does: clears the event, checks its work, and sleeps until the event is readable.
fn wait_for((waker, event): &(Arc<Waker>, Event), made: &AtomicU64, all: u64) {
    loop {
        waker.clear();
        if made.load(Ordering::Relaxed) == all {
            return;
        }
        // A wake that is lost leaves this thread here for ever, which loom reports.
        while !event.is_readable() {
            thread::yield_now();
        }
    }
}

/// A clear leaves the event quiet when no wake is left. Otherwise the thread would never sleep again.
fn is_quiet_after_a_clear((waker, event): &(Arc<Waker>, Event)) {
    waker.clear();
    assert!(!event.is_readable());
}

#[test]
fn no_wake_is_lost_however_it_meets_a_clear() {
    every_order(|| {
        let (host, made) = (new(), Arc::new(AtomicU64::new(0)));
        let plugin = {
            let (waker, made) = (host.0.clone(), made.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    made.fetch_add(1, Ordering::Relaxed);
                    waker.wake();
                }
            })
        };
        wait_for(&host, &made, 2);
        plugin.join().unwrap();
        is_quiet_after_a_clear(&host);
    });
}

#[test]
fn wakes_of_two_threads_are_both_heard() {
    every_order(|| {
        let (host, made) = (new(), Arc::new(AtomicU64::new(0)));
        let plugins: Vec<_> = (0..2)
            .map(|_| {
                let (waker, made) = (host.0.clone(), made.clone());
                thread::spawn(move || {
                    made.fetch_add(1, Ordering::Relaxed);
                    waker.wake();
                })
            })
            .collect();
        wait_for(&host, &made, 2);
        plugins.into_iter().for_each(|plugin| plugin.join().unwrap());
        is_quiet_after_a_clear(&host);
    });
}

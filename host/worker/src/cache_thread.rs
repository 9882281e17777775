//! The thread that names cached pages for routers, so that the scheduler's thread need not hash.

use std::sync::Arc;
use std::thread::JoinHandle;

use host_core::radix::CacheEvent;
use host_core::routing::{EVENT_KEYS, EventLog};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{mpsc, watch};

use super::alive::Alive;

/// Ticks of the scheduler whose changes may wait for the log. Beyond that they are dropped, and the whole cache is
/// logged anew.
const WAITING: usize = 1024;

/// The worker's log, for all routers that follow its cache.
#[derive(Debug)]
pub struct CacheLog {
    log: Mutex<EventLog>,
    grown: watch::Sender<u64>,
}

impl CacheLog {
    /// Locks the log. The lock must not be kept, because changes wait for it.
    pub fn lock(&self) -> MutexGuard<'_, EventLog> {
        self.log.lock()
    }

    /// A receiver that is notified of each new event.
    #[must_use]
    pub fn grown(&self) -> watch::Receiver<u64> {
        self.grown.subscribe()
    }
}

/// The scheduler thread's end of the channel to the log. Its methods never wait.
pub(super) struct CacheFeed {
    to: mpsc::Sender<Vec<CacheEvent>>,
    /// Whether the log lacks changes and is to be sent the whole cache.
    behind: bool,
}

impl CacheFeed {
    /// Passes changes on, or records that they are lost.
    pub(super) fn tell(&mut self, events: Vec<CacheEvent>) {
        self.behind = self.behind || self.to.try_send(events).is_err();
    }

    /// Sends the whole cache if changes were lost and there is room again.
    pub(super) fn catch_up(&mut self, contents: impl FnOnce() -> Vec<CacheEvent>) {
        if self.behind
            && let Ok(place) = self.to.try_reserve()
        {
            place.send(contents());
            self.behind = false;
        }
    }
}

/// Starts the thread for a pool of so many pages. It ends with the feed.
pub(super) fn start(
    pages: u32,
    page_tokens: u32,
    alive: Alive,
) -> std::io::Result<(CacheFeed, Arc<CacheLog>, JoinHandle<()>)> {
    // A router that has missed more than a whole pool is served faster by a snapshot.
    let remembered = (pages as usize).max(4 * EVENT_KEYS);
    let (grown, _) = watch::channel(0);
    let log = Arc::new(CacheLog { log: Mutex::new(EventLog::new(pages, page_tokens, remembered)), grown });
    let (to, mut receive) = mpsc::channel::<Vec<CacheEvent>>(WAITING);
    let named = log.clone();
    let thread = std::thread::Builder::new().name("cache".into());
    let thread = thread.spawn(move || {
        let _alive = alive;
        while let Some(events) = receive.blocking_recv() {
            for event in &events {
                named.lock().record(event);
            }
            let last = named.lock().last();
            named.grown.send_replace(last);
        }
    })?;
    Ok((CacheFeed { to, behind: false }, log, thread))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use host_core::ids::PageId;
    use host_core::radix::{After, PageHash};

    use super::*;

    #[test]
    fn a_feed_that_overflowed_tells_everything_once_there_is_room() {
        let (to, mut receive) = mpsc::channel(1);
        let mut feed = CacheFeed { to, behind: false };
        let stored = |page| CacheEvent::Stored {
            after: After::Nothing(PageHash([0; 32])),
            pages: vec![PageId(page)],
            tokens: vec![page],
        };
        feed.tell(vec![stored(0)]);
        feed.tell(vec![stored(1)]);
        feed.catch_up(|| panic!("there is no room yet"));
        assert_eq!(receive.blocking_recv(), Some(vec![stored(0)]));
        feed.tell(vec![stored(2)]);
        feed.catch_up(|| vec![CacheEvent::Cleared]);
        assert_eq!(receive.blocking_recv(), Some(vec![CacheEvent::Cleared]), "nothing may overtake it");
        feed.catch_up(|| panic!("all was told"));
        feed.tell(vec![stored(3)]);
        assert_eq!(receive.blocking_recv(), Some(vec![stored(3)]));
    }

    #[test]
    fn what_was_told_can_be_followed_and_the_thread_ends_with_the_feed() {
        let (died, _) = watch::channel(None);
        let alive = Alive { thread: "cache", stopping: Arc::new(AtomicBool::new(true)), died };
        let (mut feed, log, thread) = start(4, 1, alive).unwrap();
        let grown = log.grown();
        let after = After::Nothing(PageHash([0; 32]));
        feed.tell(vec![CacheEvent::Stored { after, pages: vec![PageId(3)], tokens: vec![9] }]);
        drop(feed);
        thread.join().unwrap();
        assert_eq!((*grown.borrow(), log.lock().snapshot().keys.len()), (1, 1));
    }
}

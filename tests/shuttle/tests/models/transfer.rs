//! `transfer-kit` and `shm`: submissions from the host's threads to the backend's, and back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use host_plugin_api::{Completion, ErrorCode, NOTIFICATION_BYTES, PeerId, Submission, Tag};
use host_shuttle::peer::Peer;
use host_shuttle::ready::Ready;
use host_shuttle::submissions::Queue;
use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::thread;

use crate::schedules::many_schedules;

const NONE: Completion = Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 };

struct To {
    gone: AtomicBool,
}

impl Peer for To {
    fn id(&self) -> PeerId {
        PeerId(1)
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }
}

fn submission(tag: u64) -> Submission {
    Submission {
        peer: PeerId(1),
        notification_length: 0,
        tag: Tag(tag),
        notification: [0; NOTIFICATION_BYTES],
    }
}

/// An instance with one peer, built of the product's parts as a backend is.
struct World {
    queue: Queue<To>,
    ready: Ready,
    peer: Arc<To>,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            queue: Queue::new(2, 1),
            ready: Ready::new(2),
            peer: Arc::new(To { gone: AtomicBool::new(false) }),
        })
    }

    fn submit(&self, tag: u64) -> bool {
        let index = self.queue.take_in(&submission(tag), &self.peer, &[]);
        index.is_some_and(|index| {
            self.ready.push(index);
            true
        })
    }

    /// A copy thread.
    fn copy(&self) {
        while let Some(index) = self.ready.next() {
            let content = self.queue.content(index);
            let gone = content.peer().is_some_and(|peer| peer.is_gone());
            let status = match (gone, self.queue.is_cancelled(index)) {
                (true, _) => ErrorCode::PEER_LOST.0,
                (_, true) => ErrorCode::CANCELLED.0,
                _ => 0,
            };
            drop(content);
            self.queue.finish(index, status, 0, None);
        }
    }
}

#[test]
fn every_submission_ends_once_and_frees_its_slot() {
    many_schedules(|| {
        let world = World::new();
        let copiers: Vec<_> = (0..2)
            .map(|_| {
                let world = world.clone();
                thread::spawn(move || world.copy())
            })
            .collect();
        let cancelling = {
            let world = world.clone();
            thread::spawn(move || world.queue.cancel(Tag(2)))
        };
        let (mut given, mut ended) = (0, Vec::new());
        while ended.len() < 4 {
            // Two slots: a third submission waits for a completion to be fetched.
            if given < 4 && world.submit(given + 1) {
                given += 1;
            }
            let mut room = [NONE; 2];
            let taken = world.queue.take(&mut room);
            ended.extend(room[..taken].iter().map(|one| (one.tag.0, one.status)));
            thread::yield_now();
        }
        ended.sort_unstable();
        assert_eq!(ended.iter().map(|(tag, _)| *tag).collect::<Vec<_>>(), [1, 2, 3, 4]);
        let cancelled = cancelling.join().unwrap();
        assert!(ended.iter().all(|(tag, status)| *status == 0 || (*tag == 2 && cancelled)), "{ended:?}");
        assert!((1..=4).all(|tag| world.queue.is_settled(Tag(tag))));
        world.ready.stop();
        copiers.into_iter().for_each(|copier| copier.join().unwrap());
    });
}

#[test]
fn once_a_peer_is_idle_nothing_of_what_was_submitted_before_is_under_way() {
    many_schedules(|| {
        let world = World::new();
        assert!(world.submit(1));
        let copier = {
            let world = world.clone();
            thread::spawn(move || world.copy())
        };
        world.peer.gone.store(true, Ordering::SeqCst);
        let never = Instant::now() + Duration::from_secs(3600);
        assert!(world.queue.wait_idle(PeerId(1), never));
        assert!(world.queue.is_settled(Tag(1)));
        // The copy thread refuses submissions that come later.
        assert!(world.submit(2));
        let mut ended = Vec::new();
        while ended.len() < 2 {
            let mut room = [NONE; 2];
            let taken = world.queue.take(&mut room);
            ended.extend(room[..taken].iter().map(|one| (one.tag.0, one.status)));
            thread::yield_now();
        }
        assert_eq!(ended[1], (2, ErrorCode::PEER_LOST.0));
        world.ready.stop();
        copier.join().unwrap();
    });
}

#[test]
fn what_was_parked_is_tried_again_and_a_stop_ends_every_thread() {
    many_schedules(|| {
        let world = World::new();
        assert!(world.submit(1));
        let copiers: Vec<_> = (0..2)
            .map(|_| {
                let world = world.clone();
                thread::spawn(move || {
                    if let Some(index) = world.ready.next() {
                        world.ready.park(index);
                        world.ready.next();
                    }
                })
            })
            .collect();
        world.ready.stop();
        copiers.into_iter().for_each(|copier| copier.join().unwrap());
    });
}

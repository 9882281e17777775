//! `hicache-file`: batches between the host's threads and the plugin's, and segments that are written.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use host_plugin_api::{Address, ErrorCode, Key, Memory, MemoryKind, Tag, TierCompletion, TierPage};
use host_shuttle::config::Fsync;
use host_shuttle::format::{BLOCK, Name, RECORD, Slot, Value, position, slot};
use host_shuttle::metrics::Metrics;
use host_shuttle::queue::{Kind, Queue};
use host_shuttle::segment::Segment;
use host_shuttle::writer::{NoSpace, OpenSegment, Writer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use shuttle::thread;

use crate::schedules::many_schedules;

fn readable(fd: &impl std::os::fd::AsFd) -> bool {
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

fn queue(batches: u32, wakers: usize) -> Arc<Queue> {
    Arc::new(Queue::new(batches, 4, 1 << 20, wakers, Metrics::new().unwrap()).unwrap())
}

fn key(number: u64) -> Key {
    let mut key = Key([0; 32]);
    key.0[..8].copy_from_slice(&number.to_le_bytes());
    key
}

/// Fetches completions until the queue has given `all`. A completion without a wake-up leaves this waiting for ever.
fn fetch(queue: &Queue, all: usize) -> Vec<TierCompletion> {
    let mut found = Vec::new();
    while found.len() < all {
        while !readable(&queue.event()) {
            thread::yield_now();
        }
        let mut room = [TierCompletion::default(); 2];
        let taken = queue.poll(&mut room);
        found.extend_from_slice(&room[..usize::try_from(taken).unwrap()]);
    }
    found
}

/// A thread of the plugin that waits in the queue.
fn worker(queue: Arc<Queue>) -> impl FnOnce() {
    move || {
        let mut claim = Vec::new();
        while queue.wait_claim(&mut claim) {
            let ended: Vec<_> = claim.iter().map(|page| page.ended(0, 1)).collect();
            queue.finish(&ended);
        }
    }
}

#[test]
fn every_page_ends_once_and_its_completion_is_told() {
    many_schedules(|| {
        let queue = queue(2, 0);
        let workers: Vec<_> = (0..2).map(|_| thread::spawn(worker(queue.clone()))).collect();
        let hosts = {
            let queue = queue.clone();
            thread::spawn(move || {
                for tag in 1..=2 {
                    assert_eq!(queue.push_keys(Kind::Exists, Tag(tag), &[key(1), key(2)]), 0);
                }
                // Both slots stay taken until all completions of one batch were fetched.
            })
        };
        let mut ended: Vec<_> =
            fetch(&queue, 4).iter().map(|one| (one.tag.0, one.page, one.status)).collect();
        ended.sort_unstable();
        assert_eq!(ended, [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0)]);
        hosts.join().unwrap();
        assert_eq!(queue.push_keys(Kind::Exists, Tag(3), &[key(1)]), 0, "a slot is free again");
        fetch(&queue, 1);
        queue.close();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
}

#[test]
fn cancelled_batches_end_every_page_once_whatever_works_on_them() {
    many_schedules(|| {
        let queue = queue(2, 0);
        let worker = thread::spawn(worker(queue.clone()));
        assert_eq!(queue.push_keys(Kind::Exists, Tag(1), &[key(1), key(2), key(3)]), 0);
        let cancelling = {
            let queue = queue.clone();
            thread::spawn(move || queue.cancel(Tag(1)))
        };
        let ended = fetch(&queue, 3);
        let mut pages: Vec<_> = ended.iter().map(|one| one.page).collect();
        pages.sort_unstable();
        assert_eq!(pages, [0, 1, 2]);
        let answer = cancelling.join().unwrap();
        assert!([0, ErrorCode::INVALID_ARGUMENT.0].contains(&answer));
        let cancelled = ended.iter().any(|one| one.status == ErrorCode::CANCELLED.0);
        assert!(!cancelled || answer == 0);
        assert_eq!(queue.settled(Tag(1)), 1);
        queue.close();
        worker.join().unwrap();
    });
}

#[test]
fn a_cancelled_batch_ends_whether_its_pages_wait_or_are_worked_on_or_parked() {
    many_schedules(|| {
        let queue = queue(1, 0);
        assert_eq!(queue.push_keys(Kind::Exists, Tag(1), &[key(1), key(2)]), 0);
        let parking = {
            let queue = queue.clone();
            thread::spawn(move || {
                let mut claim = Vec::new();
                if queue.claim(true, &mut claim) {
                    claim.iter().for_each(|page| queue.park(page));
                }
            })
        };
        queue.cancel(Tag(1));
        let mut pages: Vec<_> = fetch(&queue, 2).iter().map(|one| one.page).collect();
        pages.sort_unstable();
        assert_eq!(pages, [0, 1]);
        parking.join().unwrap();
    });
}

#[test]
fn a_thread_that_sleeps_in_the_kernel_is_woken_for_each_batch() {
    many_schedules(|| {
        let queue = queue(2, 1);
        let sleeper = {
            let queue = queue.clone();
            // The loop of `uring::thread`, without the device.
            thread::spawn(move || {
                let waker = queue.waker(0).unwrap();
                let mut claim = Vec::new();
                loop {
                    waker.arm();
                    while queue.claim(true, &mut claim) {
                        let ended: Vec<_> = claim.iter().map(|page| page.ended(0, 1)).collect();
                        queue.finish(&ended);
                    }
                    if queue.is_closed() {
                        return;
                    }
                    while !readable(&waker.fd) {
                        thread::yield_now();
                    }
                    waker.clear();
                }
            })
        };
        let pushing: Vec<_> = (1..=2)
            .map(|tag| {
                let queue = queue.clone();
                thread::spawn(move || assert_eq!(queue.push_keys(Kind::Exists, Tag(tag), &[key(tag)]), 0))
            })
            .collect();
        assert_eq!(fetch(&queue, 2).len(), 2);
        pushing.into_iter().for_each(|pushing| pushing.join().unwrap());
        queue.close();
        sleeper.join().unwrap();
    });
}

#[test]
fn a_region_is_not_given_back_while_a_page_of_it_is_worked_on() {
    many_schedules(|| {
        let queue = queue(2, 0);
        let memory = [0_u8; 64];
        let region = queue
            .register(&Memory {
                address: Address::of(memory.as_ptr()),
                length: 64,
                kind: MemoryKind::DRAM,
                device: 0,
                fd: -1,
                generation: 1,
                fd_offset: 0,
            })
            .unwrap();
        let gone = Arc::new(AtomicBool::new(false));
        let worker = {
            let (queue, gone) = (queue.clone(), gone.clone());
            thread::spawn(move || {
                let mut claim = Vec::new();
                while queue.wait_claim(&mut claim) {
                    let works = claim.iter().any(|page| page.span.is_some());
                    assert!(!works || !gone.load(Ordering::SeqCst), "before");
                    thread::yield_now();
                    assert!(!works || !gone.load(Ordering::SeqCst), "after");
                    queue.finish(&claim.iter().map(|page| page.ended(0, 16)).collect::<Vec<_>>());
                }
            })
        };
        let pages = (0..2).map(|page| TierPage { key: key(page), region, offset: 16 * page, length: 16 });
        assert_eq!(queue.push(Kind::Get, Tag(1), 2, pages), 0);
        queue.deregister(region).unwrap();
        gone.store(true, Ordering::SeqCst);
        let ended = fetch(&queue, 2);
        assert!(ended.iter().all(|one| [0, ErrorCode::INVALID_ARGUMENT.0].contains(&one.status)));
        queue.close();
        worker.join().unwrap();
    });
}

/// Blocks of a segment in the model.
const BLOCKS: u64 = 3;

struct Files {
    data: Arc<OwnedFd>,
    index: OwnedFd,
    name: Name,
}

fn file() -> OwnedFd {
    memfd_create("model", MemfdFlags::CLOEXEC).unwrap()
}

/// A new segment, and its files.
fn segment(id: u32) -> (Arc<OpenSegment>, Files) {
    let name = Name { birth: 1, random: id.into() };
    let (data, index) = (Arc::new(file()), file());
    ftruncate(&data, BLOCKS * BLOCK).unwrap();
    let files = Files { data: data.clone(), index: index.try_clone().unwrap(), name };
    (OpenSegment::new(Arc::new(Segment { id, name }), data, index, BLOCKS * BLOCK), files)
}

#[test]
fn what_was_published_lies_before_the_seal_and_inside_the_data() {
    many_schedules(|| {
        let (writer, left) = (Arc::new(Writer::new()), Arc::new(AtomicUsize::new(2)));
        let writers: Vec<_> = (0..2)
            .map(|number| {
                let (writer, left) = (writer.clone(), left.clone());
                thread::spawn(move || {
                    for write in 0..2 {
                        let space = loop {
                            match writer.space(BLOCK).0 {
                                Ok(space) => break space,
                                Err(NoSpace::Wait) => thread::yield_now(),
                                Err(NoSpace::Refused(code)) => panic!("refused: {code:?}"),
                            }
                        };
                        let value = Value {
                            key: key(10 * number + write),
                            block: space.block,
                            length: 9,
                            checksum: 0,
                        };
                        space.open.publish(&[value], Fsync::Never).unwrap();
                        space.open.ended();
                    }
                    left.fetch_sub(1, Ordering::SeqCst);
                })
            })
            .collect();
        // The keeper makes segments, and seals those that are full and not written to.
        let (mut made, mut sealed) = (Vec::new(), 0);
        let mut done = false;
        while !done {
            done = left.load(Ordering::SeqCst) == 0;
            if made.len() < 2 && writer.is_wanted() {
                let (open, files) = segment(u32::try_from(made.len()).unwrap());
                made.push(files);
                writer.supply(Ok(open));
            }
            if done {
                writer.retire();
            }
            while let Some(open) = writer.take_full() {
                sealed += usize::from(open.seal(Fsync::Never).unwrap());
                writer.forget(&open);
            }
            thread::yield_now();
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        assert!(!writer.has_full());
        let mut found = Vec::new();
        for Files { data, index, name } in &made {
            let length = u64::try_from(fstat(data).unwrap().st_size).unwrap();
            let mut ended = false;
            for number in 0.. {
                let mut bytes = [0; RECORD];
                if rustix::io::pread(index, &mut bytes, position(number)).unwrap() < RECORD {
                    break;
                }
                match slot(*name, number, &bytes) {
                    Slot::Value(value) => {
                        assert!(!ended, "a record behind the seal");
                        assert!(value.end() <= length, "a value behind the end of its file");
                        found.push(value.key.0);
                    }
                    Slot::Seal => ended = true,
                    Slot::Empty | Slot::Damaged => panic!("record {number} is none"),
                }
            }
        }
        assert_eq!(sealed, 2);
        found.sort_unstable();
        assert_eq!(found, [key(0).0, key(1).0, key(10).0, key(11).0]);
    });
}

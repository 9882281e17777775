//! Calls marked hot allocate nothing on the thread that makes them.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use host_memory::SharedMemory;
use host_plugin_api::*;
use host_tests::wait::poll_until;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn submit_post_poll_notifications_and_settled_allocate_nothing() {
    let open = |name: &str| {
        let config = "connect_timeout_ms = 60000".into();
        let backend = host_plugin_shm::open(&Opening { name: name.into(), config }).unwrap();
        let memory = SharedMemory::new("test", 1 << 20).unwrap();
        let region = backend.register(&Memory {
            address: Address::of(memory.address().as_ptr()),
            length: 1 << 20,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: std::os::fd::AsRawFd::as_raw_fd(&memory.fd()),
            generation: 1,
            fd_offset: 0,
        });
        (backend, memory, region.unwrap())
    };
    let (sender, _source, from) = open("prefill");
    let (receiver, _target, to) = open("decode");
    let peer = sender.connect("decode", &receiver.endpoint().unwrap()).unwrap();
    let write = Write {
        source_region: from,
        target_region: to,
        length: 4096,
        target_generation: 1,
        ..Write::default()
    };
    let writes = vec![write; 1024];
    let mut completions = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 8];
    let mut notifications = [Notification {
        kind: NotificationKind(0),
        length: 0,
        peer_name_length: 0,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    }; 8];
    let before = ALLOCATIONS.with(Cell::get);
    let (mut completed, mut notified) = (0, 0);
    for tag in 1..=300 {
        let notification = [0; NOTIFICATION_BYTES];
        let submission = Submission { peer, notification_length: 8, tag: Tag(tag), notification };
        assert_eq!(sender.submit(&submission, &writes), 0);
        // A text of what was seen would be an allocation.
        poll_until("a submission to end and to arrive", || {
            completed += sender.poll(&mut completions) as u64;
            notified += receiver.notifications(&mut notifications) as u64;
            if completed >= tag && notified >= tag { Ok(()) } else { Err(completed.min(notified)) }
        });
        assert_eq!(sender.settled(Tag(tag)), 1);
    }
    assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0);
}

//! Two instances in one process. `host plugins test` checks much more. Your own tests go here.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use host_plugin_api::{
    Address, Completion, Memory, MemoryKind, NOTIFICATION_BYTES, Opening, RegionId, Submission, Tag,
    TransferBackend, Write,
};

use host_tcp_transfer::open;

fn instance(name: &str) -> impl TransferBackend {
    open(&Opening { name: name.into(), config: String::new() }).unwrap()
}

fn register(backend: &impl TransferBackend, bytes: &mut [u8], generation: u32) -> RegionId {
    let memory = Memory {
        address: Address::of(bytes.as_mut_ptr()),
        length: bytes.len() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation,
        fd_offset: 0,
    };
    backend.register(&memory).unwrap()
}

#[test]
fn what_was_submitted_is_in_the_peers_memory_when_it_completes() {
    let (sender, receiver) = (instance("sender"), instance("receiver"));
    let (mut ours, mut theirs) = (b"hello, peer".to_vec(), vec![0; 11]);
    let from = register(&sender, &mut ours, 0);
    let to = register(&receiver, &mut theirs, 7);
    let peer = sender.connect("receiver", &receiver.endpoint().unwrap()).unwrap();
    let submission =
        Submission { peer, notification_length: 0, tag: Tag(1), notification: [0; NOTIFICATION_BYTES] };
    let write = Write {
        source_region: from,
        target_region: to,
        length: 11,
        target_generation: 7,
        ..Write::default()
    };
    assert_eq!(sender.submit(&submission, &[write]), 0);

    let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
    let deadline = Instant::now() + Duration::from_secs(300);
    while sender.poll(&mut done) == 0 {
        assert!(Instant::now() < deadline, "the submission never completes");
        std::thread::yield_now();
    }
    assert_eq!((done[0].tag, done[0].status, done[0].bytes), (Tag(1), 0, 11));
    // No peer's write lands in memory that is not registered any more.
    receiver.deregister(to).unwrap();
    assert_eq!(theirs, ours);
    sender.shutdown(1000).unwrap();
    receiver.shutdown(1000).unwrap();
}

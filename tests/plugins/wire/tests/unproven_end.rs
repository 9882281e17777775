//! A connection that ends without the peer's confirmation is not settled until the confirmation comes.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write as _};
use std::net::{Shutdown, TcpListener};
use std::time::{Duration, Instant};

use host_plugin_api::{
    Address, ErrorCode, Memory, MemoryKind, NOTIFICATION_BYTES, Opening, Submission, Tag, TransferBackend,
    Write,
};
use host_plugin_wire::open;

/// The answer to a peer that may write.
const WELCOME: u8 = 3;

#[test]
fn a_peer_that_may_still_land_bytes_is_not_said_to_be_gone() {
    let sender = open(&Opening { name: "sender".into(), config: String::new() }).unwrap();
    let sender = sender.with_fence(Duration::from_secs(2));
    let receiver = open(&Opening { name: "receiver".into(), config: String::new() }).unwrap();
    // This peer welcomes the sender, and then neither reads nor answers, like a peer behind a broken link.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut endpoint = receiver.endpoint().unwrap();
    let port = endpoint.len() - 2;
    endpoint[port..].copy_from_slice(&silent.local_addr().unwrap().port().to_le_bytes());
    let length = endpoint.len();
    let accepted = std::thread::spawn(move || {
        let (mut stream, _) = silent.accept().unwrap();
        let mut hello = vec![0; length + 1 + "sender".len()];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&[WELCOME]).unwrap();
        stream
    });
    let peer = sender.connect("receiver", &endpoint).unwrap();
    let mut stream = accepted.join().unwrap();
    let mut bytes = [7_u8; 64];
    let memory = Memory {
        address: Address::of(bytes.as_mut_ptr()),
        length: 64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 0,
        fd_offset: 0,
    };
    let region = sender.register(&memory).unwrap();
    let submission =
        Submission { peer, notification_length: 0, tag: Tag(1), notification: [0; NOTIFICATION_BYTES] };
    let write = Write { source_region: region, length: 64, ..Write::default() };
    assert_eq!(sender.submit(&submission, &[write]), 0);

    for _ in 0..2 {
        assert_eq!(sender.disconnect(peer).unwrap_err().code, ErrorCode::TIMEOUT);
        assert_eq!(sender.settled(Tag(1)), 0, "it was said to be over, and its bytes are on their way");
    }
    // The peer reads all bytes and ends the connection: that is the proof.
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    stream.shutdown(Shutdown::Both).unwrap();
    drop(stream);
    // On a busy machine, more than one fence may wait for the proof.
    let deadline = Instant::now() + Duration::from_secs(300);
    while let Err(error) = sender.disconnect(peer) {
        assert!(error.code == ErrorCode::TIMEOUT && Instant::now() < deadline, "{error}");
    }
    assert_eq!(sender.settled(Tag(1)), 1);
    sender.shutdown(60_000).unwrap();
    receiver.shutdown(60_000).unwrap();
}

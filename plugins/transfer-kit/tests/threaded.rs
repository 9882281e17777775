//! What the kit guarantees for a network whose calls wait: fences, completions, cancelling, lost connections, ending.

#![allow(clippy::unwrap_used)]

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use host_plugin_api::{
    Address, Completion, ErrorCode, Memory, MemoryKind, NOTIFICATION_BYTES, NotificationKind, Opening,
    PeerId, RegionId, Result, Submission, Tag, TransferBackend, TransferLimits, Write,
};
use host_transfer_kit::threaded::{
    Connection, Inbound, Interrupt, Line, Network, Station, Threaded, ThreadedPeer,
};
use host_transfer_kit::{Content, Frontend, GuardedMemory, notification};

/// What a line does next.
enum Do {
    /// Lands the submission at the peer.
    Land,
    /// The connection breaks.
    Break,
    /// The peer has ended its side: nothing lands any more.
    End,
}

/// The other side of all lines: it lands what a line is told to land.
struct Wire {
    peer: Mutex<Option<Inbound>>,
    orders: Mutex<Option<Receiver<Do>>>,
    begun: Sender<&'static str>,
}

/// An instance's end of the wire.
struct Ends(Arc<Wire>);

struct Ordered {
    wire: Arc<Wire>,
    orders: Receiver<Do>,
}

impl Network for Ends {
    fn endpoint(&self) -> Result<Vec<u8>> {
        Ok(b"here".to_vec())
    }

    fn connect(&self, _own_name: &str, _peer_name: &str, _endpoint: &[u8]) -> Result<Connection> {
        let orders = self.0.orders.lock().unwrap().take().unwrap();
        let line = Box::new(Ordered { wire: self.0.clone(), orders });
        Ok(Connection { line, interrupt: Box::new(|_: Interrupt| {}) })
    }

    fn stop(&self) -> bool {
        true
    }
}

impl Line for Ordered {
    fn send(
        &mut self,
        submission: &Content<ThreadedPeer, ()>,
        memory: &GuardedMemory,
    ) -> io::Result<(i32, u64)> {
        self.wire.begun.send("send").unwrap();
        let Ok(Do::Land) = self.orders.recv() else { return Err(io::Error::other("broken")) };
        let peer = self.wire.peer.lock().unwrap();
        let peer = peer.as_ref().unwrap();
        let (mut bytes, mut landed) = (0, true);
        for write in submission.writes(0) {
            let mut piece = vec![0; write.length as usize];
            landed &= memory.read(&write, 0, &mut piece) && peer.land(&write, 0, &piece);
            bytes += u64::from(write.length);
        }
        if landed {
            peer.arrived(submission.notification());
        }
        Ok((if landed { 0 } else { ErrorCode::INVALID_ARGUMENT.0 }, bytes))
    }

    fn end(&mut self, _lost: bool) {
        self.wire.begun.send("end").unwrap();
        while !matches!(self.orders.recv(), Ok(Do::End) | Err(_)) {}
    }
}

/// A sender that is connected to a receiver, and the orders for the line between them.
struct Pair {
    sender: Frontend<Threaded<Ends>>,
    receiver: Frontend<Threaded<Ends>>,
    wire: Arc<Wire>,
    orders: Sender<Do>,
    begun: Receiver<&'static str>,
    peer: PeerId,
    write: Write,
}

/// Calls `look` until it has an answer. Until then, `look` returns what it sees instead.
fn until<T>(what: &str, mut look: impl FnMut() -> std::result::Result<T, String>) -> T {
    let deadline = Instant::now() + Duration::from_secs(300);
    loop {
        match look() {
            Ok(answer) => return answer,
            Err(seen) => assert!(Instant::now() < deadline, "waited in vain for {what}: {seen}"),
        }
        std::thread::yield_now();
    }
}

impl Pair {
    fn new(source: &'static [u8; 64], target: &'static mut [u8; 64]) -> Self {
        let (orders, receive_orders) = channel();
        let (begin, begun) = channel();
        let wire =
            Arc::new(Wire { peer: Mutex::default(), orders: Mutex::new(Some(receive_orders)), begun: begin });
        let station = Mutex::new(None::<Arc<Station>>);
        let open = |name: &str| {
            let opening = Opening { name: name.into(), config: String::new() };
            let network = |own: &Arc<Station>| {
                *station.lock().unwrap() = Some(own.clone());
                Ok(Ends(wire.clone()))
            };
            Frontend::new(Threaded::open(&opening, TransferLimits::new(4, 4), network).unwrap())
        };
        let sender = open("sender");
        let receiver = open("receiver");
        let admitted = station.lock().unwrap().as_ref().unwrap().admit("sender", || {});
        *wire.peer.lock().unwrap() = Some(admitted);
        let memory = |address: *const u8| Memory {
            address: Address::of(address),
            length: 64,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 1,
            fd_offset: 0,
        };
        let source_region = sender.register(&memory(source.as_ptr())).unwrap();
        let target_region = receiver.register(&memory(target.as_mut_ptr())).unwrap();
        let peer = sender.connect("receiver", &receiver.endpoint().unwrap()).unwrap();
        let write =
            Write { source_region, target_region, length: 64, target_generation: 1, ..Write::default() };
        Self { sender, receiver, wire, orders, begun, peer, write }
    }

    fn submit(&self, tag: u64) -> i32 {
        let notification = [5; NOTIFICATION_BYTES];
        let submission = Submission { peer: self.peer, notification_length: 4, tag: Tag(tag), notification };
        self.sender.submit(&submission, &[self.write])
    }

    fn completed(&self) -> (u64, i32) {
        let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
        until("a completion", || match self.sender.poll(&mut done) {
            1 => Ok(()),
            code => Err(format!("poll answers {code}")),
        });
        (done[0].tag.0, done[0].status)
    }

    fn begins(&self, what: &str) {
        assert_eq!(self.begun.recv().unwrap(), what);
    }

    fn news(&self) -> Vec<(NotificationKind, u32)> {
        let mut news = [notification(NotificationKind(0), "", &[]); 4];
        let count = self.receiver.notifications(&mut news);
        news[..count as usize].iter().map(|news| (news.kind, news.length)).collect()
    }
}

fn pair() -> (Pair, &'static [u8; 64]) {
    let source: &'static [u8; 64] = Box::leak(Box::new([7; 64]));
    let target: &'static mut [u8; 64] = Box::leak(Box::new([0; 64]));
    let landed: *const [u8; 64] = target;
    let pair = Pair::new(source, target);
    // SAFETY: it is looked at only when nothing is in flight, and never freed.
    (pair, unsafe { &*landed })
}

#[test]
fn a_submission_completes_when_it_has_landed_and_one_that_was_cancelled_before_is_never_sent() {
    let (pair, target) = pair();
    assert_eq!((pair.submit(1), pair.submit(2)), (0, 0));
    pair.begins("send");
    assert_eq!(pair.sender.cancel(Tag(2)), 0);
    assert_eq!(pair.sender.settled(Tag(1)), 0);
    pair.orders.send(Do::Land).unwrap();
    assert_eq!((pair.completed(), pair.completed()), ((1, 0), (2, ErrorCode::CANCELLED.0)));
    assert_eq!((pair.sender.settled(Tag(1)), pair.sender.settled(Tag(2))), (1, 1));
    assert_eq!(std::hint::black_box(target), &[7; 64]);
    assert_eq!(pair.news(), [(NotificationKind::ARRIVED, 4)]);
    drop(pair.orders);
    pair.sender.shutdown(60_000).unwrap();
    assert_eq!(pair.sender.poll(&mut []), ErrorCode::CLOSED.0);
    pair.sender.shutdown(60_000).unwrap();
}

#[test]
fn what_was_sent_over_a_connection_that_broke_has_settled_when_its_end_is_proven_and_a_fence_waits_for_that()
{
    let (pair, _target) = pair();
    assert_eq!((pair.submit(1), pair.submit(2)), (0, 0));
    pair.begins("send");
    pair.orders.send(Do::Break).unwrap();
    assert_eq!(
        (pair.completed(), pair.completed()),
        ((1, ErrorCode::PEER_LOST.0), (2, ErrorCode::PEER_LOST.0))
    );
    pair.begins("end");
    assert_eq!(pair.submit(3), ErrorCode::PEER_LOST.0);
    assert_eq!(
        (pair.sender.settled(Tag(1)), pair.sender.settled(Tag(2))),
        (0, 1),
        "the second was never sent"
    );
    assert_eq!(pair.sender.disconnect(pair.peer).unwrap_err().code, ErrorCode::TIMEOUT);
    assert_eq!(pair.sender.settled(Tag(1)), 0);
    pair.orders.send(Do::End).unwrap();
    // On a busy machine, more than one fence may wait for the proof.
    until("the fence", || {
        pair.sender.disconnect(pair.peer).map_err(|error| {
            assert_eq!(error.code, ErrorCode::TIMEOUT);
            error.to_string()
        })
    });
    assert_eq!(pair.sender.settled(Tag(1)), 1);
    assert_eq!(pair.sender.disconnect(pair.peer).unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
}

#[test]
fn nothing_of_a_peer_that_was_cut_off_lands_and_its_end_is_no_news_of_a_loss() {
    let (pair, target) = pair();
    assert_eq!(pair.submit(1), 0);
    pair.begins("send");
    pair.receiver.shutdown(60_000).unwrap();
    pair.orders.send(Do::Land).unwrap();
    assert_eq!(pair.completed(), (1, ErrorCode::INVALID_ARGUMENT.0));
    assert_eq!(std::hint::black_box(target), &[0; 64]);
    drop(pair.orders);
}

#[test]
fn a_connection_that_ends_by_itself_is_told_as_a_loss_unless_it_was_on_purpose() {
    for on_purpose in [false, true] {
        let (pair, _target) = pair();
        pair.wire.peer.lock().unwrap().take().unwrap().ended(on_purpose);
        let lost = [(NotificationKind::PEER_LOST, 0)];
        assert_eq!(pair.news(), if on_purpose { &[][..] } else { &lost });
        drop(pair.orders);
    }
}

#[test]
fn memory_that_was_taken_back_gets_nothing() {
    let (pair, target) = pair();
    assert_eq!(pair.submit(1), 0);
    pair.begins("send");
    pair.receiver.deregister(pair.write.target_region).unwrap();
    pair.orders.send(Do::Land).unwrap();
    assert_eq!(pair.completed(), (1, ErrorCode::INVALID_ARGUMENT.0));
    assert_eq!(std::hint::black_box(target), &[0; 64]);
    assert_eq!(pair.receiver.deregister(RegionId(99)).unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
    drop(pair.orders);
}

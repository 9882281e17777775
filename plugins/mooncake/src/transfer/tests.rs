//! The role over fake engines in one process, whose messages get lost, come twice, or are refused.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::*;
use crate::engine::{Range, Run, State, Target, Ticket, Undelivered};
use host_plugin_api::{
    Address, Completion, MemoryKind, NOTIFICATION_BYTES, Notification, NotificationKind, RegionId,
    Submission, Tag, TransferBackend as _,
};
use host_tests::wait::poll_until;

/// The network.
#[derive(Default)]
struct World {
    mailboxes: HashMap<String, Vec<String>>,
    last: u32,
    /// The next engine gets this address.
    address: Option<String>,
    random: u32,
    /// Of 256 messages, how many get lost, and how many come twice.
    lost: u32,
    twice: u32,
    /// The address at which no process seems to listen.
    shut: Option<String>,
    /// The address whose messages get lost.
    deaf: Option<String>,
    delivered: usize,
    engines: usize,
}

impl World {
    fn chance(&mut self, of_256: u32) -> bool {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.random >> 24 < of_256
    }
}

#[derive(Clone, Default)]
struct Net(Arc<Mutex<World>>);

struct Wire {
    net: Net,
    session: String,
}

impl Driver for Net {
    fn engine(&self) -> std::result::Result<Box<dyn Engine>, String> {
        let mut world = self.0.lock().unwrap();
        world.last += 1;
        world.engines += 1;
        let session = world.address.take().unwrap_or(format!("h:{}", world.last));
        world.mailboxes.insert(session.clone(), Vec::new());
        Ok(Box::new(Wire { net: self.clone(), session }))
    }

    fn describe(&self) -> String {
        "a network of the test's".into()
    }
}

impl Engine for Wire {
    fn session(&self) -> &str {
        &self.session
    }

    fn register(&self, _: &[Range]) -> std::result::Result<(), String> {
        Ok(())
    }

    fn unregister(&self, _: &[Range]) -> std::result::Result<(), String> {
        Ok(())
    }

    fn open(&self, session: &str) -> std::result::Result<Target, String> {
        Ok(Target { session: session.into(), segment: 0 })
    }

    fn submit(
        &self,
        to: &Target,
        runs: &[Run],
        tickets: &mut Vec<Ticket>,
    ) -> std::result::Result<(), String> {
        let world = self.net.0.lock().unwrap();
        let open = world.mailboxes.contains_key(&to.session);
        for _ in runs {
            tickets.push(Ticket { batch: u64::from(open), runs: 1, ended: 0 });
        }
        Ok(())
    }

    fn poll(&self, ticket: &mut Ticket) -> State {
        if ticket.batch == 1 { State::Done } else { State::Failed }
    }

    fn notify(&self, session: &str, text: &str, _: bool) -> std::result::Result<(), Undelivered> {
        let mut world = self.net.0.lock().unwrap();
        let (lost, twice) = (world.lost, world.twice);
        if world.shut.as_deref() == Some(session) {
            return Err(Undelivered::Refused);
        }
        let gets_lost = world.chance(lost) || world.deaf.as_deref() == Some(session);
        let copies = if gets_lost { 0 } else { 1 + usize::from(world.chance(twice)) };
        world.delivered += copies;
        let mailbox = world.mailboxes.get_mut(session).ok_or(Undelivered::Refused)?;
        mailbox.extend(std::iter::repeat_n(text.to_owned(), copies));
        Ok(())
    }

    fn messages(&self) -> Vec<String> {
        let mut world = self.net.0.lock().unwrap();
        world.mailboxes.get_mut(&self.session).map(std::mem::take).unwrap_or_default()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        let mut world = self.net.0.lock().unwrap();
        world.mailboxes.remove(&self.session);
        world.engines -= 1;
    }
}

fn wait<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    poll_until(what, || ask().ok_or("nothing"))
}

fn instance(net: &Net, name: &str) -> MooncakeBackend {
    let opening = Opening { name: name.into(), config: String::new() };
    let config = Config { connect_timeout_ms: 60_000, fence_timeout_ms: 60_000, ..Config::default() };
    start(&opening, config, Box::new(net.clone())).unwrap()
}

fn memory(backend: &MooncakeBackend, bytes: &[u8]) -> RegionId {
    let address = bytes.as_ptr() as u64;
    let length = bytes.len() as u64;
    let memory = Memory {
        address: Address(address),
        length,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    };
    backend.register(&memory).unwrap()
}

fn say(sender: &MooncakeBackend, peer: PeerId, tag: u64, writes: &[Write]) -> i32 {
    let mut notification = [0; NOTIFICATION_BYTES];
    notification[..8].copy_from_slice(&tag.to_le_bytes());
    sender.submit(&Submission { peer, notification_length: 8, tag: Tag(tag), notification }, writes)
}

fn heard(receiver: &MooncakeBackend) -> Option<(NotificationKind, u64)> {
    let mut one = [Notification {
        kind: NotificationKind(0),
        length: 0,
        peer_name_length: 0,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    }];
    let number = |payload: &[u8]| u64::from_le_bytes(payload[..8].try_into().unwrap());
    (receiver.notifications(&mut one) == 1).then(|| (one[0].kind, number(&one[0].payload)))
}

fn done(sender: &MooncakeBackend) -> Option<Completion> {
    let mut one = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
    (sender.poll(&mut one) == 1).then_some(one[0])
}

#[test]
fn messages_that_get_lost_or_come_twice_are_heard_once_and_in_order() {
    let net = Net::default();
    let (sender, receiver) = (instance(&net, "sender"), instance(&net, "receiver"));
    let seed = 0x5eed_0001;
    println!("seed {seed:#x}");
    {
        let mut world = net.0.lock().unwrap();
        (world.random, world.lost, world.twice) = (seed, 30, 60);
    }
    let peer = sender.connect("receiver", &receiver.endpoint().unwrap()).unwrap();
    let (mut said, mut ended, mut next) = (0, 0, 1);
    while ended < 80 {
        if said < 80 && say(&sender, peer, said + 1, &[]) == 0 {
            said += 1;
        }
        if let Some((kind, number)) = heard(&receiver) {
            assert_eq!((kind, number), (NotificationKind::ARRIVED, next));
            next += 1;
        }
        if let Some(done) = done(&sender) {
            ended += 1;
            assert_eq!((done.tag, done.status), (Tag(ended), 0));
            // Known to the peer, if not yet fetched by its host.
            assert!(next <= 81);
        }
    }
    while next <= 80 {
        let (_, number) = wait("the rest", || heard(&receiver));
        assert_eq!(number, next);
        next += 1;
    }
    assert_eq!(heard(&receiver), None);
    net.0.lock().unwrap().lost = 0;
    sender.shutdown(60_000).unwrap();
    receiver.shutdown(60_000).unwrap();
    wait("all engines to end", || (net.0.lock().unwrap().engines == 0).then_some(()));
}

#[test]
fn an_instance_at_the_address_of_one_that_is_gone_gets_none_of_its_messages() {
    let net = Net::default();
    let (sender, receiver) = (instance(&net, "sender"), instance(&net, "receiver"));
    let endpoint = receiver.endpoint().unwrap();
    let peer = sender.connect("receiver", &endpoint).unwrap();
    assert_eq!(say(&sender, peer, 1, &[]), 0);
    assert_eq!(wait("the first", || heard(&receiver)), (NotificationKind::ARRIVED, 1));
    wait("its end", || done(&sender));
    // It ends without a message, as a process that is killed does, and another takes its address.
    let session = receiver.backend().shared.session.clone();
    net.0.lock().unwrap().lost = 256;
    receiver.shutdown(60_000).unwrap();
    wait("the front to end", || (!net.0.lock().unwrap().mailboxes.contains_key(&session)).then_some(()));
    {
        let mut world = net.0.lock().unwrap();
        (world.address, world.lost) = (Some(session), 0);
    }
    let other = instance(&net, "other");
    let code = say(&sender, peer, 2, &[]);
    assert!(code == 0 || code == ErrorCode::PEER_LOST.0, "{code}");
    if code == 0 {
        assert_eq!(wait("the second to end", || done(&sender)).status, ErrorCode::PEER_LOST.0);
        wait("it to settle", || (sender.settled(Tag(2)) == 1).then_some(()));
    }
    assert_eq!(wait("the loss", || heard(&sender)).0, NotificationKind::PEER_LOST);
    assert_eq!(heard(&other), None);
    // Its endpoint is of no use either.
    let error = sender.connect("receiver", &endpoint).unwrap_err();
    assert_eq!(error.code, ErrorCode::PEER_LOST, "{error}");
    let again = sender.connect("other", &other.endpoint().unwrap()).unwrap();
    assert_eq!(say(&sender, again, 3, &[]), 0);
    assert_eq!(wait("the third", || heard(&other)), (NotificationKind::ARRIVED, 3));
}

#[test]
fn one_peer_that_fails_leaves_the_others_as_they_are() {
    let net = Net::default();
    let sender = instance(&net, "sender");
    let source = vec![7; 4096];
    let source_region = memory(&sender, &source);
    let target = vec![0; 4096];
    let mut peers = Vec::new();
    for name in ["good", "bad"] {
        let receiver = instance(&net, name);
        let target = memory(&receiver, &target);
        let peer = sender.connect(name, &receiver.endpoint().unwrap()).unwrap();
        peers.push((receiver, peer, target));
    }
    let write = |target_region| Write {
        source_region,
        target_region,
        length: 64,
        target_generation: 1,
        ..Write::default()
    };
    let (bad, bad_peer, bad_target) = peers.pop().unwrap();
    let (good, good_peer, good_target) = peers.pop().unwrap();
    drop(bad);
    let code = say(&sender, bad_peer, 1, &[write(bad_target)]);
    assert_eq!(say(&sender, good_peer, 2, &[write(good_target)]), 0);
    let mut ends = vec![wait("an end", || done(&sender))];
    if code == 0 {
        ends.push(wait("another", || done(&sender)));
    }
    for end in ends {
        assert_eq!(end.status, if end.tag == Tag(2) { 0 } else { ErrorCode::PEER_LOST.0 });
    }
    assert_eq!(wait("the notification", || heard(&good)), (NotificationKind::ARRIVED, 2));
}

#[test]
fn one_that_lost_us_while_we_saw_nothing_connects_again_after_our_host_has_heard_of_it() {
    let net = Net::default();
    let (sender, receiver) = (instance(&net, "sender"), instance(&net, "receiver"));
    let endpoint = receiver.endpoint().unwrap();
    let peer = sender.connect("receiver", &endpoint).unwrap();
    let back = receiver.connect("sender", &sender.endpoint().unwrap()).unwrap();
    assert_eq!(say(&sender, peer, 1, &[]), 0);
    assert_eq!(wait("the first", || heard(&receiver)), (NotificationKind::ARRIVED, 1));
    wait("its end", || done(&sender));
    // The receiver would hear that it is a stranger. Without this message it knows nothing of the loss.
    {
        let mut world = net.0.lock().unwrap();
        world.shut = Some(receiver.backend().shared.session.clone());
        world.deaf = Some(sender.backend().shared.session.clone());
    }
    // A ping may have been refused before.
    let code = say(&sender, peer, 2, &[]);
    assert!(code == 0 || code == ErrorCode::PEER_LOST.0, "{code}");
    if code == 0 {
        assert_eq!(wait("the second to end", || done(&sender)).status, ErrorCode::PEER_LOST.0);
    }
    assert_eq!(wait("the loss", || heard(&sender)).0, NotificationKind::PEER_LOST);
    let before = {
        let mut world = net.0.lock().unwrap();
        world.shut = None;
        world.delivered
    };
    let again = std::thread::scope(|scope| {
        let again = scope.spawn(|| sender.connect("receiver", &endpoint));
        // After its hello to an instance the sender does not call that one a stranger any more.
        wait("a hello", || (net.0.lock().unwrap().delivered > before).then_some(()));
        net.0.lock().unwrap().deaf = None;
        again.join().unwrap()
    });
    let again = again.unwrap();
    assert_eq!(say(&sender, again, 3, &[]), 0);
    // In this order: everything that the first connection had in flight is over before anything of the second arrives.
    assert_eq!(wait("the loss", || heard(&receiver)).0, NotificationKind::PEER_LOST);
    assert_eq!(wait("the third", || heard(&receiver)), (NotificationKind::ARRIVED, 3));
    // The connection the other way has ended with it.
    assert_eq!(say(&receiver, back, 4, &[]), ErrorCode::PEER_LOST.0);
    let back = receiver.connect("sender", &sender.endpoint().unwrap()).unwrap();
    assert_eq!(say(&receiver, back, 5, &[]), 0);
    assert_eq!(wait("the fifth", || heard(&sender)), (NotificationKind::ARRIVED, 5));
}

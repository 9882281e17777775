//! The books of two instances, over a transport that keeps messages until the test carries them.

use std::collections::{HashSet, VecDeque};
use std::sync::mpsc::{Receiver, sync_channel};

use host_plugin_api::{
    Address, Completion, Memory, MemoryKind, NOTIFICATION_BYTES, Notification, NotificationKind, PeerId,
    RegionId, Result, Submission, Tag, TransferLimits,
};

use super::*;
use crate::Instance;
use crate::wire::Endpoint;

#[derive(Default)]
struct Acts {
    known: HashSet<Random>,
    said: VecDeque<(Random, u64, Message)>,
    open: HashSet<Connection>,
    links: Vec<u32>,
    /// Whether opens and closes are done only when the test reports them.
    slow: bool,
    /// The answer to the end of a link.
    unsettled: bool,
    /// A region that something still reads.
    read: Option<u32>,
}

impl Transport for Acts {
    type Mailbox = ();

    fn meet(&mut self, instance: Random, _: &str, _: &[u8]) -> Result<()> {
        self.known.insert(instance);
        Ok(())
    }

    fn forget(&mut self, instance: Random) -> bool {
        self.known.remove(&instance)
    }

    fn say(&mut self, to: Random, connection: u64, message: Message) {
        self.said.push_back((to, connection, message));
    }

    fn mailbox(&self) {}

    fn open_inbound(
        &mut self,
        connection: Connection,
        _: &str,
        _: &[RegionDescriptor],
    ) -> Result<Option<Vec<u8>>> {
        self.open.insert(connection);
        Ok((!self.slow).then(|| vec![1]))
    }

    fn close_inbound(&mut self, connection: Connection) -> bool {
        assert!(self.open.remove(&connection), "closed once, and only when it was open");
        !self.slow
    }

    fn open_link(&mut self, peer: Arc<LinkedPeer<()>>, _: Vec<u8>) -> Result<bool> {
        self.links.push(peer.id.0);
        Ok(!self.slow)
    }

    fn end_link(&mut self, id: u32) -> Option<bool> {
        self.links.retain(|other| *other != id);
        (!self.slow).then_some(self.unsettled)
    }

    fn let_go(&mut self, _: RegionId) {}

    fn has_let_go(&mut self, region: RegionId) -> Result<bool> {
        Ok(self.read != Some(region.0))
    }
}

struct Side {
    id: Random,
    shared: Arc<LinkedInstance<()>>,
    books: Connections<Acts>,
}

impl Side {
    fn new(name: &str, id: u8) -> Self {
        let limits = TransferLimits::new(4, 4);
        let shared = Arc::new(LinkedInstance::new(Instance::new(name, limits, 16).unwrap(), false));
        let settings = Settings {
            max_peers: 2,
            connect_timeout: Duration::from_secs(60),
            fence_timeout: Duration::from_secs(60),
            ask_again: Duration::from_secs(60),
        };
        let books = Connections::new(Acts::default(), shared.clone(), settings, [id; 16]);
        Self { id: [id; 16], shared, books }
    }

    fn endpoint(&self) -> Endpoint {
        let name = self.shared.instance.name.clone();
        Endpoint { token: self.id, instance: self.id, name, address: Vec::new() }
    }

    fn connect(&mut self, to: &Side) -> Receiver<Result<PeerId>> {
        let (reply, answer) = sync_channel(1);
        let name = format!("to {}", to.shared.instance.name);
        self.books.request(Request::Connect { name, endpoint: to.endpoint(), reply });
        answer
    }

    fn disconnect(&mut self, peer: PeerId) -> Receiver<Result<()>> {
        let (reply, answer) = sync_channel(1);
        self.books.request(Request::Disconnect { peer, reply });
        answer
    }

    fn register(&self) -> RegionId {
        let (address, length) = (0x1000, 0x1000);
        let kind = MemoryKind::DRAM;
        self.shared
            .register(&Memory {
                address: Address(address),
                length,
                kind,
                device: 0,
                fd: -1,
                generation: 1,
                fd_offset: 0,
            })
            .unwrap()
    }

    fn heard(&self) -> Vec<(NotificationKind, String)> {
        let none = Notification {
            kind: NotificationKind(0),
            length: 0,
            peer_name_length: 0,
            reserved: 0,
            payload: [0; NOTIFICATION_BYTES],
            peer_name: [0; 64],
        };
        let mut all = [none; 8];
        let count = self.shared.instance.notifications.take(&mut all);
        let name =
            |n: &Notification| String::from_utf8_lossy(&n.peer_name[..n.peer_name_length as usize]).into();
        all[..count].iter().map(|n| (n.kind, name(n))).collect()
    }
}

/// Carries one message each way until nothing is left.
fn carry(one: &mut Side, other: &mut Side) {
    loop {
        let mut any = false;
        for _ in 0..2 {
            if let Some((to, number, message)) = one.books.transport.said.pop_front() {
                assert_eq!(to, other.id);
                other.books.transport.known.insert(one.id);
                other.books.hear(one.id, number, message);
                any = true;
            }
            std::mem::swap(one, other);
        }
        if !any {
            break;
        }
    }
}

fn pair() -> (Side, Side, PeerId) {
    let (mut sender, mut receiver) = (Side::new("sender", 1), Side::new("receiver", 2));
    receiver.register();
    let answer = sender.connect(&receiver);
    carry(&mut sender, &mut receiver);
    let peer = answer.try_recv().unwrap().unwrap();
    (sender, receiver, peer)
}

/// Starts a submission and fails its link while it is in flight.
fn fail(sender: &mut Side, peer: PeerId) {
    let instance = &sender.shared.instance;
    let notification = [0; NOTIFICATION_BYTES];
    let submission = Submission { peer, notification_length: 0, tag: Tag(7), notification };
    let to = instance.peers.get(peer).unwrap();
    let index = instance.queue.take_in(&submission, &to, &[]).unwrap();
    instance.queue.finish(index, ErrorCode::PEER_LOST.0, 0, Some(peer));
    sender.books.transport.unsettled = true;
    sender.books.link_failed(peer.0, "a test");
}

#[test]
fn a_welcome_brings_the_peers_regions_and_a_wrong_token_is_refused() {
    let (mut sender, mut receiver, peer) = pair();
    let found = sender.shared.instance.peers.get(peer).unwrap();
    assert_eq!((found.name.as_str(), found.own_name.as_str()), ("to receiver", "receiver"));
    assert_eq!(found.regions.len(), 1);
    assert_eq!(receiver.books.transport.open.len(), 1);
    receiver.books.token = [9; 16];
    let answer = sender.connect(&receiver);
    carry(&mut sender, &mut receiver);
    let error = answer.try_recv().unwrap().unwrap_err();
    assert!(error.code == ErrorCode::PEER_LOST && error.message.contains("gone"), "{error}");
    receiver.books.token = [2; 16];
    let answer = sender.connect(&receiver);
    carry(&mut sender, &mut receiver);
    answer.try_recv().unwrap().unwrap();
    let error = sender.connect(&receiver).try_recv().unwrap().unwrap_err();
    assert_eq!(error.code, ErrorCode::NO_RESOURCE, "{error}");
}

#[test]
fn what_failed_settles_when_the_peer_has_closed_its_end_and_the_host_hears_of_it_once() {
    let (mut sender, mut receiver, peer) = pair();
    fail(&mut sender, peer);
    let queue = &sender.shared.instance.queue;
    assert!(!queue.is_settled(Tag(7)));
    let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 2];
    assert_eq!(queue.take(&mut done), 1);
    carry(&mut sender, &mut receiver);
    assert!(sender.shared.instance.queue.is_settled(Tag(7)));
    assert!(receiver.books.transport.open.is_empty());
    assert_eq!(sender.heard(), [(NotificationKind::PEER_LOST, "receiver".to_owned())]);
    assert_eq!(receiver.heard(), [(NotificationKind::PEER_LOST, "sender".to_owned())]);
    // The next connection of that name takes its place.
    let answer = sender.connect(&receiver);
    carry(&mut sender, &mut receiver);
    answer.try_recv().unwrap().unwrap();
    assert!(sender.shared.instance.peers.get(peer).is_none());
}

#[test]
fn a_lost_connection_that_is_replaced_is_unknown_at_once_and_goes_when_nothing_of_it_is_in_flight() {
    let (mut sender, mut receiver, peer) = pair();
    sender.books.transport.slow = true;
    fail(&mut sender, peer);
    carry(&mut sender, &mut receiver);
    sender.books.transport.slow = false;
    let fence = sender.disconnect(peer);
    let answer = sender.connect(&receiver);
    carry(&mut sender, &mut receiver);
    let next = answer.try_recv().unwrap().unwrap();
    assert!(
        sender.shared.instance.peers.get(peer).is_none(),
        "replaced, though the transport has not ended it"
    );
    assert!(sender.books.links.contains_key(&peer.0) && !sender.shared.instance.queue.is_settled(Tag(7)));
    sender.books.keep_time();
    assert!(fence.try_recv().is_err(), "something of it may land");
    sender.books.link_ended(peer.0, true);
    assert_eq!(sender.books.links.keys().collect::<Vec<_>>(), [&next.0]);
    assert!(sender.shared.instance.queue.is_settled(Tag(7)));
    sender.books.keep_time();
    fence.try_recv().unwrap().unwrap();
}

#[test]
fn a_fence_waits_for_both_directions_and_says_nothing_to_the_host_that_disconnected() {
    let (mut sender, mut receiver, peer) = pair();
    let back = receiver.connect(&sender);
    carry(&mut sender, &mut receiver);
    back.try_recv().unwrap().unwrap();
    sender.books.transport.slow = true;
    let answer = sender.disconnect(peer);
    carry(&mut sender, &mut receiver);
    sender.books.keep_time();
    assert!(answer.try_recv().is_err(), "neither the link nor the inbound endpoint has ended");
    sender.books.link_ended(peer.0, true);
    sender.books.keep_time();
    assert!(answer.try_recv().is_err(), "the inbound endpoint has not ended");
    let connection = sender.books.inbound[0].connection;
    sender.books.inbound_closed(connection);
    sender.books.keep_time();
    answer.try_recv().unwrap().unwrap();
    carry(&mut sender, &mut receiver);
    assert_eq!(sender.heard(), []);
    assert_eq!(receiver.heard().len(), 1);
    assert!(!receiver.books.has_inbound() && receiver.books.transport.links.is_empty());
}

#[test]
fn a_fence_without_the_peers_word_runs_into_its_deadline_and_can_be_tried_again() {
    let (mut sender, mut receiver, peer) = pair();
    sender.books.settings.fence_timeout = Duration::ZERO;
    sender.books.transport.unsettled = true;
    let answer = sender.disconnect(peer);
    sender.books.keep_time();
    let error = answer.try_recv().unwrap().unwrap_err();
    assert!(error.code == ErrorCode::TIMEOUT && error.message.contains("to receiver"), "{error}");
    sender.books.settings.fence_timeout = Duration::from_secs(60);
    let answer = sender.disconnect(peer);
    carry(&mut sender, &mut receiver);
    sender.books.keep_time();
    answer.try_recv().unwrap().unwrap();
}

#[test]
fn an_endpoint_that_is_cut_while_it_opens_is_closed_as_soon_as_it_is_open() {
    let (mut sender, mut receiver) = (Side::new("sender", 1), Side::new("receiver", 2));
    receiver.books.transport.slow = true;
    sender.books.settings.connect_timeout = Duration::ZERO;
    let answer = sender.connect(&receiver);
    carry(&mut sender, &mut receiver);
    sender.books.keep_time();
    let error = answer.try_recv().unwrap().unwrap_err();
    assert!(error.message.contains("no peer answers for to receiver"), "{error}");
    carry(&mut sender, &mut receiver);
    let connection = Connection { instance: sender.id, number: 1 };
    assert_eq!(receiver.books.is_inbound_open(connection), Some(false));
    receiver.books.inbound_opened(connection, Ok(vec![1]));
    assert!(receiver.books.transport.open.is_empty());
    receiver.books.inbound_closed(connection);
    assert_eq!(receiver.books.transport.said.back().unwrap().2, Message::CutDone);
}

#[test]
fn a_region_is_free_when_no_endpoint_offers_it_and_no_link_reads_it() {
    let (mut sender, mut receiver, peer) = pair();
    let region = receiver.shared.region_descriptors()[0].id;
    receiver.books.transport.slow = true;
    let (reply, answer) = sync_channel(1);
    receiver.books.request(Request::Deregister { region, reply });
    receiver.books.keep_time();
    assert!(answer.try_recv().is_err(), "its inbound endpoint is there");
    receiver.books.transport.read = Some(region.0);
    receiver.books.inbound_closed(Connection { instance: sender.id, number: peer.0.into() });
    receiver.books.keep_time();
    assert!(answer.try_recv().is_err(), "a link reads it");
    receiver.books.transport.read = None;
    receiver.books.keep_time();
    answer.try_recv().unwrap().unwrap();
    carry(&mut sender, &mut receiver);
    assert!(sender.books.transport.links.is_empty(), "it was told that the endpoint is closed");
}

#[test]
fn an_instance_that_is_gone_takes_all_with_it_and_is_reported_once() {
    let (mut sender, mut receiver, peer) = pair();
    let back = receiver.connect(&sender);
    carry(&mut sender, &mut receiver);
    back.try_recv().unwrap().unwrap();
    fail(&mut sender, peer);
    let waiting = sender.connect(&receiver);
    sender.books.lose(receiver.id, "a test");
    let error = waiting.try_recv().unwrap().unwrap_err();
    assert!(error.message.ends_with("a test"), "{error}");
    assert!(sender.shared.instance.queue.is_settled(Tag(7)));
    assert_eq!(sender.heard().len(), 1);
    assert!(!sender.books.has_inbound() && !sender.books.is_concerned_with(receiver.id));
    sender.books.lose(receiver.id, "again");
    assert_eq!(sender.heard(), []);
}

#[test]
fn an_instance_that_cannot_be_reached_loses_its_connections_and_what_was_sent_to_it_stays_unproven() {
    for comes_back in [true, false] {
        let (mut sender, mut receiver, peer) = pair();
        let back = receiver.connect(&sender);
        carry(&mut sender, &mut receiver);
        back.try_recv().unwrap().unwrap();
        fail(&mut sender, peer);
        let waiting = sender.connect(&receiver);
        let unproven = sender.books.lose_contact(receiver.id, "a test");
        assert_eq!(unproven.as_deref(), Some("to receiver"));
        let error = waiting.try_recv().unwrap().unwrap_err();
        assert!(error.message.ends_with("a test"), "{error}");
        assert!(!sender.books.has_inbound(), "its own writes are cut off");
        assert_eq!(sender.heard(), [(NotificationKind::PEER_LOST, "receiver".to_owned())]);
        let of = receiver.id;
        let unproven = |sender: &Side| {
            let queue = &sender.shared.instance.queue;
            !queue.is_settled(Tag(7)) && sender.books.is_concerned_with(of)
        };
        assert!(unproven(&sender), "what was sent may still land");
        // The messages of that time are lost. Nothing is said twice to the host.
        sender.books.transport.said.clear();
        let _as_before = sender.books.lose_contact(receiver.id, "again");
        sender.books.transport.said.clear();
        sender.books.keep_time();
        assert!(unproven(&sender) && sender.heard().is_empty());
        if comes_back {
            sender.books.settings.ask_again = Duration::ZERO;
            sender.books.keep_time();
            sender.books.settings.ask_again = Duration::from_secs(60);
            carry(&mut sender, &mut receiver);
            assert!(receiver.books.transport.open.is_empty());
        } else {
            sender.books.lose(receiver.id, "it is dead");
        }
        assert!(!unproven(&sender) && sender.shared.instance.queue.is_settled(Tag(7)));
        assert!(sender.heard().is_empty());
    }
}

#[test]
fn a_connection_that_its_peer_closes_while_the_link_opens_fails_its_connect() {
    let (mut sender, mut receiver) = (Side::new("sender", 1), Side::new("receiver", 2));
    let region = receiver.register();
    sender.books.transport.slow = true;
    let answer = sender.connect(&receiver);
    carry(&mut sender, &mut receiver);
    let (reply, _deregistered) = sync_channel(1);
    receiver.books.request(Request::Deregister { region, reply });
    carry(&mut sender, &mut receiver);
    let error = answer.try_recv().unwrap().unwrap_err();
    assert!(error.code == ErrorCode::PEER_LOST && error.message.contains("to receiver"), "{error}");
    let id = sender.books.transport.links[0];
    sender.books.link_opened(id, Ok(()));
    assert!(sender.books.links.is_empty() && sender.shared.instance.peers.all().is_empty());
}

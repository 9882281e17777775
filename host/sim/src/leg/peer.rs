//! Messages and pages of the worker on the other side.

use host_core::aux_row::AuxRow;
use host_core::integrity::{FoundData, LaneSum};
use host_core::message::{Body, Message, Reserve};
use host_core::notice::Notice;
use host_core::radix::NamespaceKey;
use host_core::{Event, PageId, Room};

use super::{DRAWN, Leg, PEER};
use crate::fixture::sampled;

impl Leg {
    /// Delivers a message of the peer.
    pub fn message(&mut self, room: u64, attempt: u32, body: Body) {
        let event = self.said(room, attempt, body);
        self.event(event);
    }

    /// A message of the peer, for the test to deliver.
    pub fn said(&mut self, room: u64, attempt: u32, body: Body) -> Event {
        self.reply(None, Room(room), attempt, body)
    }

    fn reply(&mut self, answers: Option<u64>, room: Room, attempt: u32, body: Body) -> Event {
        self.last_message += 1;
        let message = Message { id: self.last_message, answers, room, attempt, body };
        Event::Message { from: PEER, floor: 0, message }
    }

    /// Lets the peer answer the last message of a room for which `question` is true.
    ///
    /// # Panics
    /// When there was no such message.
    pub fn answer(&mut self, room: u64, question: impl Fn(&Body) -> bool, body: Body) {
        let message = self.sent.iter().rfind(|message| message.room == Room(room) && question(&message.body));
        let Some((id, attempt)) = message.map(|message| (message.id, message.attempt)) else {
            panic!("room {room} sent no such message: {:?}", self.sent);
        };
        let event = self.reply(Some(id), Room(room), attempt, body);
        self.event(event);
    }

    /// Lets the peer answer all messages, so that none is repeated.
    pub fn answer_messages(&mut self) {
        for message in std::mem::take(&mut self.sent) {
            let body = match message.body {
                Body::Reserve(_) => Body::Reserved,
                Body::Commit => Body::Committed,
                Body::Abort => Body::Drained,
                Body::PrefillFailed { .. } => Body::PrefillFailedSeen,
                _ => continue,
            };
            let event = self.reply(Some(message.id), message.room, message.attempt, body);
            self.event(event);
        }
    }

    /// Lets prefill answer that nothing of an aborted room is in flight.
    pub fn drained(&mut self, room: u64) {
        self.answer(room, |body| matches!(body, Body::Abort), Body::Drained);
    }

    /// Lets all pages that decode asked for arrive, in one part.
    pub fn arrive(&mut self, room: u64) {
        let event = self.arrival(room);
        self.event(event);
    }

    /// The event of [`arrive`](Self::arrive), for the test to deliver.
    ///
    /// # Panics
    /// When the room was not reserved.
    #[must_use]
    pub fn arrival(&self, room: u64) -> Event {
        let Some((attempt, reserve)) = self.reserves.get(&Room(room)) else {
            panic!("room {room} was not reserved")
        };
        let pages = (reserve.pages.len() + reserve.window.len()) as u32;
        Event::Arrived(Notice { room: Room(room), attempt: *attempt, sequence: 0, pages, last: true })
    }

    /// Ends the verification: the pages are intact, or a byte was flipped.
    pub fn verified(&mut self, room: u64, intact: bool) {
        self.found(room, intact, DRAWN);
    }

    /// Ends the verification with an aux row that has this first token.
    pub fn found(&mut self, room: u64, intact: bool, token: u32) {
        let event = self.verification(room, intact, token);
        self.event(event);
    }

    /// The event of [`found`](Self::found), for the test to deliver.
    ///
    /// # Panics
    /// When no verification of the room is pending.
    pub fn verification(&mut self, room: u64, intact: bool, token: u32) -> Event {
        let Some((attempt, pages)) = self.verifying.remove(&Room(room)) else {
            panic!("nothing of room {room} is verified")
        };
        let row = AuxRow {
            room: Room(room),
            attempt,
            prompt_tokens: self.prompts[&Room(room)].len() as u32,
            cached_tokens: 0,
            pages: pages.len() as u32,
            first: sampled(token),
        };
        let lanes = Some(vec![LaneSum { source: 0, target: 0, sent: 5, found: if intact { 5 } else { 6 } }]);
        let found = Box::new(FoundData { aux_row: row.encode(), lanes });
        Event::Verified { room: Room(room), attempt, found }
    }

    /// Lets a whole transfer arrive and be verified.
    pub fn deliver(&mut self, room: u64) {
        self.arrive(room);
        self.verified(room, true);
    }

    /// Lets decode reserve: it tells a prefill leg where to write all pages behind `prefix` tokens.
    pub fn reserve(&mut self, room: u64, prompt: &[u32], prefix: usize) {
        self.reserve_again(room, prompt, prefix, 1);
    }

    /// Like [`reserve`](Self::reserve), for a later attempt.
    pub fn reserve_again(&mut self, room: u64, prompt: &[u32], prefix: usize, attempt: u32) {
        let page = self.config.page_tokens as usize;
        let pages = prompt.len().div_ceil(page) - prefix / page;
        let window = (0..self.tail(prompt)).map(|page| PageId(1_000 + page as u32)).collect();
        let reserve = Reserve { window, ..self.span(prompt, prefix as u32, pages as u32) };
        self.message(room, attempt, Body::Reserve(reserve));
    }

    /// Pages that the window at a prompt's end takes.
    #[must_use]
    pub fn tail(&self, prompt: &[u32]) -> usize {
        let page = self.config.page_tokens as usize;
        self.config.window.map_or(0, |shape| shape.tail(prompt.len(), page).len() * shape.parts as usize)
    }

    /// The reserve with which decode asks for `pages` pages behind `prefix` tokens.
    #[must_use]
    pub fn span(&self, prompt: &[u32], prefix: u32, pages: u32) -> Reserve {
        Reserve {
            pages: (0..pages).map(PageId).collect(),
            decode_prefix_len: prefix,
            prompt_tokens: prompt.len() as u32,
            window: Vec::new(),
            aux_slot: 0,
            namespace: NamespaceKey::default().fingerprint(),
        }
    }

    /// Settles all writes.
    pub fn settle(&mut self) {
        for write in std::mem::take(&mut self.writes) {
            self.event(Event::Written { tag: write.tag, error: None });
        }
    }
}

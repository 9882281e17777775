//! Those who ask, and what they must be answered.

use std::time::Duration;

use host_core::radix::NamespaceKey;
use host_core::request::{PeerRef, Request};
use host_core::{Room, Sampling};

use super::super::memory::{VOCABULARY, answer_to};
use super::{DECODE, Pending, Random, World};

pub struct Client {
    pub request: Request,
    pub tokens: Vec<u32>,
    /// Whether the decode (or aggregated) leg ended, and how.
    pub ended: Option<bool>,
}

impl World {
    pub(super) fn add_request(&mut self, at_ms: u64) {
        let (length, longest) = if self.faults.pressure { (20, 44) } else { (40, 12) };
        let length = 1 + self.random.below(length) as usize;
        let prompt = self.prompt(length);
        let count = 1 + self.random.below(longest) as u32;
        let namespace = self.namespace();
        self.ask(at_ms, prompt, count, namespace);
    }

    /// Sends a request to both legs, and perhaps gives it up later.
    fn ask(&mut self, at_ms: u64, prompt: Vec<u32>, max_new_tokens: u32, namespace: NamespaceKey) {
        let room = Room(self.random.next());
        let request = Request {
            room,
            prompt,
            max_new_tokens,
            stop_tokens: Vec::new(),
            ignore_stop: false,
            sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None },
            prefill: Some(PeerRef { instance: self.prefill.instance, address: String::new() }),
            namespace,
            no_cache: self.random.chance(0.1),
            names: Vec::new(),
        };
        let later = |random: &mut Random| Duration::from_millis(at_ms + random.below(300));
        if self.random.chance(self.faults.abort) {
            let at = Duration::from_millis(at_ms + self.random.below(1_500));
            self.schedule(at, Pending::Cancel(room));
        }
        for to in [self.prefill.instance, DECODE] {
            let at = later(&mut self.random);
            self.schedule(at, Pending::Submit { to, request: request.clone() });
        }
        self.clients.insert(room, Client { request, tokens: Vec::new(), ended: None });
    }

    /// The client has its answer and says something more, as long as there is room for it.
    fn go_on(&mut self, mut conversation: Vec<u32>, namespace: NamespaceKey) {
        let said = self.random.below(7) as usize;
        if !self.faults.talk || conversation.len() + said > 48 || self.random.below(3) == 0 {
            return;
        }
        conversation.extend((0..said).map(|_| self.random.below(u64::from(VOCABULARY)) as u32));
        let (at, count) = (self.random.below(500), 1 + self.random.below(8) as u32);
        self.outcome.turns += 1;
        self.ask(at, conversation, count, namespace);
    }

    /// A third of the requests are another tenant's.
    pub(super) fn namespace(&mut self) -> NamespaceKey {
        let salt = if self.random.chance(0.33) { "tenant" } else { "" };
        NamespaceKey { salt: salt.into(), ..NamespaceKey::default() }
    }

    /// Half of the prompts begin like one of three others.
    pub(super) fn prompt(&mut self, length: usize) -> Vec<u32> {
        if self.faults.alike && self.random.chance(0.5) {
            return (0..23).collect();
        }
        let mut own = Random(self.random.next());
        let base = self.random.below(if self.faults.forks { 2 } else { 6 });
        let shared = if base < 3 { self.random.below(length as u64 + 1) as usize } else { 0 };
        let mut alike = Random(base);
        let alike = (0..shared).map(|_| alike.below(u64::from(VOCABULARY)) as u32).collect::<Vec<u32>>();
        let rest = (shared..length).map(|_| own.below(u64::from(VOCABULARY)) as u32);
        alike.into_iter().chain(rest).collect()
    }

    pub(super) fn end(&mut self, room: Room, finished: bool) {
        let Some(client) = self.clients.get_mut(&room) else { return };
        if client.ended.is_some() {
            return;
        }
        client.ended = Some(finished);
        if finished {
            let expected =
                answer_to(&client.request.prompt, client.request.max_new_tokens as usize, self.sliding);
            assert_eq!(client.tokens, expected, "wrong answer in {room:?}");
            let request = &client.request;
            let (conversation, namespace) =
                ([&request.prompt[..], &client.tokens].concat(), request.namespace.clone());
            self.go_on(conversation, namespace);
        }
    }

    pub(super) fn check_rest(&self) {
        for worker in [&self.prefill, &self.decode] {
            let stats = worker.scheduler.stats();
            assert_eq!(
                (stats.pool.held, stats.pool.quarantined),
                (0, 0),
                "{:?} leaks pages",
                worker.instance
            );
            let host = stats.hierarchy.host;
            let unsettled = (host.filling, host.spoilt, host.abandoned, stats.hierarchy.host_pinned);
            assert_eq!(unsettled, (0, 0, 0, 0), "{:?} leaks slots", worker.instance);
            assert_eq!((stats.queued, stats.active, stats.unanswered, stats.locked_pages), (0, 0, 0, 0));
            worker.check_told();
        }
        assert!(self.rooms.is_empty(), "rooms that nobody forgot");
        for (room, client) in &self.clients {
            assert!(client.ended.is_some(), "{room:?} never ended");
        }
    }
}

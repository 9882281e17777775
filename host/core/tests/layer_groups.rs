//! A prefill worker sends layers of pages while later ones are computed; what exactly, and when.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

use std::time::Duration;

use host_core::layer_groups::{LayerGroups, Wish};
use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};
use host_core::message::{Body, Message, Reserve};
use host_core::notice::Notice;
use host_core::radix::{NamespaceKey, Policy};
use host_core::request::{PeerRef, Request};
use host_core::scheduler::PageWrite;
use host_core::transfer::Tag;
use host_core::{
    Action, Batch, Config, Event, Instance, PageId, Role, Room, Sampled, Sampling, Scheduler, SequenceOutput,
    Time,
};

const DECODE: Instance = Instance(9);
const PREFILL: Instance = Instance(7);
const PAGE_TOKENS: u32 = 4;
const LAYERS: u32 = 4;

fn rule(groups: u32) -> LayerGroups {
    let shape = KvShape {
        pages: 1,
        heads: 1,
        layers: LAYERS as usize,
        page_tokens: PAGE_TOKENS as usize,
        head_dim: 1,
        value_dim: 1,
        dtype: Dtype::F32,
    };
    LayerGroups::new(Wish::Groups(groups), &KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim)).unwrap()
}

fn wants(prompt_tokens: u32) -> Body {
    let pages = (20..20 + prompt_tokens.div_ceil(PAGE_TOKENS)).map(PageId).collect();
    let namespace = NamespaceKey::default().fingerprint();
    let window = Vec::new();
    Body::Reserve(Reserve { pages, window, decode_prefix_len: 0, prompt_tokens, aux_slot: 0, namespace })
}

struct Worker {
    scheduler: Scheduler,
    now: Time,
    messages: u64,
}

impl Worker {
    fn new(role: Role, layer_groups: LayerGroups) -> Self {
        let scheduler = Scheduler::new(Config {
            role,
            pages: 8,
            page_tokens: PAGE_TOKENS,
            max_tokens: 32,
            vocabulary: 10,
            chunk_tokens: 8,
            radix_cache: Some(Policy::Lru),
            hierarchy: None,
            cache_events: false,
            identity: host_core::radix::PageHash([0; 32]),
            reserved_decode_tokens: 8,
            target_itl: None,
            seed: 0,
            window: None,
            layer_groups,
            max_batch: 4,
            max_running: 4,
            max_queued: 10,
            max_attempts: 3,
            bootstrap_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(600),
            peer_patience: Duration::from_secs(10),
        });
        let mut worker = Self { scheduler, now: Time::default(), messages: 0 };
        let peer = if role == Role::Prefill { DECODE } else { PREFILL };
        if role == Role::Prefill {
            worker.after(Event::PeerReady { peer, floor: 0, session: 1 });
        }
        worker
    }

    /// Handles an event and decides; returns what is to be done.
    fn after(&mut self, event: Event) -> Vec<Action> {
        self.now = self.now.after(Duration::from_millis(1));
        let mut actions = Vec::new();
        self.scheduler.handle(self.now, event, &mut actions);
        self.scheduler.tick(self.now, &mut actions);
        self.scheduler.audit();
        actions
    }

    fn submit(&mut self, room: u64, prompt: Vec<u32>) -> Vec<Action> {
        self.after(Event::Submit(Request {
            room: Room(room),
            prompt,
            max_new_tokens: 1,
            stop_tokens: Vec::new(),
            ignore_stop: true,
            sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None },
            prefill: Some(PeerRef { instance: PREFILL, address: String::new() }),
            namespace: NamespaceKey::default(),
            no_cache: false,
            names: Vec::new(),
        }))
    }

    /// Decode offers pages from 20 on.
    fn reserve(&mut self, room: u64, prompt_tokens: u32) -> Vec<Action> {
        self.say(room, wants(prompt_tokens))
    }

    fn say(&mut self, room: u64, body: Body) -> Vec<Action> {
        self.say_again(room, 1, body)
    }

    fn say_again(&mut self, room: u64, attempt: u32, body: Body) -> Vec<Action> {
        self.messages += 1;
        let message = Message { id: self.messages, answers: None, room: Room(room), attempt, body };
        self.after(Event::Message { from: DECODE, floor: 0, message })
    }
}

fn batch(actions: &[Action]) -> Batch {
    let batch = actions.iter().find_map(|action| match action {
        Action::Run(batch) => Some(batch.clone()),
        _ => None,
    });
    batch.unwrap()
}

fn outputs(batch: &Batch) -> Event {
    let sampled = |_: Sampling| Sampled { token: 3, logprob: None, top: Vec::new() };
    let output = |s: &host_core::Sequence| SequenceOutput { room: s.room, sampled: s.sample.map(sampled) };
    Event::BatchDone(batch.sequences.iter().map(output).collect())
}

/// Each part as (sequence number, decode's pages, layers, pages completed, last).
type Part = (u32, Vec<u32>, std::ops::Range<u32>, u32, bool);

fn writes(actions: &[Action]) -> Vec<&PageWrite> {
    let writes = actions.iter().filter_map(|action| match action {
        Action::Write(write) => Some(write),
        _ => None,
    });
    writes.collect()
}

fn parts(actions: &[Action]) -> Vec<Part> {
    let part = |write: &&PageWrite| {
        assert_eq!(write.aux.is_some(), write.notice.last);
        let target = write.target.iter().map(|page| page.0).collect();
        (write.notice.sequence, target, write.layers.clone(), write.notice.pages, write.notice.last)
    };
    writes(actions).iter().map(part).collect()
}

#[test]
fn finished_layers_are_sent_in_groups_and_the_rest_with_the_batch() {
    let mut worker = Worker::new(Role::Prefill, rule(2));
    worker.submit(1, vec![1; 10]);
    let first = batch(&worker.reserve(1, 10));
    assert_eq!((first.layer_group, first.sequences[0].tokens.len()), (2, 8));
    let done = |batch: &Batch, layers| Event::LayersDone { batch: batch.id, layers };
    assert_eq!(parts(&worker.after(done(&first, 1))), [], "a group is two layers");
    assert_eq!(parts(&worker.after(done(&first, 2))), [(0, vec![20, 21], 0..2, 0, false)]);
    assert_eq!(parts(&worker.after(done(&first, 2))), [], "said twice");
    assert_eq!(parts(&worker.after(done(&first, 1))), [], "said late");
    assert_eq!(parts(&worker.after(done(&first, 4))), [], "the last layers wait for the batch");
    let actions = worker.after(outputs(&first));
    assert_eq!(parts(&actions), [(1, vec![20, 21], 2..4, 2, false)]);
    let second = batch(&actions);
    assert_eq!(parts(&worker.after(done(&first, 3))), [], "an earlier batch");
    // The prompt's last page is not full, but nothing more comes into it.
    assert_eq!(parts(&worker.after(done(&second, 3))), [(2, vec![22], 0..3, 0, false)]);
    assert_eq!(parts(&worker.after(outputs(&second))), [(3, vec![22], 3..4, 1, true)]);
    assert_eq!((worker.scheduler.stats().pages_sent, worker.scheduler.stats().layer_parts_sent), (3, 2));
}

#[test]
fn without_groups_no_news_is_asked_for_and_none_changes_anything() {
    let mut worker = Worker::new(Role::Prefill, LayerGroups::off(LAYERS));
    worker.submit(1, vec![1; 10]);
    let first = batch(&worker.reserve(1, 10));
    assert_eq!(first.layer_group, 0);
    assert_eq!(parts(&worker.after(Event::LayersDone { batch: first.id, layers: 3 })), []);
    assert_eq!(parts(&worker.after(outputs(&first))), [(0, vec![20, 21], 0..4, 2, false)]);
}

#[test]
fn a_batch_that_fails_after_some_layers_were_sent_fails_the_request_and_frees_its_pages_once_they_settled() {
    let mut worker = Worker::new(Role::Prefill, rule(4));
    worker.submit(1, vec![1; 10]);
    let first = batch(&worker.reserve(1, 10));
    let tags: Vec<Tag> = (1..3)
        .map(|layers| {
            let actions = worker.after(Event::LayersDone { batch: first.id, layers });
            writes(&actions)[0].tag
        })
        .collect();
    let actions = worker.after(Event::BatchFailed("out of memory".into()));
    let cancelled = |tag: &Tag| actions.contains(&Action::CancelWrite(*tag));
    assert!(tags.iter().all(cancelled), "{actions:?}");
    assert!(actions.iter().any(|action| matches!(action, Action::Fail { .. })), "{actions:?}");
    assert_eq!(worker.scheduler.stats().pool.quarantined, 3);
    worker.after(Event::Written { tag: tags[0], error: None });
    assert_eq!(worker.scheduler.stats().pool.quarantined, 3, "one of two has settled");
    worker.after(Event::Written { tag: tags[1], error: Some("cancelled".into()) });
    assert_eq!(worker.scheduler.stats().pool.free, 8);
}

#[test]
fn a_write_of_layers_that_fails_fails_the_request_and_its_pages_wait_for_the_batch() {
    let mut worker = Worker::new(Role::Prefill, rule(4));
    worker.submit(1, vec![1; 8]);
    let first = batch(&worker.reserve(1, 8));
    let actions = worker.after(Event::LayersDone { batch: first.id, layers: 1 });
    let tag = writes(&actions)[0].tag;
    let actions = worker.after(Event::Written { tag, error: Some("broken".into()) });
    assert!(actions.iter().any(|action| matches!(action, Action::Fail { .. })), "{actions:?}");
    assert_eq!(worker.scheduler.stats().pool.quarantined, 2, "the batch still writes them");
    assert_eq!(parts(&worker.after(Event::LayersDone { batch: first.id, layers: 2 })), []);
    assert_eq!(parts(&worker.after(outputs(&first))), []);
    assert_eq!(worker.scheduler.stats().pool.free, 8);
}

#[test]
fn an_abort_between_two_groups_is_answered_when_all_has_settled() {
    let mut worker = Worker::new(Role::Prefill, rule(4));
    worker.submit(1, vec![1; 8]);
    let first = batch(&worker.reserve(1, 8));
    let actions = worker.after(Event::LayersDone { batch: first.id, layers: 1 });
    let tag = writes(&actions)[0].tag;
    let drained = |actions: &[Action]| {
        let is = |a: &Action| matches!(a, Action::Send { message, .. } if message.body == Body::Drained);
        actions.iter().any(is)
    };
    assert!(!drained(&worker.say(1, Body::Abort)));
    assert_eq!(parts(&worker.after(Event::LayersDone { batch: first.id, layers: 2 })), []);
    assert!(!drained(&worker.after(outputs(&first))), "a write is in flight");
    assert!(drained(&worker.after(Event::Written { tag, error: None })));
    assert_eq!(worker.scheduler.stats().pool.free, 8);
}

#[test]
fn another_attempt_sends_everything_whole_once_the_first_has_settled() {
    let mut worker = Worker::new(Role::Prefill, rule(4));
    worker.submit(1, vec![1; 8]);
    let first = batch(&worker.reserve(1, 8));
    let actions = worker.after(Event::LayersDone { batch: first.id, layers: 1 });
    let tag = writes(&actions)[0].tag;
    assert_eq!(parts(&worker.say_again(1, 2, wants(8))), []);
    assert_eq!(parts(&worker.after(Event::LayersDone { batch: first.id, layers: 2 })), []);
    assert_eq!(parts(&worker.after(outputs(&first))), [], "the first attempt's write is in flight");
    let actions = worker.after(Event::Written { tag, error: None });
    assert_eq!(parts(&actions), [(0, vec![20, 21], 0..4, 2, true)]);
}

#[test]
fn pages_that_prefill_holds_are_on_their_way_before_anything_is_computed() {
    let mut worker = Worker::new(Role::Prefill, rule(2));
    worker.submit(1, vec![1; 9]);
    let first = batch(&worker.reserve(1, 9));
    let second = batch(&worker.after(outputs(&first)));
    let tags: Vec<Tag> = writes(&worker.after(outputs(&second))).iter().map(|write| write.tag).collect();
    worker.after(Event::Written { tag: Tag(tags[0].0 - 1), error: None });
    worker.after(Event::Written { tag: tags[0], error: None });
    worker.say(1, Body::Commit);
    worker.submit(2, [vec![1; 8], vec![2; 4]].concat());
    let actions = worker.reserve(2, 12);
    assert_eq!(parts(&actions), [(0, vec![20, 21], 0..4, 2, false)]);
    let third = batch(&actions);
    assert_eq!(third.sequences[0].start, 8);
    let actions = worker.after(Event::LayersDone { batch: third.id, layers: 2 });
    assert_eq!(parts(&actions), [(1, vec![22], 0..2, 0, false)]);
    assert_eq!(parts(&worker.after(outputs(&third))), [(2, vec![22], 2..4, 1, true)]);
}

#[test]
fn decode_takes_as_many_parts_as_pages_and_layers_allow_and_no_more() {
    let most = LayerGroups::off(LAYERS).most_parts(2);
    assert_eq!(most, 2 * 4 + 1);
    for (sequence, fits) in [(most - 1, true), (most, false)] {
        let mut worker = Worker::new(Role::Decode, LayerGroups::off(LAYERS));
        worker.submit(1, vec![1; 8]);
        worker.after(Event::PeerReady { peer: PREFILL, floor: 0, session: 1 });
        let sequence = sequence as u32;
        let notice = Notice { room: Room(1), attempt: 1, sequence, pages: 0, last: false };
        let actions = worker.after(Event::Arrived(notice));
        let failed = actions.iter().any(|action| matches!(action, Action::Fail { .. }));
        assert_eq!(failed, !fits, "part {sequence}: {actions:?}");
    }
}

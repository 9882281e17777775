//! Which layers of pages a prefill worker sends while later layers are computed, and when.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

use host_core::layer_groups::LayerGroups;
use host_core::layout::KvOrder;
use host_core::message::Body;
use host_core::notice::Notice;
use host_core::radix::Policy;
use host_core::scheduler::PageWrite;
use host_core::transfer::Tag;
use host_core::{Action, Batch, Config, Event, PageId, Role, Room};
use host_sim::Leg;

const LAYERS: u32 = 4;

fn rule(groups: u32) -> LayerGroups {
    host_sim::layer_groups(KvOrder::PageHeadLayerKvTokenDim, LAYERS, 4, groups)
}

/// A worker whose every batch the test computes.
struct Worker {
    leg: Leg,
}

impl Worker {
    fn new(role: Role, layer_groups: LayerGroups) -> Self {
        let config = host_sim::config(role, 8);
        let leg =
            Leg::with(Config { radix_cache: Some(Policy::Lru), layer_groups, max_tokens: 32, ..config });
        Self { leg }
    }

    /// Handles an event and decides. Returns what is to be done.
    fn after(&mut self, event: Event) -> Vec<Action> {
        // Tests take batches from the actions.
        self.leg.batch = None;
        self.leg.after(event)
    }

    fn submit(&mut self, room: u64, prompt: &[u32]) -> Vec<Action> {
        let request = self.leg.request(room, prompt, 1);
        self.after(Event::Submit(request))
    }

    /// Decode offers pages from 20 on.
    fn reserve(&mut self, room: u64, prompt_tokens: u32) -> Vec<Action> {
        self.reserve_again(room, 1, prompt_tokens)
    }

    fn wants(&self, prompt_tokens: u32) -> Body {
        let span = self.leg.span(&vec![1; prompt_tokens as usize], 0, 0);
        let pages = (20..20 + prompt_tokens.div_ceil(4)).map(PageId).collect();
        Body::Reserve(host_core::message::Reserve { pages, ..span })
    }

    fn reserve_again(&mut self, room: u64, attempt: u32, prompt_tokens: u32) -> Vec<Action> {
        let wants = self.wants(prompt_tokens);
        self.say_again(room, attempt, wants)
    }

    fn say(&mut self, room: u64, body: Body) -> Vec<Action> {
        self.say_again(room, 1, body)
    }

    fn say_again(&mut self, room: u64, attempt: u32, body: Body) -> Vec<Action> {
        let event = self.leg.said(room, attempt, body);
        self.after(event)
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
    Event::BatchDone(host_sim::outputs(batch, |_| 3))
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
    worker.submit(1, &[1; 10]);
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
    // The prompt's last page is not full, but no more tokens of the prompt come into it.
    assert_eq!(parts(&worker.after(done(&second, 3))), [(2, vec![22], 0..3, 0, false)]);
    assert_eq!(parts(&worker.after(outputs(&second))), [(3, vec![22], 3..4, 1, true)]);
    assert_eq!((worker.leg.stats().pages_sent, worker.leg.stats().layer_parts_sent), (3, 2));
}

#[test]
fn without_groups_no_news_is_asked_for_and_none_changes_anything() {
    let mut worker = Worker::new(Role::Prefill, LayerGroups::off(LAYERS));
    worker.submit(1, &[1; 10]);
    let first = batch(&worker.reserve(1, 10));
    assert_eq!(first.layer_group, 0);
    assert_eq!(parts(&worker.after(Event::LayersDone { batch: first.id, layers: 3 })), []);
    assert_eq!(parts(&worker.after(outputs(&first))), [(0, vec![20, 21], 0..4, 2, false)]);
}

#[test]
fn a_batch_that_fails_after_some_layers_were_sent_fails_the_request_and_frees_its_pages_once_they_settled() {
    let mut worker = Worker::new(Role::Prefill, rule(4));
    worker.submit(1, &[1; 10]);
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
    assert_eq!(worker.leg.stats().pool.quarantined, 3);
    worker.after(Event::Written { tag: tags[0], error: None });
    assert_eq!(worker.leg.stats().pool.quarantined, 3, "one of two has settled");
    worker.after(Event::Written { tag: tags[1], error: Some("cancelled".into()) });
    assert_eq!(worker.leg.stats().pool.free, 8);
}

#[test]
fn a_write_of_layers_that_fails_fails_the_request_and_its_pages_wait_for_the_batch() {
    let mut worker = Worker::new(Role::Prefill, rule(4));
    worker.submit(1, &[1; 8]);
    let first = batch(&worker.reserve(1, 8));
    let actions = worker.after(Event::LayersDone { batch: first.id, layers: 1 });
    let tag = writes(&actions)[0].tag;
    let actions = worker.after(Event::Written { tag, error: Some("broken".into()) });
    assert!(actions.iter().any(|action| matches!(action, Action::Fail { .. })), "{actions:?}");
    assert_eq!(worker.leg.stats().pool.quarantined, 2, "the batch still writes them");
    assert_eq!(parts(&worker.after(Event::LayersDone { batch: first.id, layers: 2 })), []);
    assert_eq!(parts(&worker.after(outputs(&first))), []);
    assert_eq!(worker.leg.stats().pool.free, 8);
}

#[test]
fn an_abort_between_two_groups_is_answered_when_all_has_settled() {
    let mut worker = Worker::new(Role::Prefill, rule(4));
    worker.submit(1, &[1; 8]);
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
    assert_eq!(worker.leg.stats().pool.free, 8);
}

#[test]
fn another_attempt_sends_everything_whole_once_the_first_has_settled() {
    let mut worker = Worker::new(Role::Prefill, rule(4));
    worker.submit(1, &[1; 8]);
    let first = batch(&worker.reserve(1, 8));
    let actions = worker.after(Event::LayersDone { batch: first.id, layers: 1 });
    let tag = writes(&actions)[0].tag;
    assert_eq!(parts(&worker.reserve_again(1, 2, 8)), []);
    assert_eq!(parts(&worker.after(Event::LayersDone { batch: first.id, layers: 2 })), []);
    assert_eq!(parts(&worker.after(outputs(&first))), [], "the first attempt's write is in flight");
    let actions = worker.after(Event::Written { tag, error: None });
    assert_eq!(parts(&actions), [(0, vec![20, 21], 0..4, 2, true)]);
}

#[test]
fn pages_that_prefill_holds_are_on_their_way_before_anything_is_computed() {
    let mut worker = Worker::new(Role::Prefill, rule(2));
    worker.submit(1, &[1; 9]);
    let first = batch(&worker.reserve(1, 9));
    let second = batch(&worker.after(outputs(&first)));
    let tags: Vec<Tag> = writes(&worker.after(outputs(&second))).iter().map(|write| write.tag).collect();
    worker.after(Event::Written { tag: Tag(tags[0].0 - 1), error: None });
    worker.after(Event::Written { tag: tags[0], error: None });
    worker.say(1, Body::Commit);
    worker.submit(2, &[vec![1; 8], vec![2; 4]].concat());
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
        worker.submit(1, &[1; 8]);
        let sequence = sequence as u32;
        let notice = Notice { room: Room(1), attempt: 1, sequence, pages: 0, last: false };
        let actions = worker.after(Event::Arrived(notice));
        let failed = actions.iter().any(|action| matches!(action, Action::Fail { .. }));
        assert_eq!(failed, !fits, "part {sequence}: {actions:?}");
    }
}

//! The cache alone, without a scheduler: where pages are after each operation.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Cache, Holding, Pages, Tokens, Touches};
use crate::config::{Config, Role};
use crate::hierarchy::TierTag;
use crate::ids::{Instance, Room, Time};
use crate::layer_groups::LayerGroups;
use crate::pool::{PoolCounts, PoolLimits};
use crate::radix::{NamespaceKey, PageHash, Policy};
use crate::request::Request;
use crate::sampling::Sampling;
use crate::transfer::Tag;

const PAGE: usize = 4;
const NOW: Time = Time(Duration::ZERO);

fn cache(pages: u32) -> Cache {
    let config = Config {
        role: Role::Aggregated,
        pages,
        page_tokens: PAGE as u32,
        max_tokens: 1000,
        vocabulary: 1000,
        chunk_tokens: 64,
        radix_cache: Some(Policy::default()),
        hierarchy: None,
        cache_events: false,
        identity: PageHash([1; 32]),
        reserved_decode_tokens: 1,
        draft_tokens: 0,
        target_itl: None,
        share_transfers: true,
        seed: 1,
        settles: true,
        window: None,
        layer_groups: LayerGroups::off(1),
        max_batch: 8,
        max_running: 8,
        max_queued: 8,
        max_attempts: 1,
        bootstrap_timeout: Duration::from_secs(1),
        request_timeout: Duration::from_secs(1),
        transfer_patience: Duration::from_secs(1),
        peer_patience: Duration::from_secs(1),
    };
    Cache::new(&config, PoolLimits::shared(pages), None)
}

/// A request whose prompt is the tokens `0..tokens`.
fn request(room: u64, tokens: u32) -> Request {
    Request {
        room: Room(room),
        prompt: (0..tokens).collect(),
        answered: 0,
        max_new_tokens: 1,
        stop_tokens: Vec::new(),
        ignore_stop: false,
        sampling: Sampling::GREEDY,
        priority: 0,
        client: 0,
        prefill: None,
        namespace: NamespaceKey::default(),
        no_cache: false,
        scores: None,
        names: Vec::new(),
    }
}

fn tokens(request: &Request) -> Tokens<'_> {
    Tokens { request, output: &[], resumes: false, computed_before: 0 }
}

/// Admits a request. Returns what it holds, and how many of its pages were cached.
fn admitted(cache: &mut Cache, request: &Request) -> (Holding, usize) {
    let tokens = tokens(request);
    let found = cache.probe(NOW, &tokens, Pages::default());
    let need = cache.need(&tokens, found.as_ref(), 0);
    assert!(cache.can_have(need.now), "{need:?} of {:?}", cache.counts());
    cache.make_free(need.now);
    let mut kv = Holding::default();
    let admitted = cache.admit(NOW, &tokens, &mut kv, need, found);
    (kv, admitted.prefix)
}

/// Does what follows a batch: the whole prompt is computed and kept.
fn computed(cache: &mut Cache, request: &Request, kv: &mut Holding) {
    let from = kv.computed();
    kv.has_computed(request.prompt.len());
    cache.keep_computed(&tokens(request), kv, from, false);
}

fn audited(cache: &Cache, holdings: &[&Holding]) -> PoolCounts {
    cache.audit(holdings.iter().copied());
    cache.counts()
}

#[test]
fn pages_go_from_free_to_held_to_cached_and_the_next_request_finds_them() {
    let mut cache = cache(8);
    let (first, second) = (request(1, 10), request(2, 14));
    let (mut kv, prefix) = admitted(&mut cache, &first);
    assert_eq!((prefix, audited(&cache, &[&kv]).held), (0, 3));
    computed(&mut cache, &first, &mut kv);
    let counts = audited(&cache, &[&kv]);
    assert_eq!((counts.held, counts.cached), (1, 2), "the page that is not full stays the request's");
    let (other, prefix) = admitted(&mut cache, &second);
    assert_eq!((prefix, audited(&cache, &[&kv, &other]).held), (2, 3));
    assert!(cache.release(first.room, kv, Touches::default()));
    assert!(cache.release(second.room, other, Touches::default()));
    let counts = audited(&cache, &[]);
    assert_eq!((counts.free, counts.cached), (6, 2));
}

#[test]
fn cached_pages_that_no_request_uses_are_evicted_for_one_that_needs_them() {
    let mut cache = cache(4);
    let first = request(1, 9);
    let (mut kv, _) = admitted(&mut cache, &first);
    computed(&mut cache, &first, &mut kv);
    let all = Pages { full: 4, window: 0 };
    assert!(!cache.can_have(all), "a request uses them");
    assert!(cache.release(first.room, kv, Touches::default()));
    assert_eq!(audited(&cache, &[]).cached, 2);
    assert!(cache.can_have(all));
    cache.make_free(all);
    assert_eq!(audited(&cache, &[]).free, 4);
}

#[test]
fn a_preempted_request_gives_back_all_and_leaves_what_it_computed() {
    let mut cache = cache(4);
    let first = request(1, 9);
    let (mut kv, _) = admitted(&mut cache, &first);
    kv.has_computed(first.prompt.len());
    cache.keep_preempted(&tokens(&first), &mut kv, false);
    cache.give_back(&mut kv);
    assert!(!kv.is_admitted() && !kv.is_cached());
    let counts = audited(&cache, &[&kv]);
    assert_eq!((counts.held, counts.cached), (0, 2));
}

/// Ends a request that `touches` still touch. Checks that its pages are free after `event`, which ends the touch, and
/// not before.
fn leaves_quarantine_with(touches: Touches, event: impl FnOnce(&mut Cache) -> Vec<Room>) {
    let mut cache = cache(4);
    let first = request(1, 9);
    let (kv, _) = admitted(&mut cache, &first);
    let named = format!("{touches:?}");
    assert!(!cache.release(first.room, kv, touches), "{named}");
    assert_eq!(audited(&cache, &[]).quarantined, 3, "{named}");
    // Events of other peers, rooms and tags end nothing.
    let others = [
        cache.writer_gone(Instance(9), None),
        cache.writer_gone(Instance(7), Some(Room(2))),
        cache.write_settled(Tag(9)),
        cache.verification_ended(Room(2)),
        cache.receiver_closed(Room(2)),
        cache.load_ended(TierTag(9)),
    ];
    assert_eq!((others.concat(), cache.is_quarantined(first.room)), (Vec::new(), true), "{named}");
    assert_eq!(event(&mut cache), [first.room], "{named}");
    assert_eq!(audited(&cache, &[]).free, 4, "{named}");
}

#[test]
fn each_touch_alone_keeps_pages_in_quarantine_until_its_own_end() {
    let room = Room(1);
    let none = Touches::default;
    leaves_quarantine_with(Touches { writer: Some(Instance(7)), ..none() }, |cache| {
        cache.writer_gone(Instance(7), Some(room))
    });
    leaves_quarantine_with(Touches { writer: Some(Instance(7)), ..none() }, |cache| {
        cache.writer_gone(Instance(7), None)
    });
    leaves_quarantine_with(Touches { tags: BTreeSet::from([Tag(3)]), ..none() }, |cache| {
        cache.write_settled(Tag(3))
    });
    leaves_quarantine_with(Touches { batch: true, ..none() }, Cache::batch_ended);
    leaves_quarantine_with(Touches { verification: true, ..none() }, |cache| cache.verification_ended(room));
    leaves_quarantine_with(Touches { receiver: true, ..none() }, |cache| cache.receiver_closed(room));
    leaves_quarantine_with(Touches { loads: BTreeSet::from([TierTag(5)]), ..none() }, |cache| {
        cache.load_ended(TierTag(5))
    });
}

#[test]
fn of_several_touches_the_last_one_frees_the_pages() {
    let mut cache = cache(4);
    let first = request(1, 9);
    let (kv, _) = admitted(&mut cache, &first);
    let touches = Touches { writer: Some(Instance(7)), batch: true, receiver: true, ..Touches::default() };
    assert!(!cache.release(first.room, kv, touches));
    assert!(cache.batch_ended().is_empty());
    assert!(cache.writer_gone(Instance(7), None).is_empty());
    assert_eq!(cache.receiver_closed(first.room), [first.room]);
}

//! How the caches of workers affect the choice of a route.

use host_core::radix::{NamespaceKey, PageHash};
use host_core::routing::{Applied, BlockKey, KvEvent, SnapshotPart};
use host_wire::cache_news::News;

use super::*;

/// Two prefill and two decode workers whose caches are followed.
fn table() -> (WorkerTable, Instant) {
    let (mut table, now) = (WorkerTable::new(Terms { policy: Policy::Prefix, ..terms() }), Instant::now());
    for (instance, name, role) in
        [(1, "p1", "prefill"), (2, "p2", "prefill"), (3, "d1", "decode"), (4, "d2", "decode")]
    {
        let info = WorkerInfo { cache_events: true, pages: 1000, ..worker(instance, name, role) };
        table.register(info, now).unwrap();
    }
    (table, now)
}

fn chains(table: &WorkerTable, prompt: &[u32], now: Instant) -> Vec<Chain> {
    let chain = |(identity, page_tokens): (PageHash, u32)| Chain {
        identity,
        keys: BlockKey::chain(&identity.namespace(&NamespaceKey::default()), prompt, page_tokens as usize),
    };
    table.identities(now).into_iter().map(chain).collect()
}

/// The worker says that it has the first `pages` pages of a prompt.
fn store(table: &mut WorkerTable, instance: u64, prompt: &[u32], pages: usize, now: Instant) {
    let keys = chains(table, prompt, now)[0].keys[..pages].to_vec();
    assert_eq!(table.hear(Instance(instance), &News::Events(1, vec![KvEvent::Stored(keys)])), Applied::Yes);
}

/// Picks a route for a request and ends the request. Returns the workers and the tokens that they are expected to have cached.
fn place(
    table: &mut WorkerTable,
    prompt: &[u32],
    session: Option<u64>,
    now: Instant,
) -> (String, String, u64) {
    let chains = chains(table, prompt, now);
    let prompt_tokens = prompt.len() as u64;
    let need = Need { prompt_tokens, chains: &chains, session, room: Room(9), ..NEED };
    let picked = table.pick(need, &[], now).unwrap();
    let prefill = picked.prefill.unwrap();
    table.done(Room(9), &[prefill.instance, picked.decode.instance], now);
    // Enough time that the pages of this request do not count any more.
    let later = now + Duration::from_secs(2);
    table.accounts.look(0, &[], later);
    (prefill.name, picked.decode.name, picked.expected)
}

fn prompt() -> Vec<u32> {
    (0..400).collect()
}

#[tokio::test]
async fn each_leg_goes_where_most_of_the_prompt_is() {
    let (mut table, now) = table();
    store(&mut table, 2, &prompt(), 10, now);
    store(&mut table, 3, &prompt(), 20, now);
    for _ in 0..4 {
        assert_eq!(place(&mut table, &prompt(), None, now), ("p2".into(), "d1".into(), 20 * 16));
    }
    let snapshot = table.snapshot(now);
    assert_eq!((snapshot.decisions.all, snapshot.decisions.cached), (4, 4));
    // Requests with another prompt take turns.
    let other = [9; 400];
    let used: Vec<String> = (0..2).map(|_| place(&mut table, &other, None, now).1).collect();
    assert_ne!(used[0], used[1]);
}

#[tokio::test]
async fn requests_of_others_and_those_that_wait_repel() {
    let (mut table, now) = table();
    store(&mut table, 1, &prompt(), 20, now);
    store(&mut table, 3, &prompt(), 20, now);
    assert_eq!(place(&mut table, &prompt(), None, now).1, "d1");
    table.heartbeat(Instance(3), Load { queued: 1, ..Load::default() }, now);
    assert_eq!(place(&mut table, &prompt(), None, now).1, "d1", "it may have waited for a moment only");
    table.heartbeat(Instance(3), Load { queued: 1, ..Load::default() }, now);
    assert_eq!(place(&mut table, &prompt(), None, now), ("p1".into(), "d2".into(), 320), "d1 has no room");
    table.heartbeat(Instance(3), Load::default(), now);
    assert_eq!(place(&mut table, &prompt(), None, now).1, "d1");
    table.heartbeat(Instance(3), Load { running: 30, ..Load::default() }, now);
    assert_eq!(place(&mut table, &prompt(), None, now).1, "d1", "one heartbeat may be late");
    table.heartbeat(Instance(3), Load { running: 30, ..Load::default() }, now);
    assert_eq!(place(&mut table, &prompt(), None, now).1, "d2", "another router has given it much");
}

#[tokio::test]
async fn a_worker_that_is_lost_or_replaced_has_nothing() {
    let (mut table, now) = table();
    store(&mut table, 1, &prompt(), 20, now);
    store(&mut table, 3, &prompt(), 20, now);
    table.lost_sight(Instance(1), "connection refused");
    let snapshot = table.snapshot(now);
    let known = |name: &str| {
        let worker = snapshot.workers.iter().find(|worker| worker.info.name == name).unwrap();
        (worker.known_pages, worker.following.clone())
    };
    assert_eq!(known("p1"), (0, Following::Lost("connection refused".into())));
    assert_eq!(known("d1").0, 20);
    table.suspect(Instance(3), "connection reset", now);
    let info = WorkerInfo { cache_events: true, pages: 1000, ..worker(7, "d1", "decode") };
    table.register(info, now).unwrap();
    assert_eq!(table.snapshot(now).cache.pages, 0);
    assert_eq!(place(&mut table, &prompt(), None, now).2, 0);
    assert_eq!(table.resume(Instance(3)), None, "the old one is not followed");
    assert_eq!(table.resume(Instance(7)), Some(0));
}

#[tokio::test]
async fn a_session_stays_although_nothing_of_the_prompt_is_cached() {
    let (mut table, now) = table();
    let first = place(&mut table, &[1; 400], Some(5), now);
    for turn in 2..8 {
        assert_eq!(place(&mut table, &[turn; 400], Some(5), now), first);
    }
    assert_eq!(table.snapshot(now).decisions.stayed, 6);
    // Other sessions take the other workers.
    assert_ne!(place(&mut table, &[9; 400], Some(6), now), first);
}

#[tokio::test]
async fn without_caches_the_workers_with_the_fewest_requests_are_chosen() {
    let (mut table, now) = (WorkerTable::new(Terms { policy: Policy::Prefix, ..terms() }), Instant::now());
    for (instance, name, role) in [(1, "p1", "prefill"), (3, "d1", "decode"), (4, "d2", "decode")] {
        table.register(worker(instance, name, role), now).unwrap();
    }
    assert!(table.identities(now).is_empty(), "no prompt needs to be hashed");
    table.heartbeat(Instance(3), Load { running: 1, ..Load::default() }, now);
    assert_eq!(place(&mut table, &prompt(), None, now).1, "d2");
}

#[tokio::test]
async fn requests_that_ended_are_forgotten_where_no_route_is_chosen_by_caches() {
    for policy in [Policy::Prefix, Policy::RoundRobin] {
        let (mut table, start) = (WorkerTable::new(Terms { policy, ..terms() }), Instant::now());
        table.register(worker(1, "a", "aggregated"), start).unwrap();
        for room in 0..100 {
            let now = start + Duration::from_millis(500 * room);
            table.heartbeat(Instance(1), Load::default(), now);
            table.pick(NEED, &[], now).unwrap();
            table.done(Room(room), &[Instance(1)], now);
        }
        assert!(table.accounts.settling() <= 3, "{policy:?}: {} are kept", table.accounts.settling());
    }
}

#[tokio::test]
async fn lots_fall_on_every_worker_and_differ_between_requests() {
    let (mut table, now) = (WorkerTable::new(Terms { policy: Policy::Random, ..terms() }), Instant::now());
    for (instance, name) in [(1, "a"), (2, "b"), (3, "c")] {
        table.register(worker(instance, name, "aggregated"), now).unwrap();
    }
    let mut counts = BTreeMap::<String, u32>::new();
    for room in 0..3000 {
        let picked = table.pick(Need { room: Room(room), ..NEED }, &[], now).unwrap();
        *counts.entry(picked.decode.name).or_default() += 1;
    }
    assert!(counts.values().all(|count| (900..1100).contains(count)), "{counts:?}");
}

#[tokio::test]
async fn numbers_that_no_event_has_do_no_harm() {
    let (mut table, _now) = table();
    let cleared = || vec![KvEvent::Cleared];
    let part = |number| News::Part(SnapshotPart { number, part: 0, last: true, keys: Vec::new() });
    for (news, heard) in [
        (News::Events(0, Vec::new()), Applied::Yes),
        (News::Events(0, cleared()), Applied::Repeat),
        (News::Events(u64::MAX, cleared()), Applied::Gap),
        (part(u64::MAX), Applied::Yes),
        (News::Events(u64::MAX, vec![KvEvent::Cleared; 2]), Applied::Yes),
    ] {
        assert_eq!(table.hear(Instance(1), &news), heard, "{news:?}");
        assert!(table.resume(Instance(1)).is_some());
    }
}

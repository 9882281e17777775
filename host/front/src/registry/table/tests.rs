mod prefix;

use super::*;
use host_wire::proto::{KvIdentity, TransferEndpoint};

fn terms() -> Terms {
    Terms {
        model: "m".into(),
        worker_timeout: Duration::from_secs(3),
        lost_after: Duration::from_secs(10),
        max_workers: 4,
        warm_up: false,
        policy: Policy::LeastLoaded,
        seed: 1,
        credentials: Credentials::None,
    }
}

fn worker(instance: u64, name: &str, role: &str) -> WorkerInfo {
    WorkerInfo {
        instance,
        name: name.into(),
        role: role.into(),
        address: format!("http://127.0.0.1:{}", instance % 60_000 + 1),
        identity: Some(KvIdentity {
            model: "m".into(),
            weights: "w".into(),
            executor: "cpu-1".into(),
            dtype: "bf16".into(),
            layout: "page-head-layer-kv-token-dim".into(),
            page_tokens: 16,
            layers: 2,
            kv_heads: 2,
            head_dim: 8,
            ranks: 1,
            sliding_layers: 1,
            window: 64,
        }),
        max_tokens: 100,
        pages: 10,
        transfer: vec![TransferEndpoint { plugin: "shm".into(), ..Default::default() }],
        cache_events: false,
        grammars: false,
        scores: false,
        protocol: 0,
        protocol_oldest: 0,
        metrics: String::new(),
    }
}

const NEED: Need<'static> = Need {
    room: Room(1),
    tokens: 10,
    prompt_tokens: 5,
    chains: &[],
    session: None,
    abilities: Abilities { shaping: false, grammars: false, scores: false },
};

fn names(table: &mut WorkerTable, avoid: &[Instance], now: Instant) -> Result<(String, String), NoRoute> {
    let picked = table.pick(NEED, avoid, now)?;
    Ok((picked.prefill.map(|worker| worker.name).unwrap_or_default(), picked.decode.name))
}

fn no_worker(result: Result<(String, String), NoRoute>) -> String {
    match result {
        Err(NoRoute::NoWorker(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_silent_worker_is_not_chosen_until_it_is_heard_of() {
    let (mut table, start) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "a", "aggregated"), start).unwrap();
    let late = start + Duration::from_millis(3001);
    assert!(names(&mut table, &[], start + Duration::from_secs(3)).is_ok());
    assert!(no_worker(names(&mut table, &[], late)).contains("\"a\" not heard of for 3.0 s"));
    assert_eq!(
        table.heartbeat(Instance(1), Load::default(), late),
        Heard { known: true, is_change: true, is_warming: false }
    );
    assert!(names(&mut table, &[], late).is_ok());
}

#[tokio::test]
async fn in_a_cluster_of_two_releases_a_worker_is_chosen_that_can_do_what_the_request_needs() {
    let (mut table, now) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "old", "aggregated"), now).unwrap();
    let new =
        WorkerInfo { protocol: 3, protocol_oldest: 1, grammars: true, ..worker(2, "new", "aggregated") };
    table.register(new, now).unwrap();
    let mut chosen = |abilities| {
        let need = Need { abilities, ..NEED };
        [(); 4].map(|()| table.pick(need, &[], now).unwrap().decode.name)
    };
    assert_eq!(chosen(Abilities { shaping: true, grammars: false, scores: false }), ["new"; 4]);
    assert_eq!(chosen(Abilities { shaping: false, grammars: true, scores: false }), ["new"; 4]);
    assert_eq!(chosen(Abilities::default()), ["old"; 4], "the other has requests");
}

const DRAINS: Load = Load {
    queued: 0,
    running: 0,
    pages_free: 0,
    pages_held: 0,
    pages_quarantined: 0,
    pages_cached: 0,
    draining: true,
};

#[tokio::test]
async fn a_worker_that_drains_gets_nothing_keeps_what_it_has_and_is_forgotten_when_it_leaves() {
    let (mut table, start) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "a", "aggregated"), start).unwrap();
    assert_eq!(
        table.heartbeat(Instance(1), DRAINS, start),
        Heard { known: true, is_change: true, is_warming: false }
    );
    assert_eq!(
        table.heartbeat(Instance(1), DRAINS, start),
        Heard { known: true, is_change: false, is_warming: false }
    );
    assert!(no_worker(names(&mut table, &[], start)).contains("draining: \"a\""));
    assert!(table.lost(Instance(1), start).is_ok(), "its requests go on");
    // The successor has the same name.
    table.register(worker(2, "a", "aggregated"), start).unwrap();
    assert!(names(&mut table, &[], start).is_ok());
    assert!(table.knows(Instance(1)));
    assert!(table.leave(Instance(1)));
    assert!(!table.leave(Instance(1)));
    assert!(table.lost(Instance(1), start).unwrap_err().contains("has left"));
    assert_eq!(table.snapshot(start).workers.len(), 1);
}

#[tokio::test]
async fn a_new_worker_serves_a_dummy_request_with_a_partner_before_it_gets_others() {
    let (mut table, now) = (WorkerTable::new(Terms { warm_up: true, ..terms() }), Instant::now());
    table.register(worker(1, "p", "prefill"), now).unwrap();
    assert_eq!(table.take_cold(), [Instance(1)]);
    assert_eq!(table.take_cold(), []);
    let alone = table.pick_with(Instance(1), &[], now).unwrap_err();
    assert_eq!(alone, NotNow::Later("no decode worker is there for a first request".into()));
    assert!(table.not_warm(Instance(1), "alone"));
    assert!(!table.not_warm(Instance(1), "alone"), "told once");
    for (instance, name) in [(2, "d"), (3, "d2")] {
        table.register(worker(instance, name, "decode"), now).unwrap();
    }
    assert_eq!(table.take_cold(), [Instance(2), Instance(3)]);
    assert!(no_worker(names(&mut table, &[], now)).contains("warming up: \"p\" alone, \"d\""));
    // A partner with which a dummy request failed comes last.
    let other = table.pick_with(Instance(1), &[Instance(2)], now).unwrap();
    assert_eq!(other.decode.name, "d2");
    table.done(Room(1), &[Instance(1), Instance(3)], now);
    // A worker that is warming up keeps its name.
    assert!(table.register(worker(9, "d", "decode"), now).is_err());
    assert!(table.heartbeat(Instance(2), Load::default(), now).is_warming);
    // Both are new, and one request warms both.
    let picked = table.pick_with(Instance(2), &[], now).unwrap();
    assert_eq!((picked.prefill.unwrap().name, picked.decode.name), ("p".to_owned(), "d".to_owned()));
    table.warmed(&[Instance(1), Instance(2)]);
    assert!(!table.heartbeat(Instance(2), Load::default(), now).is_warming);
    assert_eq!(table.pick_with(Instance(1), &[], now).unwrap_err(), NotNow::Never);
    assert_eq!(names(&mut table, &[], now).unwrap(), ("p".to_owned(), "d".to_owned()));
    // A worker that registers again after a call to it broke is still warm.
    table.register(worker(1, "p", "prefill"), now).unwrap();
    assert_eq!(table.take_cold(), []);
    assert!(matches!(table.pick_with(Instance(9), &[], now), Err(NotNow::Never)));
}

#[tokio::test]
async fn a_worker_of_a_far_release_is_refused_with_both_versions() {
    let mut table = WorkerTable::new(terms());
    let far = WorkerInfo { protocol: 90, protocol_oldest: 80, ..worker(1, "a", "aggregated") };
    let refused = table.register(far, Instant::now()).unwrap_err().to_string();
    assert!(refused.contains("80 to 90"), "{refused}");
}

#[tokio::test]
async fn a_broken_worker_is_not_chosen_until_it_is_heard_of() {
    let (mut table, start) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "a", "aggregated"), start).unwrap();
    assert!(table.suspect(Instance(1), "connection reset", start));
    assert!(!table.suspect(Instance(1), "connection reset", start), "told once");
    assert!(no_worker(names(&mut table, &[], start)).contains("connection reset"));
    assert!(table.heartbeat(Instance(1), Load::default(), start).is_change);
    assert!(names(&mut table, &[], start).is_ok());
}

#[tokio::test]
async fn workers_that_broke_are_remembered_with_the_time() {
    let (mut table, start) = (WorkerTable::new(terms()), Instant::now());
    let later = |seconds| start + Duration::from_secs(seconds);
    for instance in 1..=2 {
        table.register(worker(instance, &format!("w{instance}"), "aggregated"), start).unwrap();
    }
    assert!(!table.another_broke(start, &[]));
    table.suspect(Instance(1), "connection reset", later(1));
    assert!(table.another_broke(start, &[]));
    assert!(table.another_broke(later(1), &[Instance(2)]));
    assert!(!table.another_broke(start, &[Instance(1)]), "the request was on it");
    assert!(!table.another_broke(later(2), &[]), "before the request came");
    for second in 2..200 {
        table.heartbeat(Instance(2), Load::default(), later(second));
        table.suspect(Instance(2), "connection reset", later(second));
    }
    assert!(table.another_broke(later(199), &[Instance(1)]));
    assert!(!table.another_broke(start, &[Instance(2)]), "the latest are remembered");
}

#[tokio::test]
async fn a_name_belongs_to_the_live_worker_that_has_it() {
    let (mut table, start) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "a", "aggregated"), start).unwrap();
    let refused = table.register(worker(2, "a", "aggregated"), start).unwrap_err().to_string();
    for part in ["\"a\"", "http://127.0.0.1:2", "http://127.0.0.1:3", "--name"] {
        assert!(refused.contains(part), "{refused}");
    }
    assert!(table.heartbeat(Instance(1), Load::default(), start).known);
    assert!(!table.heartbeat(Instance(2), Load::default(), start).known);
    table.register(worker(1, "a", "aggregated"), start).unwrap();
}

#[tokio::test]
async fn an_instance_that_is_registered_keeps_its_address() {
    let (mut table, start) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "a", "aggregated"), start).unwrap();
    let mut hijacked = worker(1, "b", "aggregated");
    hijacked.address = "http://127.0.0.1:9999".into();
    let refused = table.register(hijacked, start).unwrap_err().to_string();
    assert!(refused.contains("is registered at http://127.0.0.1:2"), "{refused}");
    assert_eq!(names(&mut table, &[], start).unwrap().1, "a");
    let mut endless = worker(3, "c", "aggregated");
    endless.pages = u32::MAX;
    let refused = table.register(endless, start).unwrap_err().to_string();
    assert!(refused.contains("4294967295 pages; at most 16777216"), "{refused}");
}

#[tokio::test]
async fn a_new_instance_replaces_the_old_one_of_its_name_when_that_is_gone() {
    type Gone = fn(&mut WorkerTable, &mut WorkerInfo, Instant) -> Instant;
    let silent: Gone = |_, _, start| start + Duration::from_millis(3001);
    let broken: Gone = |table, _, start| {
        table.suspect(Instance(1), "connection reset", start);
        start
    };
    let same_address: Gone = |_, new, start| {
        new.address = worker(1, "a", "aggregated").address;
        start
    };
    for gone in [silent, broken, same_address] {
        let (mut table, start) = (WorkerTable::new(terms()), Instant::now());
        table.register(worker(1, "a", "aggregated"), start).unwrap();
        let mut new = worker(2, "a", "aggregated");
        let now = gone(&mut table, &mut new, start);
        table.register(new, now).unwrap();
        assert!(table.lost(Instance(1), now).unwrap_err().contains("replaced"));
        assert!(!table.heartbeat(Instance(1), Load::default(), now).known);
        assert_eq!(table.pick(NEED, &[], now).unwrap().decode.instance, Instance(2));
    }
}

#[tokio::test]
async fn a_worker_is_lost_only_after_the_longer_wait() {
    let (mut table, start) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "a", "aggregated"), start).unwrap();
    assert!(table.lost(Instance(1), start + Duration::from_secs(10)).is_ok());
    let again = table.lost(Instance(1), start).unwrap();
    assert!(table.lost(Instance(1), again).is_err(), "the time to ask again is when the answer changes");
}

#[tokio::test]
async fn each_field_of_the_identity_must_agree_and_both_values_are_named() {
    type Change = (&'static str, fn(&mut KvIdentity));
    let changes: [Change; 10] = [
        ("weights is \"w\" on prefill and \"x\" on decode", |id| id.weights = "x".into()),
        ("executor is \"cpu-1\" on prefill and \"x\" on decode", |id| id.executor = "x".into()),
        ("dtype is \"bf16\" on prefill and \"x\" on decode", |id| id.dtype = "x".into()),
        ("layout is \"page-head-layer-kv-token-dim\" on prefill and \"x\"", |id| id.layout = "x".into()),
        ("page_tokens is 16 on prefill and 99 on decode", |id| id.page_tokens = 99),
        ("layers is 2 on prefill and 99 on decode", |id| id.layers = 99),
        ("kv_heads is 2 on prefill and 99 on decode", |id| id.kv_heads = 99),
        ("head_dim is 8 on prefill and 99 on decode", |id| id.head_dim = 99),
        ("sliding_layers is 1 on prefill and 99 on decode", |id| id.sliding_layers = 99),
        ("window is 64 on prefill and 99 on decode", |id| id.window = 99),
    ];
    for (sentence, change) in changes {
        let (mut table, now) = (WorkerTable::new(terms()), Instant::now());
        let mut decode = worker(2, "d", "decode");
        change(decode.identity.as_mut().unwrap());
        assert_eq!(table.register(worker(1, "p", "prefill"), now).unwrap().refused_pairs, "");
        let reply = table.register(decode, now).unwrap().refused_pairs;
        assert!(reply.contains(sentence), "{reply}");
        assert!(no_worker(names(&mut table, &[], now)).contains(sentence));
        assert_eq!(table.snapshot(now).refused_pairs, [reply]);
    }
}

#[tokio::test]
async fn a_pair_may_differ_in_layout_and_ranks() {
    let (mut table, now) = (WorkerTable::new(terms()), Instant::now());
    let mut decode = worker(2, "d", "decode");
    if let Some(identity) = &mut decode.identity {
        identity.layout = "layer-kv-page-token-head-dim".into();
        identity.ranks = 3;
    }
    decode.transfer = (0..3).map(|rank| TransferEndpoint { rank, ..decode.transfer[0].clone() }).collect();
    assert_eq!(table.register(worker(1, "p", "prefill"), now).unwrap().refused_pairs, "");
    assert_eq!(table.register(decode, now).unwrap().refused_pairs, "");
    assert_eq!(names(&mut table, &[], now), Ok(("p".into(), "d".into())));
}

#[tokio::test]
async fn a_pair_needs_a_transfer_plugin_in_common() {
    let (mut table, now) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "p", "prefill"), now).unwrap();
    let mut decode = worker(2, "d", "decode");
    decode.transfer[0].plugin = "nixl".into();
    let reply = table.register(decode.clone(), now).unwrap().refused_pairs;
    assert!(reply.contains("no transfer plugin in common: shm and nixl"), "{reply}");
    decode.transfer.push(TransferEndpoint { plugin: "shm".into(), ..Default::default() });
    assert_eq!(table.register(decode, now).unwrap().refused_pairs, "");
    assert_eq!(names(&mut table, &[], now), Ok(("p".into(), "d".into())));
}

#[tokio::test]
async fn requests_go_where_the_load_is_least_and_in_turn_among_equals() {
    let (mut table, now) = (WorkerTable::new(terms()), Instant::now());
    for (instance, name, role) in
        [(1, "p1", "prefill"), (2, "p2", "prefill"), (3, "d1", "decode"), (4, "d2", "decode")]
    {
        table.register(worker(instance, name, role), now).unwrap();
    }
    let first = names(&mut table, &[], now).unwrap();
    let second = names(&mut table, &[], now).unwrap();
    assert!(first.0 != second.0 && first.1 != second.1, "{first:?} {second:?}");
    table.done(Room(1), &[Instance(1), Instance(2), Instance(3), Instance(4)], now);
    table.heartbeat(Instance(3), Load { running: 5, ..Default::default() }, now);
    for _ in 0..3 {
        assert_eq!(names(&mut table, &[], now).unwrap().1, "d2");
    }
}

#[tokio::test]
async fn workers_that_failed_the_request_come_last_but_come() {
    let (mut table, now) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "a", "aggregated"), now).unwrap();
    table.register(worker(2, "b", "aggregated"), now).unwrap();
    table.heartbeat(Instance(2), Load { running: 50, ..Default::default() }, now);
    assert_eq!(names(&mut table, &[Instance(1)], now).unwrap().1, "b");
    assert_eq!(names(&mut table, &[Instance(1), Instance(2)], now).unwrap().1, "a");
}

#[tokio::test]
async fn a_request_that_fits_no_worker_is_told_the_largest_that_fits() {
    let (mut table, now) = (WorkerTable::new(terms()), Instant::now());
    table.register(worker(1, "p", "prefill"), now).unwrap();
    let mut decode = worker(2, "d", "decode");
    decode.max_tokens = 50;
    table.register(decode, now).unwrap();
    assert_eq!(table.pick(Need { tokens: 51, ..NEED }, &[], now).unwrap_err(), NoRoute::TooLong(50));
    assert!(table.pick(Need { tokens: 50, ..NEED }, &[], now).is_ok());
    assert_eq!(table.snapshot(now).max_tokens, Some(50));
}

#[tokio::test]
async fn registrations_that_make_no_sense_are_refused_by_name() {
    let mut table = WorkerTable::new(terms());
    let now = Instant::now();
    type Change = (&'static str, fn(&mut WorkerInfo));
    let changes: [Change; 13] = [
        ("instance is 0", |worker| worker.instance = 0),
        ("unknown role \"boss\"", |worker| worker.role = "boss".into()),
        ("name is empty", |worker| worker.name.clear()),
        ("name has 300 bytes", |worker| worker.name = "x".repeat(300)),
        ("http://host:port", |worker| worker.address = "not an address".into()),
        ("no KV identity", |worker| worker.identity = None),
        ("max_tokens is 0", |worker| worker.max_tokens = 0),
        ("page_tokens is 0", |worker| worker.identity.as_mut().unwrap().page_tokens = 0),
        ("serves model \"n\" and this router \"m\"", |worker| {
            worker.identity.as_mut().unwrap().model = "n".into();
        }),
        ("17 transfer endpoints", |worker| worker.transfer = vec![worker.transfer[0].clone(); 17]),
        ("ranks is 300", |worker| worker.identity.as_mut().unwrap().ranks = 300),
        ("plugin \"shm\" on rank 1, but has 1", |worker| worker.transfer[0].rank = 1),
        ("plugin \"shm\" on rank 0 twice", |worker| worker.transfer = vec![worker.transfer[0].clone(); 2]),
    ];
    for (sentence, change) in changes {
        let mut info = worker(1, "a", "aggregated");
        change(&mut info);
        let refused = table.register(info, now).unwrap_err().to_string();
        assert!(refused.contains(sentence), "{refused}");
    }
    for instance in 1..=4 {
        table.register(worker(instance, &format!("w{instance}"), "aggregated"), now).unwrap();
    }
    assert!(table.register(worker(5, "w5", "aggregated"), now).unwrap_err().to_string().contains("limit"));
    table.suspect(Instance(4), "connection reset", now);
    table.register(worker(6, "w4", "aggregated"), now).unwrap();
    let much_later = now + Duration::from_secs(301);
    table.register(worker(5, "w5", "aggregated"), much_later).unwrap();
    assert_eq!(table.snapshot(much_later).workers.len(), 1, "the silent are forgotten");
}

#[tokio::test]
async fn a_pair_and_an_aggregated_worker_take_turns() {
    for policy in [Policy::RoundRobin, Policy::LeastLoaded] {
        let (mut table, now) = (WorkerTable::new(Terms { policy, ..terms() }), Instant::now());
        for (instance, name, role) in [(1, "p", "prefill"), (2, "d", "decode"), (3, "a", "aggregated")] {
            table.register(worker(instance, name, role), now).unwrap();
        }
        let mut alone = 0;
        for _ in 0..10 {
            let (prefill, _) = names(&mut table, &[], now).unwrap();
            alone += u32::from(prefill.is_empty());
            table.done(NEED.room, &[Instance(1), Instance(2), Instance(3)], now);
        }
        assert_eq!(alone, 5, "{policy:?}");
    }
}

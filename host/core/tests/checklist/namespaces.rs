//! Which requests share pages with each other.

use host_core::message::{Body, Reserve};
use host_core::radix::NamespaceKey;
use host_core::request::{FailureCode, Request};
use host_core::{PageId, Role, Room};
use host_sim::{Leg, PAGE};

use super::leg::{config, tokens};

fn salted(salt: &str) -> NamespaceKey {
    NamespaceKey { salt: salt.into(), ..NamespaceKey::default() }
}

/// Runs a request to its end on a worker without a transfer. Returns the prompt tokens that were cached.
fn ask(leg: &mut Leg, room: u64, prompt: &[u32], change: impl FnOnce(&mut Request)) -> u64 {
    let before = leg.stats().cached_tokens;
    let mut request = leg.request(room, prompt, 1);
    change(&mut request);
    leg.send(request);
    leg.compute_all();
    assert!(leg.finished.contains(&Room(room)));
    leg.stats().cached_tokens - before
}

#[test]
fn equal_prompts_share_pages_within_a_namespace_and_never_across() {
    let mut leg = Leg::with(config(Role::Aggregated, 32));
    let prompt = tokens(0..13);
    let keys = [
        NamespaceKey::default(),
        salted("tenant"),
        NamespaceKey { extra_key: "tenant".into(), ..NamespaceKey::default() },
        NamespaceKey { model: "tenant".into(), ..NamespaceKey::default() },
    ];
    for (room, key) in (0..).zip(&keys) {
        let cached = ask(&mut leg, room, &prompt, |request| request.namespace = key.clone());
        assert_eq!(cached, 0, "{key:?} found another's pages");
    }
    for (room, key) in (10..).zip(&keys) {
        let cached = ask(&mut leg, room, &prompt, |request| request.namespace = key.clone());
        assert_eq!(cached, 12, "{key:?} lost its pages");
    }
    assert_eq!(leg.stats().pool.cached, keys.len() * 3);
    leg.at_rest();
}

#[test]
fn a_request_without_cache_finds_nothing_and_leaves_nothing() {
    let mut leg = Leg::with(config(Role::Aggregated, 32));
    let prompt = tokens(0..12);
    assert_eq!(ask(&mut leg, 1, &prompt, |request| request.no_cache = true), 0);
    assert_eq!(leg.stats().pool.cached, 0, "a warm-up entered the tree");
    assert_eq!(ask(&mut leg, 2, &prompt, |_| {}), 0);
    assert_eq!(ask(&mut leg, 3, &prompt, |request| request.no_cache = true), 0);
    assert_eq!(ask(&mut leg, 4, &prompt, |_| {}), 8);
    leg.at_rest();
}

#[test]
fn a_client_that_invents_salts_shuts_no_other_out() {
    let mut leg = Leg::with(config(Role::Aggregated, 4));
    for room in 0..1000 {
        let salt = format!("invented {room}");
        // Every second request has too few tokens to leave a page.
        let length = if room % 2 == 0 { 9 } else { 3 };
        ask(&mut leg, room, &tokens(0..length), |request| request.namespace = salted(&salt));
    }
    let mine = |request: &mut Request| request.namespace = salted("mine");
    ask(&mut leg, 1000, &tokens(0..9), mine);
    assert_eq!(ask(&mut leg, 1001, &tokens(0..9), mine), 8);
    assert!(leg.stats().namespaces <= 4, "{} namespaces with pages in 4 pages", leg.stats().namespaces);
    leg.at_rest();
}

#[test]
fn a_salt_that_is_too_long_is_refused() {
    let mut leg = Leg::with(config(Role::Aggregated, 4));
    let mut request = leg.request(1, &[1], 1);
    request.namespace = salted(&"x".repeat(NamespaceKey::MAX_PART + 1));
    leg.send(request);
    let failure = &leg.failed[&Room(1)];
    assert_eq!(failure.code, FailureCode::Invalid);
    assert!(failure.message.contains("256 bytes"), "{}", failure.message);
}

#[test]
fn prefill_refuses_a_reserve_of_another_namespace_whichever_comes_first() {
    let prompt = tokens(0..6);
    let reserve = Reserve {
        window: Vec::new(),
        pages: vec![PageId(0), PageId(1)],
        decode_prefix_len: 0,
        prompt_tokens: 6,
        aux_slot: 0,
        namespace: salted("other").fingerprint(),
    };
    assert_eq!(prompt.len().div_ceil(PAGE), reserve.pages.len());
    let refused = |leg: &Leg| {
        leg.sent.iter().any(|message| match &message.body {
            Body::Refused { message, retryable } => message.contains("namespace") && !retryable,
            _ => false,
        })
    };
    let mut leg = Leg::with(config(Role::Prefill, 8));
    leg.submit(1, &prompt, 1);
    leg.message(1, 1, Body::Reserve(reserve.clone()));
    assert!(refused(&leg) && leg.batch.is_none(), "{:?}", leg.sent);

    let mut leg = Leg::with(config(Role::Prefill, 8));
    leg.message(1, 1, Body::Reserve(reserve));
    leg.submit(1, &prompt, 1);
    assert!(refused(&leg), "{:?}", leg.sent);
    assert_eq!(leg.failed[&Room(1)].code, FailureCode::Invalid);
    leg.at_rest();
}

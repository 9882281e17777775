//! Decode holds every page that it promises to hold.

use host_core::message::{Body, Reserve};
use host_core::radix::NamespaceKey;
use host_core::{PageId, Role, Room};
use host_sim::{Leg, PAGE};

use super::leg::{config, tokens};

#[test]
fn a_promise_is_whole_pages_and_never_more_than_the_prompt() {
    let mut leg = Leg::with(config(Role::Decode, 512));
    leg.submit(0, &tokens(0..30), 1);
    leg.deliver(0);
    for length in 1..40 {
        let prompt = tokens(0..length);
        leg.submit(u64::from(length), &prompt, 1);
        let reserve = &leg.reserves[&Room(u64::from(length))].1;
        let promised = reserve.decode_prefix_len as usize;
        // Pages of the first request hold 28 of its 30 tokens. Longer prompts leave further pages for the prompts after
        // them.
        let known = if length <= 32 { 28 } else { (length as usize - 1) / PAGE * PAGE };
        assert_eq!(promised, (length as usize / PAGE * PAGE).min(known), "prompt of {length}");
        assert_eq!(reserve.pages.len(), prompt.len().div_ceil(PAGE) - promised / PAGE);
        leg.deliver(u64::from(length));
    }
    leg.at_rest();
}

#[test]
fn promised_pages_stay_when_everything_else_is_evicted() {
    let mut leg = Leg::with(host_core::Config { reserved_decode_tokens: 1, ..config(Role::Decode, 10) });
    leg.submit(0, &tokens(0..8), 1);
    leg.deliver(0);
    leg.submit(1, &tokens(0..12), 2);
    let promised = leg.reserves[&Room(1)].1.decode_prefix_len;
    assert_eq!(promised, 8);
    // Other requests fill the rest of the pool, again and again.
    for room in 10..20 {
        leg.submit(room, &tokens(room as u32 * 20..room as u32 * 20 + 24), 1);
        leg.deliver(room);
    }
    assert!(leg.stats().evicted_pages > 20);
    assert_eq!(leg.stats().locked_pages, 2, "the promise");
    leg.deliver(1);
    let table = &leg.batch.as_ref().unwrap().sequences[0].pages;
    assert_eq!(table.len(), 4);
    assert_eq!(table[2], leg.reserves[&Room(1)].1.pages[0], "prefix, then what was sent");
    leg.compute_all();
    leg.at_rest();
}

#[test]
fn prefill_refuses_promises_that_cannot_be() {
    let prompt = tokens(0..10);
    let good = Reserve {
        window: Vec::new(),
        pages: vec![PageId(0), PageId(1), PageId(2)],
        decode_prefix_len: 0,
        prompt_tokens: 10,
        aux_slot: 0,
        namespace: NamespaceKey::default().fingerprint(),
    };
    let wrong = [
        ("tokens", Reserve { prompt_tokens: 9, ..good.clone() }),
        ("whole pages", Reserve { decode_prefix_len: 3, pages: good.pages[..2].to_vec(), ..good.clone() }),
        ("whole pages", Reserve { decode_prefix_len: 12, pages: Vec::new(), ..good.clone() }),
        ("pages where", Reserve { decode_prefix_len: 4, ..good.clone() }),
        ("pages where", Reserve { pages: good.pages[..2].to_vec(), ..good.clone() }),
    ];
    for (words, reserve) in wrong {
        let mut leg = Leg::with(config(Role::Prefill, 64));
        leg.submit(1, &prompt, 1);
        leg.message(1, 1, Body::Reserve(reserve.clone()));
        let refusal = leg.sent.iter().find_map(|message| match &message.body {
            Body::Refused { message, retryable: false } => Some(message.clone()),
            _ => None,
        });
        assert!(refusal.as_ref().is_some_and(|text| text.contains(words)), "{reserve:?}: {refusal:?}");
        assert!(leg.batch.is_none());
    }
    let mut leg = Leg::with(config(Role::Prefill, 64));
    leg.submit(1, &prompt, 1);
    leg.message(1, 1, Body::Reserve(good));
    assert!(leg.batch.is_some());
}

#[test]
fn what_arrives_twice_is_kept_once_and_both_requests_go_on() {
    // The second request does not follow the first any more, because the first is too slow.
    let mut leg = Leg::with(config(Role::Decode, 64));
    let prompt = tokens(0..18);
    leg.submit(1, &prompt, 3);
    leg.submit(2, &prompt, 3);
    leg.answer_messages();
    leg.wait(config(Role::Decode, 1).bootstrap_timeout / 2);
    assert_eq!(leg.reserves.len(), 2);
    leg.deliver(2);
    leg.deliver(1);
    assert_eq!(leg.stats().pool.cached, 4);
    // Both requests compute with the tree's pages, and each with a page of its own behind them.
    leg.compute();
    let tables: Vec<_> =
        leg.batch.as_ref().unwrap().sequences.iter().map(|sequence| &sequence.pages).collect();
    assert_eq!(tables.len(), 2);
    assert_eq!(tables[0][..4], tables[1][..4]);
    assert_ne!(tables[0][4], tables[1][4]);
    leg.compute_all();
    assert_eq!(leg.stats().pool.cached, 4 + 1, "prompt and the answers' only whole page");
    leg.at_rest();
}

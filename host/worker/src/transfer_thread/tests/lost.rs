//! Peers that are gone.

use super::*;

#[test]
fn one_rank_that_is_gone_loses_the_link_and_all_of_it_is_fenced() {
    let (mut prefill, mut decode, wire) = pair((4, ORDERS[0]), (2, ORDERS[0]));
    let session = decode.links.get(PREFILL).unwrap().session;
    wire.lose(&rank_name(PREFILL, 3));
    let event = decode.event();
    assert_eq!(event, Event::PeerLost { peer: PREFILL, session, fenced: false });
    decode.links.fence(PREFILL, session).unwrap();
    assert!(decode.links.get(PREFILL).is_none());
    assert_eq!(decode.nodes.iter().map(|node| node.connections()).sum::<usize>(), 0);
    let session = prefill.links.get(DECODE).unwrap().session;
    prefill.write(parts(session).swap_remove(2));
    let Event::Written { error, .. } = prefill.event() else { panic!("not written") };
    assert!(error.is_some(), "a write went through a fence");
}

#[test]
fn all_pairs_of_ranks_are_fenced_at_the_same_time() {
    let (_prefill, decode, wire) = pair((4, ORDERS[0]), (2, ORDERS[0]));
    let link = decode.links.get(PREFILL).unwrap();
    wire.fences_meet(4);
    decode.links.fence(PREFILL, link.session).unwrap();
    assert_eq!(decode.nodes.iter().map(|node| node.connections()).sum::<usize>(), 0);
}

#[test]
fn news_that_a_peer_is_gone_is_of_the_link_that_was_in_use_when_it_came() {
    let (mut prefill, decode, wire) = pair((2, ORDERS[0]), (1, ORDERS[0]));
    let session = prefill.links.get(DECODE).unwrap().session;
    let (links, info) = (prefill.links.clone(), decode.info());
    // The peer is back before the notification is handled.
    let again = move || assert!(links.connect(&info).unwrap() > session);
    wire.lose_to(&rank_name(PREFILL, 1), &rank_name(DECODE, 0), again);
    assert_eq!(prefill.event(), Event::PeerLost { peer: DECODE, session, fenced: false });
}

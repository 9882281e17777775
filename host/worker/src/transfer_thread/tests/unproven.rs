//! A backend that does not say which writes have settled: a write that did not end well is in flight until its peer is
//! cut off.

use super::*;

fn sides(ranks: usize) -> (Side, Side, Arc<Wire>, u64) {
    let (prefill, mut decode, wire) = pair_over(Wire::unproven(), (ranks, ORDERS[0]), (1, ORDERS[0]));
    decode.open(1, &EXPECTED);
    let session = prefill.links.get(DECODE).unwrap().session;
    (prefill, decode, wire, session)
}

fn lost(session: u64) -> Event {
    Event::PeerLost { peer: DECODE, session, fenced: false }
}

#[test]
fn a_write_that_failed_has_settled_when_its_peer_is_cut_off_and_the_scheduler_is_told_once_to_do_so() {
    let (mut prefill, _decode, wire, session) = sides(1);
    wire.fail(&rank_name(PREFILL, 0));
    let [first, second, third] = <[PageWrite; 3]>::try_from(parts(session)).unwrap();
    prefill.write(first);
    assert_eq!(prefill.event(), lost(session));
    prefill.write(second);
    assert_eq!(prefill.told(&third), [], "the fence is the scheduler's to ask for, and not proven");
    // Not proven: nothing has settled.
    wire.fences_fail(&rank_name(PREFILL, 0), 1);
    prefill.links.fence(DECODE, session).unwrap_err();
    assert_eq!(prefill.told(&third), []);
    prefill.links.fence(DECODE, session).unwrap();
    let mut ended = [prefill.event(), prefill.event()].map(|event| match event {
        Event::Written { tag, error } => (tag.0, error.is_some()),
        other => panic!("{other:?}"),
    });
    ended.sort_unstable();
    assert_eq!(ended, [(1, true), (2, true)]);
}

#[test]
fn a_write_that_was_cancelled_has_settled_when_its_peer_is_cut_off_also_where_the_backend_wrote_it() {
    let (mut prefill, mut decode, wire, session) = sides(1);
    wire.hold(true);
    let [first, _, third] = <[PageWrite; 3]>::try_from(parts(session)).unwrap();
    prefill.write(first.clone());
    assert_eq!(prefill.told(&third), []);
    prefill.ask(&Command::Cancel(first.tag));
    assert_eq!(prefill.told(&third), []);
    wire.hold(false);
    assert!(matches!(decode.event(), Event::Arrived(_)), "it was written all the same");
    assert_eq!(prefill.event(), lost(session));
    prefill.links.fence(DECODE, session).unwrap();
    assert!(matches!(prefill.event(), Event::Written { tag: Tag(1), error: Some(_) }));
}

#[test]
fn writes_that_end_well_have_settled_and_cut_no_peer_off() {
    let (mut prefill, mut decode, _wire, session) = sides(2);
    for part in parts(session) {
        prefill.write(part);
    }
    for _ in 0..3 {
        assert!(matches!(prefill.event(), Event::Written { error: None, .. }));
        assert!(matches!(decode.event(), Event::Arrived(_)));
    }
    assert!(prefill.links.get(DECODE).is_some());
}

#[test]
fn a_staged_piece_that_failed_keeps_its_place_until_its_peer_is_cut_off() {
    let wire = Wire::unproven();
    let (always, bytes) = (StagingMode::Always, 1 << 16);
    let mut prefill = Side::staging(&wire, "prefill", 1, ORDERS[0], 7, always, bytes);
    let mut decode = Side::staging(&wire, "decode", 1, ORDERS[1], 9, always, bytes);
    prefill.fill();
    decode.links.connect(&prefill.info()).unwrap();
    let session = prefill.links.connect(&decode.info()).unwrap();
    decode.open(1, &EXPECTED);
    wire.fail_writes(&rank_name(PREFILL, 0));
    prefill.write(parts(session).swap_remove(0));
    assert_eq!(prefill.event(), lost(session));
    prefill.links.fence(DECODE, session).unwrap();
    assert!(matches!(prefill.event(), Event::Written { tag: Tag(1), error: Some(_) }));
}

//! Parts that go through staging memory.

use super::*;

/// Staging memory of each rank. Its pieces have at most 512 bytes, and the transfer in these tests has many of them.
pub(super) const STAGING: usize = 4096;

fn staged_pair(
    from: (usize, KvOrder),
    to: (usize, KvOrder),
    modes: [StagingMode; 2],
) -> (Side, Side, Arc<Wire>) {
    let wire = Wire::new();
    let side = |role, (ranks, order), pages, mode| {
        let bytes = if mode == StagingMode::Never { 0 } else { STAGING };
        Side::staging(&wire, role, ranks, order, pages, mode, bytes)
    };
    let mut prefill = side("prefill", from, 7, modes[0]);
    let decode = side("decode", to, 9, modes[1]);
    prefill.fill();
    decode.links.connect(&prefill.info()).unwrap();
    prefill.links.connect(&decode.info()).unwrap();
    (prefill, decode, wire)
}

const ALWAYS: [StagingMode; 2] = [StagingMode::Always; 2];

pub(super) fn staged_bytes(side: &Side) -> u64 {
    side.links.counters().staged.read().0
}

pub(super) fn assert_received(decode: &mut Side) {
    let found = decode.verify(1, &EXPECTED);
    assert!(found.lanes.unwrap().iter().all(|lane| lane.sent == lane.found && lane.sent != 0));
    assert_eq!(AuxRow::decode(&found.aux_row), Ok(row()));
    for kv in decode.pools.iter().map(gpu_pools::in_host_memory) {
        let first = kv.heads().start;
        for (page, head, layer, side, token) in rows(9, kv.heads().len()) {
            let sent = EXPECTED.iter().position(|other| *other == page);
            let wanted = sent.map_or(0, |at| byte(SENT[at], first + head, layer, side, token));
            let row = kv.read_row(PageId(page), head, layer, side, token);
            assert!(row.iter().all(|byte| *byte == wanted), "page {page} head {head} layer {layer}");
        }
    }
}

#[test]
fn staged_parts_bring_every_head_to_its_place_whatever_ranks_and_layouts() {
    for ranks in [(1, 1), (4, 2), (2, 4), (3, 2), (16, 3), (3, 16)] {
        for orders in ORDERS.iter().flat_map(|from| ORDERS.map(|to| (*from, to))) {
            let (mut prefill, mut decode, _wire) =
                staged_pair((ranks.0, orders.0), (ranks.1, orders.1), ALWAYS);
            transfer(&mut prefill, &mut decode);
            assert_received(&mut decode);
            let page: u64 = (HEADS * LAYERS * 2 * TOKENS * 2 * 4) as u64;
            let most = if ranks.1 > HEADS { 2 } else { 1 };
            assert!(staged_bytes(&prefill) >= 5 * page && staged_bytes(&prefill) <= most * 5 * page);
            let (bytes, writes) = prefill.links.counters().direct.read();
            assert_eq!((bytes, writes), (256, 1), "the aux row");
        }
    }
}

#[test]
fn a_side_without_staging_memory_is_sent_to_directly() {
    for modes in [[StagingMode::Always, StagingMode::Never], [StagingMode::Never, StagingMode::Always]] {
        let (mut prefill, mut decode, _wire) = staged_pair((4, ORDERS[1]), (2, ORDERS[1]), modes);
        transfer(&mut prefill, &mut decode);
        assert_received(&mut decode);
        assert_eq!(staged_bytes(&prefill), 0);
    }
}

#[test]
fn only_small_pieces_are_staged_unless_told_otherwise() {
    let auto = [StagingMode::Auto; 2];
    for (orders, staged) in [((ORDERS[0], ORDERS[0]), false), ((ORDERS[1], ORDERS[1]), true)] {
        let (mut prefill, mut decode, _wire) = staged_pair((2, orders.0), (1, orders.1), auto);
        transfer(&mut prefill, &mut decode);
        assert_received(&mut decode);
        assert_eq!(staged_bytes(&prefill) > 0, staged, "{orders:?}");
    }
}

#[test]
fn a_staged_write_that_is_cancelled_settles_and_the_rings_are_free_when_the_room_is_forgotten() {
    let (mut prefill, mut decode, wire) = staged_pair((2, ORDERS[1]), (4, ORDERS[1]), ALWAYS);
    decode.open(1, &EXPECTED);
    wire.hold(true);
    let session = prefill.links.get(DECODE).unwrap().session;
    prefill.write(parts(session).swap_remove(0));
    prefill.ask(&Command::Cancel(Tag(1)));
    wire.hold(false);
    let Event::Written { error, .. } = prefill.event() else { panic!("not written") };
    assert_eq!(error.as_deref(), Some("cancelled"));
    decode.barrier.close(ROOM);
    decode.ask(&Command::CloseRoom(ROOM));
    loop {
        match decode.event() {
            Event::RoomClosed { room } => break assert_eq!(room, ROOM),
            event => assert!(matches!(event, Event::Arrived(_)), "{event:?}"),
        }
    }
    decode.ask(&Command::ForgetRoom(ROOM));
    // Another attempt receives all pages.
    decode.barrier.forget(ROOM);
    decode.open(2, &EXPECTED);
    for mut part in parts(session) {
        (part.notice.attempt, part.tag) = (2, Tag(part.tag.0 + 10));
        prefill.write(part);
    }
    let mut arrived = 0;
    while arrived < 3 {
        arrived += usize::from(matches!(decode.event(), Event::Arrived(_)));
    }
    let found = decode.verify(2, &EXPECTED);
    assert!(found.lanes.unwrap().iter().all(|lane| lane.sent == lane.found && lane.sent != 0));
}

#[test]
fn a_staged_write_over_a_link_that_is_cut_settles() {
    let (mut prefill, mut decode, wire) = staged_pair((2, ORDERS[1]), (4, ORDERS[1]), ALWAYS);
    decode.open(1, &EXPECTED);
    wire.hold(true);
    let session = prefill.links.get(DECODE).unwrap().session;
    prefill.write(parts(session).swap_remove(0));
    decode.nodes.iter().for_each(|node| node.until_told());
    // All ranks have been asked, and none has answered.
    prefill.links.fence(DECODE, session).unwrap();
    wire.hold(false);
    let Event::Written { error, .. } = prefill.event() else { panic!("not written") };
    assert!(error.is_some());
}

#[test]
fn a_rank_that_cannot_write_fails_the_staged_write_when_all_have_settled() {
    let (mut prefill, mut decode, wire) = staged_pair((4, ORDERS[0]), (2, ORDERS[0]), ALWAYS);
    decode.open(1, &EXPECTED);
    wire.fail(&rank_name(PREFILL, 2));
    let session = prefill.links.get(DECODE).unwrap().session;
    prefill.write(parts(session).swap_remove(2));
    // The asks of rank 2 fail, until the write is cancelled.
    prefill.ask(&Command::Cancel(Tag(3)));
    let Event::Written { error, .. } = prefill.event() else { panic!("not written") };
    assert!(error.is_some());
}

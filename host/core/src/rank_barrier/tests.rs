use std::collections::VecDeque;

use crate::heads::head_lanes;

use super::*;

const PEER: Instance = Instance(9);
const ROOM: Room = Room(7);

fn opening(attempt: u32) -> RoomOpening {
    RoomOpening { room: ROOM, attempt, peer: PEER, session: 1, pages: Vec::new(), parts: 10 }
}

/// A barrier with an open room, for a prefill worker of `sources` ranks and ours of `targets` ranks.
fn open(heads: usize, sources: usize, targets: usize) -> RankBarrier {
    let mut barrier = RankBarrier::new(targets);
    barrier.open(&opening(1), head_lanes(heads, sources, targets));
    barrier
}

/// The event that the scheduler gets for a report.
fn take(barrier: &mut RankBarrier, report: Report) -> Option<Event> {
    barrier.take(report).unwrap_or_else(|contradiction| Some(contradiction.event()))
}

fn notice(sequence: u32) -> Notice {
    Notice { room: ROOM, attempt: 1, sequence, pages: 2, last: false }
}

/// A fragment of a part. Each lane has its own sum for each part.
fn landed((source, target): (usize, usize), sequence: u32, (fragment, fragments): (u32, u32)) -> Report {
    let notice = LaneNotice {
        notice: notice(sequence),
        fragment,
        fragments,
        sum: sum(source, target, sequence),
        alone: false,
        source: source as u8,
        target: target as u8,
    };
    Report::Landed { rank: target, peer: PEER, notice }
}

fn sum(source: usize, target: usize, sequence: u32) -> u64 {
    u64::MAX / (1 + 100 * source as u64 + 10 * target as u64 + u64::from(sequence))
}

fn checked(rank: usize, found: Sums) -> Report {
    let aux_row = (rank == 0).then(|| Box::new([5; AUX_ROW_BYTES]));
    Report::Checked { rank, room: ROOM, attempt: 1, aux_row, found }
}

#[test]
fn a_write_has_settled_when_it_has_on_every_rank_however_often_one_says_so() {
    let mut barrier = RankBarrier::new(3);
    let (tag, other) = (Tag(1), Tag(2));
    barrier.write(tag);
    barrier.write(other);
    let settled =
        |rank, tag, error: Option<&str>| Report::Settled { rank, tag, error: error.map(str::to_owned) };
    for report in [
        settled(2, tag, Some("broken")),
        settled(2, tag, None),
        settled(0, other, None),
        settled(0, tag, Some("later")),
        settled(0, tag, None),
        settled(2, Tag(3), None),
    ] {
        assert_eq!(take(&mut barrier, report), None);
    }
    let error = Some("broken".to_owned());
    assert_eq!(take(&mut barrier, settled(1, tag, None)), Some(Event::Written { tag, error }));
    assert_eq!(take(&mut barrier, settled(1, tag, None)), None, "told already");
    assert_eq!(take(&mut barrier, settled(1, other, None)), None);
    let intact = Event::Written { tag: other, error: None };
    assert_eq!(take(&mut barrier, settled(2, other, None)), Some(intact));
    assert!(barrier.writes.is_empty());
}

/// All fragments of three parts over all lanes, in an order that follows from the seed, some of them twice.
fn shuffled(lanes: &[HeadLane], seed: u64) -> Vec<Report> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut reports = Vec::new();
    for (lane, sequence) in lanes.iter().flat_map(|lane| (0..3).map(move |sequence| (lane, sequence))) {
        let fragments = random.u32(1..=3);
        reports.extend(
            (0..fragments)
                .map(|fragment| landed((lane.source, lane.target), sequence, (fragment, fragments))),
        );
    }
    for _ in 0..random.usize(..5) {
        let again = reports[random.usize(..reports.len())].clone();
        reports.push(again);
    }
    random.shuffle(&mut reports);
    reports
}

#[test]
fn a_part_arrives_once_with_the_last_fragment_of_the_last_lane_in_any_order() {
    for (sources, targets) in [(1, 1), (4, 2), (2, 4), (4, 1), (1, 4), (3, 2), (16, 3)] {
        for seed in 0..50 {
            let mut barrier = open(8, sources, targets);
            let lanes = head_lanes(8, sources, targets);
            let reports = shuffled(&lanes, seed);
            let mut arrived = BTreeSet::new();
            for (at, report) in reports.iter().enumerate() {
                let Some(event) = take(&mut barrier, report.clone()) else { continue };
                let Event::Arrived(notice) = event else { panic!("seed {seed}: {event:?}") };
                assert!(arrived.insert(notice.sequence), "seed {seed}: part {} twice", notice.sequence);
                let of_part = |report: &&Report| matches!(report, Report::Landed { notice: lane, .. } if lane.notice == notice);
                let missing =
                    reports[at + 1..].iter().filter(of_part).find(|later| !reports[..=at].contains(later));
                assert_eq!(missing, None, "seed {seed}: part {} too early", notice.sequence);
            }
            assert_eq!(arrived.len(), 3, "seed {seed}");
            // The results must have the sums over all three parts, once for each lane.
            barrier.verify(ROOM);
            let mut found = None;
            for rank in (0..targets).rev() {
                let own = lanes.iter().filter(|lane| lane.target == rank);
                let sums = own.map(|lane| {
                    let parts = (0..3).map(|sequence| sum(lane.source, rank, sequence));
                    (lane.source, parts.fold(0, u64::wrapping_add))
                });
                found = take(&mut barrier, checked(rank, Some(sums.collect())));
                assert_eq!(found.is_some(), rank == 0, "seed {seed}");
            }
            let Some(Event::Verified { found, .. }) = found else { panic!("seed {seed}: not verified") };
            let sums = found.lanes.unwrap();
            assert_eq!(sums.len(), lanes.len());
            assert!(sums.iter().all(|lane| lane.sent == lane.found), "seed {seed}: {sums:?}");
            assert_eq!(found.aux_row, [5; AUX_ROW_BYTES]);
        }
    }
}

#[test]
fn one_lane_that_is_not_what_was_sent_or_was_not_looked_at_shows() {
    for second in [vec![(1, 1)], Vec::new()] {
        let mut barrier = open(2, 2, 2);
        for lane in [(0, 0), (1, 1)] {
            take(&mut barrier, landed(lane, 0, (0, 1)));
        }
        barrier.verify(ROOM);
        assert_eq!(take(&mut barrier, checked(0, Some(vec![(0, sum(0, 0, 0))]))), None);
        assert_eq!(take(&mut barrier, checked(0, Some(vec![(0, 3)]))), None, "a rank that says it again");
        let verified = take(&mut barrier, checked(1, Some(second)));
        let Some(Event::Verified { found, .. }) = verified else { panic!("{verified:?}") };
        let intact: Vec<bool> = found.lanes.unwrap().iter().map(|lane| lane.sent == lane.found).collect();
        assert_eq!(intact, [true, false]);
    }
}

#[test]
fn without_integrity_no_sum_is_made_up() {
    let mut barrier = open(2, 1, 2);
    barrier.verify(ROOM);
    take(&mut barrier, checked(0, None));
    let Some(Event::Verified { found, .. }) = take(&mut barrier, checked(1, Some(Vec::new()))) else {
        panic!("not verified");
    };
    assert_eq!(found.lanes, None);
}

#[test]
fn the_aux_row_alone_is_a_part_that_only_rank_0_gets() {
    let mut barrier = open(8, 4, 4);
    let Report::Landed { rank, peer, notice } = landed((0, 0), 0, (0, 1)) else { unreachable!() };
    let alone = LaneNotice { alone: true, sum: 0, ..notice };
    let event = take(&mut barrier, Report::Landed { rank, peer, notice: alone });
    assert_eq!(event, Some(Event::Arrived(alone.notice)));
    let empty = barrier.verify(ROOM);
    assert_eq!(empty.len(), 4);
    let mut event = None;
    for rank in 0..4 {
        event = take(&mut barrier, checked(rank, Some(vec![(rank, 0)])));
    }
    let Some(Event::Verified { found, .. }) = event else { panic!("not verified") };
    assert!(found.lanes.unwrap().iter().all(|lane| (lane.sent, lane.found) == (0, 0)));
}

#[test]
fn what_belongs_to_no_open_attempt_or_comes_from_another_peer_changes_nothing() {
    let mut barrier = RankBarrier::new(1);
    assert_eq!(take(&mut barrier, landed((0, 0), 0, (0, 1))), None, "before it was opened");
    barrier.open(&opening(2), head_lanes(8, 1, 1));
    assert_eq!(take(&mut barrier, landed((0, 0), 0, (0, 1))), None, "an earlier attempt");
    barrier.open(&RoomOpening { peer: Instance(8), ..opening(1) }, head_lanes(8, 1, 1));
    assert_eq!(take(&mut barrier, landed((0, 0), 0, (0, 1))), None, "another peer");
    barrier.open(&opening(1), Vec::new());
    assert_eq!(take(&mut barrier, landed((0, 0), 0, (0, 1))), None, "no connection");
    barrier.open(&opening(1), head_lanes(8, 1, 1));
    barrier.forget(ROOM);
    assert_eq!(take(&mut barrier, landed((0, 0), 0, (0, 1))), None, "forgotten");
    assert_eq!(take(&mut barrier, Report::Closed { rank: 0, room: ROOM }), None);
    assert!(barrier.rooms.is_empty());
}

#[test]
fn parts_that_cannot_be_are_told_as_a_part_that_no_transfer_has() {
    let change = |change: fn(&mut LaneNotice)| {
        let Report::Landed { rank, peer, mut notice } = landed((1, 0), 0, (1, 2)) else { unreachable!() };
        change(&mut notice);
        Report::Landed { rank, peer, notice }
    };
    for impossible in [
        change(|lane| lane.source = 0),
        change(|lane| lane.source = 7),
        change(|lane| lane.target = 1),
        change(|lane| lane.notice.sequence = 10),
        change(|lane| lane.notice.pages = 3),
        change(|lane| lane.notice.last = true),
        change(|lane| lane.alone = true),
        change(|lane| lane.fragments = 3),
        change(|lane| lane.sum ^= 1),
        change(|lane| (lane.notice.sequence, lane.fragments) = (1, FRAGMENTS + 1)),
    ] {
        let mut barrier = RankBarrier::new(2);
        let lane = |source, target, heads| HeadLane { source, target, heads };
        barrier.open(&opening(1), vec![lane(1, 0, 0..1), lane(2, 1, 1..2)]);
        assert_eq!(take(&mut barrier, landed((1, 0), 0, (0, 2))), None);
        let event = take(&mut barrier, impossible.clone());
        let Some(Event::Arrived(notice)) = event else { panic!("{impossible:?} was accepted: {event:?}") };
        assert_eq!(notice.sequence, u32::MAX);
    }
}

#[test]
fn a_room_is_closed_once_when_every_rank_has_closed_it_and_still_verifies() {
    let mut barrier = open(8, 2, 2);
    let closed = |rank| Report::Closed { rank, room: ROOM };
    barrier.verify(ROOM);
    assert_eq!(take(&mut barrier, closed(0)), None, "no closing was asked for");
    barrier.close(ROOM);
    let mut events: VecDeque<_> = [1, 1, 0, 0, 1].map(|rank| take(&mut barrier, closed(rank))).into();
    assert_eq!(events.remove(2), Some(Some(Event::RoomClosed { room: ROOM })));
    assert!(events.iter().all(Option::is_none), "{events:?}");
    take(&mut barrier, checked(1, None));
    assert!(matches!(take(&mut barrier, checked(0, None)), Some(Event::Verified { .. })));
}

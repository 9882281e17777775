//! The map of KV heads to ranks, and the lanes of heads from sending ranks to receiving ranks.
//!
//! Tensor-parallel ranks share a model's KV heads. With at most as many ranks as heads each rank holds a range of its
//! own, and these ranges are as even as can be. With more ranks than heads, neighbouring ranks hold the same head. Any
//! number of ranks of one worker can meet any number of another: the map is made of head intervals, so neither number
//! need divide the other.

use std::ops::Range;

/// The heads that rank `rank` of `ranks` holds, out of `kv_heads`: at least one. The ranges are in the order of the
/// ranks.
///
/// # Panics
/// When there are no heads, or no such rank.
#[must_use]
pub fn rank_heads(kv_heads: usize, ranks: usize, rank: usize) -> Range<usize> {
    assert!(kv_heads > 0 && rank < ranks, "rank {rank} of {ranks} for {kv_heads} KV heads");
    let start = rank * kv_heads / ranks;
    start..((rank + 1) * kv_heads / ranks).max(start + 1)
}

/// The ranks of `ranks` that hold a head.
///
/// # Panics
/// When there is no such head, or no rank.
#[must_use]
pub fn holders(kv_heads: usize, ranks: usize, head: usize) -> Range<usize> {
    assert!(head < kv_heads && ranks > 0, "head {head} of {kv_heads} over {ranks} ranks");
    let first = (0..ranks).find(|rank| rank_heads(kv_heads, ranks, *rank).contains(&head)).unwrap_or(0);
    let count = (first..ranks).take_while(|rank| rank_heads(kv_heads, ranks, *rank).contains(&head)).count();
    first..first + count
}

/// The heads of which `rank` is the first holder, so that every head is counted once over all ranks. The range may be
/// empty.
///
/// # Panics
/// When there are no heads, or no such rank.
#[must_use]
pub fn counted_heads(kv_heads: usize, ranks: usize, rank: usize) -> Range<usize> {
    let held = rank_heads(kv_heads, ranks, rank);
    let before = if rank == 0 { 0 } else { rank_heads(kv_heads, ranks, rank - 1).end };
    held.start.max(before)..held.end
}

/// Heads that one sending rank writes into the pool of one receiving rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadLane {
    /// The sender's rank.
    pub source: usize,
    /// The receiver's rank.
    pub target: usize,
    /// The heads, counted over the whole model.
    pub heads: Range<usize>,
}

/// All lanes between `sources` sending and `targets` receiving ranks, ordered by target, then by source. Each target
/// gets each of its heads from exactly one source. If several sources hold a head, they share the targets of that head
/// as evenly as possible. Rank 0 always sends to rank 0.
///
/// # Panics
/// When there are no heads or no ranks.
#[must_use]
pub fn head_lanes(kv_heads: usize, sources: usize, targets: usize) -> Vec<HeadLane> {
    let mut lanes: Vec<HeadLane> = Vec::new();
    for target in 0..targets {
        for head in rank_heads(kv_heads, targets, target) {
            let (from, to) = (holders(kv_heads, sources, head), holders(kv_heads, targets, head));
            let source = from.start + (target - to.start) * from.len() / to.len();
            match lanes.last_mut() {
                Some(lane) if lane.source == source && lane.target == target => lane.heads.end = head + 1,
                _ => lanes.push(HeadLane { source, target, heads: head..head + 1 }),
            }
        }
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_heads_in_order_and_none_is_left_out() {
        for (heads, ranks) in (1..=17).flat_map(|heads| (1..=17).map(move |ranks| (heads, ranks))) {
            let mut next = 0;
            for rank in 0..ranks {
                let range = rank_heads(heads, ranks, rank);
                assert!(
                    range.start <= next && range.end >= next && !range.is_empty(),
                    "{heads} {ranks} {rank}"
                );
                assert!(ranks > heads || range.start == next, "{heads} {ranks} {rank} repeats a head");
                next = range.end;
            }
            assert_eq!(next, heads);
            let counted = (0..ranks).flat_map(|rank| counted_heads(heads, ranks, rank));
            assert_eq!(counted.collect::<Vec<_>>(), (0..heads).collect::<Vec<_>>(), "{heads} {ranks}");
        }
        assert_eq!([0, 1, 2].map(|rank| rank_heads(8, 3, rank)), [0..2, 2..5, 5..8]);
        assert_eq!([0, 1, 2, 3].map(|rank| rank_heads(2, 4, rank)), [0..1, 0..1, 1..2, 1..2]);
    }

    #[test]
    fn every_target_gets_each_of_its_heads_once_from_a_rank_that_holds_it() {
        for heads in 1..=9 {
            for (sources, targets) in (1..=9).flat_map(|p| (1..=9).map(move |d| (p, d))) {
                let lanes = head_lanes(heads, sources, targets);
                for target in 0..targets {
                    let mut got: Vec<usize> = Vec::new();
                    for lane in lanes.iter().filter(|lane| lane.target == target) {
                        let held = rank_heads(heads, sources, lane.source);
                        assert!(held.start <= lane.heads.start && lane.heads.end <= held.end);
                        got.extend(lane.heads.clone());
                    }
                    assert_eq!(got, rank_heads(heads, targets, target).collect::<Vec<_>>());
                }
                assert_eq!((lanes[0].source, lanes[0].target), (0, 0));
            }
        }
    }

    #[test]
    fn ranks_that_hold_the_same_head_take_turns() {
        let pairs = |heads, sources, targets| -> Vec<(usize, usize)> {
            head_lanes(heads, sources, targets).iter().map(|lane| (lane.source, lane.target)).collect()
        };
        // The first case has one receiver: of four holders of each head, one sends. The second has four receivers of
        // one head and two holders: both send.
        assert_eq!(pairs(2, 8, 1), [(0, 0), (4, 0)]);
        assert_eq!(pairs(1, 2, 4), [(0, 0), (0, 1), (1, 2), (1, 3)]);
        assert_eq!(pairs(2, 4, 4), [(0, 0), (1, 1), (2, 2), (3, 3)]);
    }
}

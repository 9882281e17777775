//! The part of a model that each tensor-parallel rank computes.
//!
//! Every matrix is cut between its output rows. So one rank computes each output element, from all inputs, in an order that is the
//! same for any number of ranks, and results do not depend on that number. Query heads follow their KV head. Ranks that hold the
//! same KV head divide its query heads among them.

use std::ops::Range;

use host_core::heads::{holders, rank_heads};

use super::config::ModelConfig;

/// Rows that a product takes together. Parts of the larger matrices end at a multiple of this.
const PANEL: usize = 16;

/// The parts of all ranks, in order of the ranks.
#[derive(Clone, Debug)]
pub(crate) struct Shards {
    /// The rank that these shards are for.
    pub rank: usize,
    /// KV heads that this rank holds.
    pub kv_heads: Range<usize>,
    /// Columns of the attention's result: the query heads, times the elements of a head.
    pub attended: Vec<Range<usize>>,
    /// Columns of the residual stream.
    pub hidden: Vec<Range<usize>>,
    /// Columns of the MLP.
    pub intermediate: Vec<Range<usize>>,
    /// Token ids.
    pub vocabulary: Vec<Range<usize>>,
}

impl Shards {
    /// The shards of a model for `rank` of `ranks`. There are no more ranks than query heads.
    pub fn new(config: &ModelConfig, ranks: usize, rank: usize) -> Self {
        let queries = |rank| {
            let heads = query_heads(config.heads, config.kv_heads, ranks, rank);
            heads.start * config.head_dim..heads.end * config.head_dim
        };
        let parts = |total| (0..ranks).map(|rank| part(total, ranks, rank)).collect();
        Self {
            rank,
            kv_heads: rank_heads(config.kv_heads, ranks, rank),
            attended: (0..ranks).map(queries).collect(),
            hidden: parts(config.hidden),
            intermediate: parts(config.intermediate),
            vocabulary: parts(config.vocabulary),
        }
    }

    /// The rank that holds a token's row of the embedding.
    pub fn token_holder(&self, token: usize) -> usize {
        self.vocabulary.partition_point(|part| part.end <= token)
    }
}

/// The query heads that rank `rank` of `ranks` computes. `heads` is a multiple of `kv_heads` and at least `ranks`.
fn query_heads(heads: usize, kv_heads: usize, ranks: usize, rank: usize) -> Range<usize> {
    let group = heads / kv_heads;
    let held = rank_heads(kv_heads, ranks, rank);
    let sharers = holders(kv_heads, ranks, held.start);
    if sharers.len() == 1 {
        return held.start * group..held.end * group;
    }
    let (first, place) = (held.start * group, rank - sharers.start);
    first + place * group / sharers.len()..first + (place + 1) * group / sharers.len()
}

/// One of `ranks` parts of `0..total`, as even as whole panels allow.
fn part(total: usize, ranks: usize, rank: usize) -> Range<usize> {
    let unit = if total >= ranks * PANEL { PANEL } else { 1 };
    let cut = |rank: usize| (total.div_ceil(unit) * rank / ranks * unit).min(total);
    cut(rank)..cut(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_and_leave_nothing_out() {
        for ranks in 1..=20 {
            for total in [1, 8, 15, 16, 17, 64, 559, 4096] {
                let mut end = 0;
                for rank in 0..ranks {
                    let part = part(total, ranks, rank);
                    assert_eq!(part.start, end, "{total} {ranks}");
                    assert!(!part.is_empty() || total < ranks, "{total} {ranks} {rank}");
                    end = part.end;
                }
                assert_eq!(end, total);
            }
        }
    }

    #[test]
    fn query_heads_are_computed_once_by_ranks_that_hold_their_kv_head() {
        for (kv_heads, group) in (1..=6).flat_map(|kv| (1..=6).map(move |group| (kv, group))) {
            let heads = kv_heads * group;
            for ranks in 1..=heads {
                let mut end = 0;
                for rank in 0..ranks {
                    let held = rank_heads(kv_heads, ranks, rank);
                    let queries = query_heads(heads, kv_heads, ranks, rank);
                    assert_eq!(queries.start, end);
                    assert!(!queries.is_empty(), "{kv_heads} x {group}, rank {rank} of {ranks}");
                    assert!(queries.clone().all(|head| held.contains(&(head / group))));
                    end = queries.end;
                }
                assert_eq!(end, heads);
            }
        }
    }
}

//! Combines the ranks' progress in the current batch into one answer.
//!
//! The scheduler does not know of ranks. Layers are done when all ranks have done them. A batch is done when all ranks
//! have ended it, and it has failed if it failed on one of them.

use host_core::{Event, SequenceOutput};

/// How one rank's part of a batch ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The sampled tokens. Rank 0 has them.
    Done(Vec<SequenceOutput>),
    /// This rank could not compute it.
    Failed(String),
    /// Another rank could not compute it.
    Broken(String),
}

/// The progress of all ranks in one batch. The next batch begins when the event of the last one has gone to the
/// scheduler.
#[derive(Debug)]
pub(super) struct RanksOfBatch {
    ranks: Vec<Progress>,
    /// Layers that all ranks have done.
    layers: u32,
}

#[derive(Debug, Default)]
struct Progress {
    layers: u32,
    outcome: Option<Outcome>,
}

impl RanksOfBatch {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks: (0..ranks).map(|_rank| Progress::default()).collect(), layers: 0 }
    }

    /// Records that a rank has done this many layers. Returns how many all ranks have done, if that number has grown.
    pub(super) fn layers_done(&mut self, rank: usize, layers: u32) -> Option<u32> {
        let progress = self.ranks.get_mut(rank)?;
        progress.layers = progress.layers.max(layers);
        let all = self.ranks.iter().map(|rank| rank.layers).min()?;
        let news = all > self.layers;
        self.layers = all;
        news.then_some(all)
    }

    /// Records that a rank has ended. Returns the batch's event if it was the last rank.
    pub(super) fn ended(&mut self, rank: usize, outcome: Outcome) -> Option<Event> {
        self.ranks.get_mut(rank)?.outcome = Some(outcome);
        if self.ranks.iter().any(|rank| rank.outcome.is_none()) {
            return None;
        }
        let count = self.ranks.len();
        let ended = std::mem::replace(self, Self::new(count));
        let (mut outputs, mut cause, mut consequence) = (Vec::new(), None, None);
        for (rank, outcome) in ended.ranks.into_iter().enumerate() {
            let named = |message| if count > 1 { format!("rank {rank}: {message}") } else { message };
            match outcome.outcome {
                Some(Outcome::Done(sampled)) => outputs.extend(sampled),
                Some(Outcome::Failed(message)) => cause = cause.or(Some(named(message))),
                Some(Outcome::Broken(message)) => consequence = consequence.or(Some(message)),
                None => {}
            }
        }
        Some(cause.or(consequence).map_or(Event::BatchDone(outputs), Event::BatchFailed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_core::Room;

    fn done(rooms: &[u64]) -> Outcome {
        let output = |room: &u64| SequenceOutput {
            room: Room(*room),
            sampled: Vec::new(),
            undrawn: None,
            scored: Vec::new(),
        };
        Outcome::Done(rooms.iter().map(output).collect())
    }

    #[test]
    fn layers_are_done_when_the_slowest_rank_has_done_them() {
        let mut batch = RanksOfBatch::new(3);
        let told = [(0, 2), (0, 4), (2, 2), (1, 4), (2, 4), (1, 6), (0, 6), (2, 8)];
        let news: Vec<_> =
            told.iter().filter_map(|(rank, layers)| batch.layers_done(*rank, *layers)).collect();
        assert_eq!(news, [2, 4, 6]);
        for rank in 0..3 {
            batch.ended(rank, done(&[]));
        }
        assert_eq!([0, 1, 2].map(|rank| batch.layers_done(rank, 1)), [None, None, Some(1)], "the next batch");
    }

    #[test]
    fn a_batch_ends_with_its_last_rank_and_has_the_outputs_of_rank_0() {
        let mut batch = RanksOfBatch::new(3);
        for _again in 0..2 {
            assert_eq!(batch.ended(2, done(&[])), None);
            assert_eq!(batch.ended(0, done(&[7, 8])), None);
            let Some(Event::BatchDone(outputs)) = batch.ended(1, done(&[])) else { panic!("not done") };
            assert_eq!(outputs.iter().map(|output| output.room.0).collect::<Vec<_>>(), [7, 8]);
        }
    }

    #[test]
    fn one_rank_that_fails_fails_the_batch_and_its_own_reason_is_told() {
        let broken = || Outcome::Broken("rank 1 gave the batch up".into());
        let mut batch = RanksOfBatch::new(3);
        assert_eq!(batch.ended(0, broken()), None);
        assert_eq!(batch.ended(1, Outcome::Failed("no".into())), None);
        assert_eq!(batch.ended(2, broken()), Some(Event::BatchFailed("rank 1: no".into())));
        // A rank that fails after the others have ended.
        assert_eq!(batch.ended(0, done(&[1])), None);
        assert_eq!(batch.ended(1, done(&[])), None);
        assert_eq!(
            batch.ended(2, Outcome::Failed("late".into())),
            Some(Event::BatchFailed("rank 2: late".into()))
        );
        let mut alone = RanksOfBatch::new(1);
        assert_eq!(alone.ended(0, Outcome::Failed("no".into())), Some(Event::BatchFailed("no".into())));
    }
}

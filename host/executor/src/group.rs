//! Communication between the ranks of one worker while they compute a batch.
//!
//! Every rank has a [`Seat`] in the worker's group and takes a [`Turn`] per batch. Within a turn the ranks make the same
//! calls in the same order, and each call ends when all ranks have made it. A rank that drops its turn unfinished, by an error
//! or by a panic, breaks the turn: every call of the other ranks returns [`Broken`], including calls that wait already. When all
//! ranks have left a turn, broken or not, the next turn begins unbroken.
//!
//! Values travel through one slot per rank. There are two sets of slots, which calls use alternately. A rank writes a set
//! again only after the call in between, and all ranks make that call only after they have read the set. Threads spin for a
//! few microseconds, if there is a core for each, and then sleep. `tests/loom` compiles this file with loom's atomics and locks.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, RwLock};

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::hint;

/// How often a thread reads the round before it sleeps: about 3 microseconds.
const SPINS: usize = 64;

/// A turn that cannot be finished, because of another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} gave the batch up")]
pub struct Broken {
    /// The first rank that gave up.
    pub rank: usize,
}

#[derive(Debug, Default)]
struct State {
    /// The turn that ranks are in, or may enter.
    turn: u64,
    /// Ranks that have left the turn.
    left: usize,
    /// Ranks that wait for the others in the call under way.
    arrived: usize,
    /// Calls that all ranks have made. [`Shared::round`] has the same number.
    round: u64,
    broken: Option<Broken>,
    /// A rank that has left the group for good.
    gone: Option<Broken>,
}

#[derive(Debug, Default)]
struct Slot {
    floats: RwLock<Vec<f32>>,
    words: RwLock<Vec<u64>>,
}

#[derive(Debug)]
struct Shared {
    /// No code that could panic runs under this lock.
    state: Mutex<State>,
    changed: Condvar,
    round: AtomicU64,
    spins: usize,
    slots: [Vec<Slot>; 2],
}

/// One rank's place in its group. For one thread at a time.
#[derive(Debug)]
pub struct Seat {
    shared: Arc<Shared>,
    rank: usize,
    ranks: usize,
    /// Turns taken.
    turns: u64,
}

/// The group for one batch, as one rank sees it.
#[derive(Debug)]
pub struct Turn<'a> {
    seat: &'a Seat,
    calls: usize,
    finished: bool,
}

/// The seats of a new group of `ranks` (at least one), in order.
#[must_use]
pub fn seats(ranks: usize) -> Vec<Seat> {
    let shared = Shared::new(ranks);
    (0..ranks).map(|rank| Seat { shared: shared.clone(), rank, ranks, turns: 0 }).collect()
}

impl Seat {
    /// The only seat of a group of one.
    #[must_use]
    pub fn alone() -> Self {
        Seat { shared: Shared::new(1), rank: 0, ranks: 1, turns: 0 }
    }

    /// The rank of this seat.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Takes the next turn, after all ranks have left the last one. Call it before anything that can fail for one rank alone, so
    /// that the other ranks learn of the failure.
    ///
    /// # Errors
    /// When a rank has left the group for good.
    pub fn turn(&mut self) -> Result<Turn<'_>, Broken> {
        let mut state = self.shared.state.lock();
        while state.turn != self.turns && state.gone.is_none() {
            self.shared.changed.wait(&mut state);
        }
        if let Some(gone) = state.gone {
            return Err(state.broken.unwrap_or(gone));
        }
        drop(state);
        self.turns += 1;
        Ok(Turn { seat: self, calls: 0, finished: false })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        let gone = Broken { rank: self.rank };
        state.gone = state.gone.or(Some(gone));
        state.broken = state.broken.or(Some(gone));
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn new(ranks: usize) -> Arc<Self> {
        let slots = || (0..ranks).map(|_rank| Slot::default()).collect();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Arc::new(Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            round: AtomicU64::new(0),
            spins: if cores >= ranks { SPINS } else { 0 },
            slots: [slots(), slots()],
        })
    }
}

impl Turn<'_> {
    /// The rank that takes this turn.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.seat.rank
    }

    /// Ranks of the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.seat.ranks
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// When another rank gave up the turn.
    pub fn barrier(&mut self) -> Result<(), Broken> {
        let Seat { shared, ranks, .. } = self.seat;
        let mut state = shared.state.lock();
        if let Some(broken) = state.broken {
            return Err(broken);
        }
        self.calls += 1;
        let round = state.round;
        state.arrived += 1;
        if state.arrived == *ranks {
            state.arrived = 0;
            state.round = round + 1;
            shared.round.store(round + 1, Ordering::Release);
            drop(state);
            shared.changed.notify_all();
            return Ok(());
        }
        drop(state);
        for _ in 0..shared.spins {
            if shared.round.load(Ordering::Acquire) != round {
                return Ok(());
            }
            hint::spin_loop();
        }
        let mut state = shared.state.lock();
        while state.round == round {
            if let Some(broken) = state.broken {
                return Err(broken);
            }
            shared.changed.wait(&mut state);
        }
        Ok(())
    }

    /// Puts the ranks' columns of a matrix side by side, on every rank: `columns[r]` are those of rank r, in ascending order and
    /// without gaps. `mine` is `[rows][my columns]`, and `whole` becomes `[rows][all columns]`. With one rank, `mine` and `whole`
    /// are swapped.
    ///
    /// # Errors
    /// When another rank failed.
    ///
    /// # Panics
    /// When the sizes do not fit together, here or between ranks.
    pub fn gather_columns(
        &mut self,
        mine: &mut Vec<f32>,
        columns: &[Range<usize>],
        whole: &mut Vec<f32>,
    ) -> Result<(), Broken> {
        self.gather_columns_at(None, mine, columns, whole)
    }

    /// As [`gather_columns`](Turn::gather_columns), on rank 0 alone. On other ranks `whole` does not change.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn gather_columns_on_rank_0(
        &mut self,
        mine: &mut Vec<f32>,
        columns: &[Range<usize>],
        whole: &mut Vec<f32>,
    ) -> Result<(), Broken> {
        self.gather_columns_at(Some(0), mine, columns, whole)
    }

    fn gather_columns_at(
        &mut self,
        root: Option<usize>,
        mine: &mut Vec<f32>,
        columns: &[Range<usize>],
        whole: &mut Vec<f32>,
    ) -> Result<(), Broken> {
        let Seat { rank, ranks, .. } = *self.seat;
        assert_eq!(columns.len(), ranks, "columns of each rank");
        if ranks == 1 {
            std::mem::swap(mine, whole);
            return Ok(());
        }
        let slots = self.exchange_floats(mine)?;
        if root.is_some_and(|root| root != rank) {
            return Ok(());
        }
        let width = columns.last().map_or(0, |last| last.end);
        let own = columns[rank].len();
        let rows = columns
            .iter()
            .zip(slots)
            .find(|(columns, _)| !columns.is_empty())
            .map_or(0, |(columns, slot)| slot.floats.read().len() / columns.len());
        assert_eq!(mine.len(), rows * own, "{rows} rows of {own} columns");
        whole.resize(rows * width, 0.0);
        for (columns, slot) in columns.iter().zip(slots).filter(|(columns, _)| !columns.is_empty()) {
            let part = slot.floats.read();
            assert_eq!(part.len(), rows * columns.len(), "{rows} rows of the columns {columns:?}");
            for (whole, part) in whole.chunks_exact_mut(width).zip(part.chunks_exact(columns.len())) {
                whole[columns.clone()].copy_from_slice(part);
            }
        }
        Ok(())
    }

    /// Hands every rank's floats to `take`, in order of the ranks.
    ///
    /// # Errors
    /// When another rank failed.
    pub fn each_ranks_floats(
        &mut self,
        mine: &[f32],
        mut take: impl FnMut(usize, &[f32]),
    ) -> Result<(), Broken> {
        if self.seat.ranks == 1 {
            take(0, mine);
            return Ok(());
        }
        let slots = self.exchange_floats(mine)?;
        for (rank, slot) in slots.iter().enumerate() {
            take(rank, &slot.floats.read());
        }
        Ok(())
    }

    /// Every rank's numbers, in order of the ranks.
    ///
    /// # Errors
    /// When another rank failed.
    pub fn gather(&mut self, mine: &[u64]) -> Result<Vec<Vec<u64>>, Broken> {
        let slots = self.exchange(|slot| {
            let mut words = slot.words.write();
            words.clear();
            words.extend_from_slice(mine);
        })?;
        Ok(slots.iter().map(|slot| slot.words.read().clone()).collect())
    }

    fn exchange_floats(&mut self, mine: &[f32]) -> Result<&[Slot], Broken> {
        self.exchange(|slot| {
            let mut floats = slot.floats.write();
            floats.clear();
            floats.extend_from_slice(mine);
        })
    }

    /// Fills this rank's slot, waits for the other ranks, and returns all slots. They stay unchanged until the call after the next.
    fn exchange(&mut self, fill: impl FnOnce(&Slot)) -> Result<&[Slot], Broken> {
        let seat = self.seat;
        let slots = &seat.shared.slots[self.calls % 2];
        fill(&slots[seat.rank]);
        self.barrier()?;
        Ok(slots)
    }

    /// Leaves the turn without breaking it.
    pub fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Seat { shared, rank, ranks, .. } = self.seat;
        let mut state = shared.state.lock();
        if !self.finished {
            state.broken = state.broken.or(Some(Broken { rank: *rank }));
        }
        state.left += 1;
        if state.left == *ranks {
            let State { turn, round, gone, .. } = *state;
            *state = State { turn: turn + 1, round, gone, broken: gone, ..State::default() };
        }
        drop(state);
        shared.changed.notify_all();
    }
}

#[cfg(test)]
#[path = "group/tests.rs"]
mod tests;

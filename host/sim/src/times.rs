//! Models of how long everything takes.

use std::time::Duration;

use host_core::hierarchy::Direction;
use host_core::scheduler::PageWrite;
use host_core::{Batch, Time};

use crate::random::Random;

/// One piece of work that takes time. Workers are named by their places in the world, which outlive their processes.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    /// An executor computes a batch.
    Step {
        /// The worker.
        at: usize,
        /// What it computes.
        batch: &'a Batch,
    },
    /// A message from worker to worker.
    Message {
        /// Its sender.
        from: usize,
        /// Its receiver.
        to: usize,
    },
    /// Half of a handshake: the way to the prefill worker, or the way back.
    Handshake {
        /// From.
        from: usize,
        /// To.
        to: usize,
    },
    /// Writing pages into a peer's memory, and settling the write.
    Write {
        /// The writer.
        from: usize,
        /// The worker whose memory is written.
        to: usize,
        /// The write.
        write: &'a PageWrite,
    },
    /// Cutting a connection off in both directions.
    Fence {
        /// The worker that cuts it off.
        at: usize,
    },
    /// The time until a worker is told that a connection is gone.
    Loss {
        /// The worker.
        at: usize,
    },
    /// Copying pages that arrived beside a worker's pool into the pool.
    Scatter {
        /// The worker.
        at: usize,
        /// The number of pages.
        pages: usize,
    },
    /// Digesting pages that arrived.
    Verify {
        /// The worker.
        at: usize,
        /// The number of pages.
        pages: usize,
    },
    /// A message from one thread of a worker to another: a part arrived, a peer is ready, a room is closed.
    News {
        /// The worker.
        at: usize,
    },
    /// The router tells a worker that an answer is not needed any more.
    Cancel,
    /// Copying pages between the pool and host memory.
    Copy {
        /// The worker.
        at: usize,
        /// The direction.
        direction: Direction,
        /// The number of pages.
        pages: usize,
    },
    /// A tier answers which pages it has.
    Query {
        /// The worker that asks.
        at: usize,
        /// The tier.
        tier: usize,
        /// The number of pages in the query.
        pages: usize,
    },
    /// A tier reads one page of a batch.
    Read {
        /// The worker that asks.
        at: usize,
        /// The tier.
        tier: usize,
    },
    /// A tier writes one page of a batch.
    Store {
        /// The worker that asks.
        at: usize,
        /// The tier.
        tier: usize,
    },
}

impl Work<'_> {
    /// The workers that do it.
    pub(crate) fn workers(&self) -> [Option<usize>; 2] {
        match *self {
            Work::Message { from, to } | Work::Handshake { from, to } | Work::Write { from, to, .. } => {
                [Some(from), Some(to)]
            }
            Work::Step { at, .. }
            | Work::Fence { at }
            | Work::Loss { at }
            | Work::Scatter { at, .. }
            | Work::Verify { at, .. }
            | Work::News { at }
            | Work::Copy { at, .. }
            | Work::Query { at, .. }
            | Work::Read { at, .. }
            | Work::Store { at, .. } => [Some(at), None],
            Work::Cancel => [None, None],
        }
    }
}

/// A model of time.
///
/// Its answers depend only on its arguments and on earlier calls. Variation comes from `random`.
///
/// Any closure with this signature is a model:
///
/// ```
/// # use std::time::Duration;
/// # use host_core::Time;
/// # use host_sim::{Random, Times, Work};
/// let model = |_now: Time, work: Work<'_>, _random: &mut Random| match work {
///     Work::Step { batch, .. } => Duration::from_micros(4_000 + 20 * batch.tokens() as u64),
///     Work::Write { write, .. } => Duration::from_micros(50 * write.source.len() as u64),
///     _ => Duration::ZERO,
/// };
/// # fn takes(_: impl Times) {}
/// # takes(model);
/// ```
pub trait Times {
    /// The time that this work takes if it begins now.
    fn takes(&mut self, now: Time, work: Work<'_>, random: &mut Random) -> Duration;
}

impl<F: FnMut(Time, Work<'_>, &mut Random) -> Duration> Times for F {
    fn takes(&mut self, now: Time, work: Work<'_>, random: &mut Random) -> Duration {
        self(now, work, random)
    }
}

/// A model in which every work takes any time up to a bound, whatever its size.
///
/// So any order of events is possible.
#[derive(Clone, Copy, Debug)]
pub struct Erratic;

impl Times for Erratic {
    fn takes(&mut self, _now: Time, work: Work<'_>, random: &mut Random) -> Duration {
        let most = match work {
            Work::Read { .. } | Work::Store { .. } => 6,
            Work::Copy { .. } => 10,
            Work::Query { .. } => 15,
            Work::Step { .. } | Work::News { .. } | Work::Cancel => 20,
            Work::Verify { .. } => 30,
            Work::Message { .. } | Work::Handshake { .. } => 50,
            Work::Fence { .. } | Work::Scatter { .. } => 100,
            Work::Loss { .. } => 200,
            Work::Write { .. } => 400,
        };
        random.up_to(Duration::from_millis(most))
    }
}

//! Where a request is on its way through a worker, and the one function that moves it.
//!
//! [`FOLLOWS`] is the whole state machine. `docs/internals/request.md` draws it, and a test compares the two. A request
//! that ends leaves from any stage, through `Scheduler::retire`.

use std::ops::{Deref, Range};

use crate::hand_over::{Incoming, Reclaiming};
use crate::ids::Room;

/// The stage of a job, with the data that matters only there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits for pages, an aux row, and (prefill, decode) for the other leg.
    Queued(Waiting),
    /// Decode: prefill was told where to write.
    Transfer(Incoming),
    /// Decode: everything arrived, and digests are being computed.
    Verifying(Incoming),
    /// Decode: the sent pages are verified, and the request waits for pages that it restores itself.
    Restoring(Incoming),
    /// Decode: prefill will not send the last missing pages. They are computed here as soon as no peer can write them.
    Reclaiming(Reclaiming),
    /// Decode: verified, and waits until the pace activates it.
    Ready,
    /// These pages are being copied from host memory: pages of the prompt on workers that compute it, or earlier pages of a
    /// preempted request.
    Loading(Range<usize>),
    /// Takes part in batches. If the batch being computed has the job: the position up to which it computes the job.
    Running(Option<usize>),
    /// Has given up its pages for others and waits for pages. Lost KV is recomputed.
    Preempted(Waiting),
    /// Prefill: computed. Its pages are on their way, or wait for decode's commit.
    Inflight,
}

/// The data of a job in the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Waiting {
    /// Later requests that were admitted while this one lacked pages.
    pub skipped: u32,
    /// The request that the job waits for, or has waited for.
    pub follows: Option<Follows>,
    /// Whether the offload tiers were asked for the job's pages.
    pub fetched: bool,
}

/// The request that a queued request waits for, see [`sharing`](super::sharing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Follows {
    pub leader: Room,
    /// The page that the leader must bring.
    pub page: usize,
    /// Pages of which nothing had to be computed when the request first followed a leader.
    pub cached: usize,
}

impl Waiting {
    /// The data of a request whose pages the offload tiers were asked for.
    pub(super) fn fetched() -> Self {
        Self { fetched: true, ..Self::default() }
    }
}

/// A stage without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    Queued,
    Transfer,
    Verifying,
    Restoring,
    Reclaiming,
    Ready,
    Loading,
    Running,
    Preempted,
    Inflight,
}

use Name as N;

/// The stages that may follow each stage.
const FOLLOWS: [(Name, &[Name]); 10] = [
    // Its pages are there, or come from host memory, or (decode) from prefill.
    (N::Queued, &[N::Running, N::Loading, N::Transfer]),
    // The copies have ended. If some failed, a request with a window starts again, and waits for pages.
    (N::Loading, &[N::Running, N::Preempted]),
    // Decode asks again, checks the arrived pages, or stops waiting for prefill. A verified transfer passes through here,
    // because nothing reads its pages any more.
    (N::Transfer, &[N::Transfer, N::Verifying, N::Restoring, N::Reclaiming, N::Running, N::Preempted]),
    (N::Verifying, &[N::Transfer]),
    // If a restore failed, prefill sends the missing pages, or they are computed here. A model with a window computes
    // them behind the last whole window, and needs pages for that.
    (N::Restoring, &[N::Transfer, N::Ready, N::Running, N::Preempted]),
    (N::Reclaiming, &[N::Running, N::Preempted]),
    (N::Ready, &[N::Running, N::Preempted]),
    // Prefill is done, or pages ran short.
    (N::Running, &[N::Inflight, N::Preempted]),
    (N::Preempted, &[N::Running, N::Loading]),
    (N::Inflight, &[]),
];

fn follows(from: Name, to: Name) -> bool {
    FOLLOWS.iter().any(|(name, next)| *name == from && next.contains(&to))
}

impl Stage {
    fn name(&self) -> Name {
        match self {
            Stage::Queued(_) => Name::Queued,
            Stage::Transfer(_) => Name::Transfer,
            Stage::Verifying(_) => Name::Verifying,
            Stage::Restoring(_) => Name::Restoring,
            Stage::Reclaiming(_) => Name::Reclaiming,
            Stage::Ready => Name::Ready,
            Stage::Loading(_) => Name::Loading,
            Stage::Running(_) => Name::Running,
            Stage::Preempted(_) => Name::Preempted,
            Stage::Inflight => Name::Inflight,
        }
    }

    /// Whether the job has not begun.
    pub(super) fn is_queued(&self) -> bool {
        matches!(self, Stage::Queued(_))
    }

    /// Whether the job waits to continue.
    pub(super) fn is_preempted(&self) -> bool {
        matches!(self, Stage::Preempted(_))
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self, Stage::Running(_))
    }

    /// The job's data in the queue, while it is there.
    pub(super) fn waiting(&self) -> Option<&Waiting> {
        match self {
            Stage::Queued(waiting) | Stage::Preempted(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// The position up to which the batch being computed computes the job, if it is in that batch.
    pub(super) fn in_batch(&self) -> Option<usize> {
        match self {
            Stage::Running(in_batch) => *in_batch,
            _ => None,
        }
    }

    /// Whether decode lacks only a span of pages that is under way, and that it could also compute.
    pub(super) fn waits_for_supplement(&self) -> bool {
        matches!(self, Stage::Transfer(incoming) if incoming.supplement)
    }
}

/// A job's stage, which only the job itself holds. It is read as a [`Stage`] and changes through [`enter`](Self::enter)
/// alone. The other functions change the data of a stage.
#[derive(Debug)]
pub(super) struct CurrentStage(Stage);

impl CurrentStage {
    pub(super) fn queued() -> Self {
        Self(Stage::Queued(Waiting::fetched()))
    }

    /// Moves the job to the next stage.
    ///
    /// # Panics
    /// If `next` may not follow the present stage. This is checked in releases too, like the state of a page: the stage
    /// decides which pages may be written, read and given to others, so a worker that goes on could answer from the KV of
    /// another request. Instead its process ends, the supervisor starts another, and routers retry as far as they may. The
    /// table has ten rows and is read once for each move of a request.
    pub(super) fn enter(&mut self, next: Stage) {
        assert!(follows(self.0.name(), next.name()), "{:?} does not follow {:?}", next, self.0);
        self.0 = next;
    }

    /// The job's data in the queue, while it is there.
    pub(super) fn waiting_mut(&mut self) -> Option<&mut Waiting> {
        match &mut self.0 {
            Stage::Queued(waiting) | Stage::Preempted(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// Takes note that a batch begins that computes the job up to a position, or that the batch has ended (`None`).
    pub(super) fn set_in_batch(&mut self, until: Option<usize>) {
        if let Stage::Running(in_batch) = &mut self.0 {
            *in_batch = until;
        }
    }

    /// Decode: the transfer that the job waits for, while it does.
    pub(super) fn transfer(&mut self) -> Option<&mut Incoming> {
        match &mut self.0 {
            Stage::Transfer(incoming) => Some(incoming),
            _ => None,
        }
    }

    /// Decode: the transfer that has arrived, while it is checked or waits for a restore.
    pub(super) fn received(&mut self) -> Option<&mut Incoming> {
        match &mut self.0 {
            Stage::Verifying(incoming) | Stage::Restoring(incoming) => Some(incoming),
            _ => None,
        }
    }

    /// Decode: the writers of the job's last pages, while it takes these pages back.
    pub(super) fn reclaiming(&mut self) -> Option<&mut Reclaiming> {
        match &mut self.0 {
            Stage::Reclaiming(reclaiming) => Some(reclaiming),
            _ => None,
        }
    }
}

impl Deref for CurrentStage {
    type Target = Stage;

    fn deref(&self) -> &Stage {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Arrows of the drawing, by names. The code leaves `Verifying` by way of `Transfer`.
    fn drawn() -> BTreeSet<(String, String)> {
        let page = include_str!("../../../../docs/internals/request.md");
        let drawing = page.split("stateDiagram-v2").nth(1).unwrap().split("```").next().unwrap();
        let arrow = |line: &str| {
            let (from, to) = line.trim().split_once(" --> ")?;
            let to = to.split(" : ").next()?.trim();
            let from = if from == "Verifying" && to != "Transfer" { "Transfer" } else { from };
            Some((from.to_owned(), to.to_owned()))
        };
        drawing.lines().filter_map(arrow).filter(|(from, to)| from != "[*]" && to != "[*]").collect()
    }

    #[test]
    fn the_drawing_of_the_stages_shows_the_table() {
        let table: BTreeSet<(String, String)> = FOLLOWS
            .iter()
            .flat_map(|(from, next)| next.iter().map(move |to| (format!("{from:?}"), format!("{to:?}"))))
            // The drawing shows arrows out of Verifying where the table has them out of Transfer (see `drawn`).
            .collect();
        // The drawing also has the arrow from Verifying to Transfer, and the one from Transfer to itself.
        assert_eq!(table, drawn());
    }

    #[test]
    #[should_panic(expected = "does not follow")]
    fn a_stage_that_does_not_follow_is_a_fault() {
        let mut stage = CurrentStage::queued();
        stage.enter(Stage::Inflight);
    }
}

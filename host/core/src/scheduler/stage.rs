//! Where a request is on its way through a worker, and the one function that moves it.
//!
//! [`FOLLOWS`] is the whole state machine. `docs/internals/request.md` draws it, and a test compares the two. A request
//! that ends leaves from any stage, through `Scheduler::retire`.

use std::ops::{Deref, Range};

use crate::hand_over::{Incoming, Reclaiming};
use crate::ids::Room;

/// Where a job is, with what matters there alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits for pages, an aux row, and (prefill, decode) for the other leg.
    Queued(Waiting),
    /// Decode: prefill was told where to write.
    Transfer(Incoming),
    /// Decode: everything arrived, and digests are being computed.
    Verifying(Incoming),
    /// Decode: what was sent is verified, and the request waits for what it restores itself.
    Restoring(Incoming),
    /// Decode: prefill will not send the last pages that are missing, which are computed here as soon as no peer can
    /// write them.
    Reclaiming(Reclaiming),
    /// Decode: verified, and waits until the pace activates it.
    Ready,
    /// These pages are being copied from host memory: of the prompt, on workers that compute it, or of what a preempted request
    /// had.
    Loading(Range<usize>),
    /// Takes part in batches: the position up to which the batch being computed computes it, if that batch has it.
    Running(Option<usize>),
    /// Gave its pages up for others and waits for pages. What is gone of its KV is recomputed.
    Preempted(Waiting),
    /// Prefill: computed. Its pages are on their way, or wait for decode's commit.
    Inflight,
}

/// What matters of a job in the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Waiting {
    /// Later requests that were admitted while this one lacked pages.
    pub skipped: u32,
    /// Which request it waits for, or has waited for.
    pub follows: Option<Follows>,
    /// Whether the offload tiers were asked for it.
    pub fetched: bool,
}

/// The request that one in the queue waits for, see [`sharing`](super::sharing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Follows {
    pub leader: Room,
    /// The page that the leader is to bring.
    pub page: usize,
    /// Pages of which nothing was to be computed when it first followed a leader.
    pub cached: usize,
}

impl Waiting {
    /// Of a request whose pages the offload tiers were asked for.
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

/// Which stages may follow each.
const FOLLOWS: [(Name, &[Name]); 10] = [
    // Its pages are there, or come from host memory, or (decode) from prefill.
    (N::Queued, &[N::Running, N::Loading, N::Transfer]),
    // Copied. Of a model with a window not all of it may have been, and pages for more are then needed.
    (N::Loading, &[N::Running, N::Preempted]),
    // Decode asks again, checks what came, or stops waiting for prefill. What was verified passes through here: nothing reads
    // its pages any more.
    (N::Transfer, &[N::Transfer, N::Verifying, N::Restoring, N::Reclaiming, N::Running, N::Preempted]),
    (N::Verifying, &[N::Transfer]),
    // A restore failed: prefill sends what is missing, or it is computed here. A model with a window computes it behind
    // the last whole window, and needs pages for that.
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

    /// Whether it has not begun.
    pub(super) fn is_queued(&self) -> bool {
        matches!(self, Stage::Queued(_))
    }

    /// Whether it waits to continue.
    pub(super) fn is_preempted(&self) -> bool {
        matches!(self, Stage::Preempted(_))
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self, Stage::Running(_))
    }

    /// What matters of it in the queue, while it is there.
    pub(super) fn waiting(&self) -> Option<&Waiting> {
        match self {
            Stage::Queued(waiting) | Stage::Preempted(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// The position up to which the batch being computed computes it.
    pub(super) fn in_batch(&self) -> Option<usize> {
        match self {
            Stage::Running(in_batch) => *in_batch,
            _ => None,
        }
    }

    /// Whether a span of pages is under way that is all that decode lacks, and that it could compute.
    pub(super) fn waits_for_supplement(&self) -> bool {
        matches!(self, Stage::Transfer(incoming) if incoming.supplement)
    }
}

/// A job's stage, which only the job itself holds. It is read as a [`Stage`] and changes through [`enter`](Self::enter)
/// alone. The other functions change what belongs to a stage.
#[derive(Debug)]
pub(super) struct CurrentStage(Stage);

impl CurrentStage {
    pub(super) fn queued() -> Self {
        Self(Stage::Queued(Waiting::fetched()))
    }

    /// Moves the job on.
    ///
    /// # Panics
    /// If that stage does not follow. In releases too, as with a page that is not where its owner says: which pages may be
    /// written, read and given to others follows from the stage, so a worker that goes on could answer from the KV of another
    /// request. Its process ends instead, the supervisor starts another, and routers retry what they may. The table has ten
    /// rows and is read once for each step of a request.
    pub(super) fn enter(&mut self, next: Stage) {
        assert!(follows(self.0.name(), next.name()), "{:?} does not follow {:?}", next, self.0);
        self.0 = next;
    }

    /// What matters of it in the queue, while it is there.
    pub(super) fn waiting_mut(&mut self) -> Option<&mut Waiting> {
        match &mut self.0 {
            Stage::Queued(waiting) | Stage::Preempted(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// A batch begins that computes it up to a position, or has ended.
    pub(super) fn set_in_batch(&mut self, until: Option<usize>) {
        if let Stage::Running(in_batch) = &mut self.0 {
            *in_batch = until;
        }
    }

    /// Decode: the transfer that it waits for, while it does.
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

    /// Decode: what else may still write its last pages, while it takes them back.
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
            // Every arrow out of Verifying but one is drawn from there.
            .collect();
        // Both ways into Verifying and back are drawn. So is the table's own arrow from Transfer to itself.
        assert_eq!(table, drawn());
    }

    #[test]
    #[should_panic(expected = "does not follow")]
    fn a_stage_that_does_not_follow_is_a_fault() {
        let mut stage = CurrentStage::queued();
        stage.enter(Stage::Inflight);
    }
}

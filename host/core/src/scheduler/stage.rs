//! Where a request is on its way through a worker, and the one function that moves it.
//!
//! [`follows`] is the whole state machine; `docs/internals/request.md` draws it. A request that ends leaves from any stage, through
//! `Scheduler::retire`.

use std::ops::{Deref, Range};

use crate::hand_over::{Incoming, Reclaiming};

/// Where a job is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits for pages, an aux row, and (prefill, decode) for the other leg.
    Queued,
    /// Decode: prefill was told where to write.
    Transfer(Incoming),
    /// Decode: everything arrived; digests are being computed.
    Verifying(Incoming),
    /// Decode: what was sent is verified; waits for what it restores itself.
    Restoring(Incoming),
    /// Decode: prefill will not send the last pages that are missing, which are computed here as soon as no peer can
    /// write them.
    Reclaiming(Reclaiming),
    /// Decode: verified; waits until the pace lets it into the steps.
    Ready,
    /// These pages are being copied from host memory: of the prompt, on workers that compute it, or of what a preempted request
    /// had.
    Loading(Range<usize>),
    /// Takes part in batches.
    Running,
    /// Gave its pages up for others and waits for pages; what is gone of its KV is recomputed.
    Preempted,
    /// Prefill: computed; pages are on their way, or wait for decode's commit.
    Inflight,
}

impl Stage {
    /// Whether a span of pages is under way that is all that decode lacks, and that it could compute.
    pub(super) fn waits_for_supplement(&self) -> bool {
        matches!(self, Stage::Transfer(incoming) if incoming.supplement)
    }
}

/// Whether a job may go from one stage to the other.
fn follows(from: &Stage, to: &Stage) -> bool {
    use Stage::{
        Inflight, Loading, Preempted, Queued, Ready, Reclaiming, Restoring, Running, Transfer, Verifying,
    };
    match from {
        // Its pages are there, or come from host memory, or (decode) from prefill.
        Queued => matches!(to, Running | Loading(_) | Transfer(_)),
        // Copied; of a model with a window not all of it, so that pages for more are needed.
        Loading(_) => matches!(to, Running | Preempted),
        // Decode asks again, checks what came, or stops waiting for prefill and computes the rest itself: of a model with a
        // window behind the last whole one, for which it needs pages.
        Transfer(_) => {
            matches!(to, Transfer(_) | Verifying(_) | Restoring(_) | Reclaiming(_) | Running | Preempted)
        }
        // What was checked may be missing still, or damaged.
        Verifying(_) => matches!(to, Transfer(_)),
        // A restore failed: prefill sends what is missing, or it is computed here.
        Restoring(_) => matches!(to, Transfer(_) | Ready | Running | Preempted),
        Reclaiming(_) => matches!(to, Running | Preempted),
        Ready => matches!(to, Running | Preempted),
        // Prefill is done; pages ran short.
        Running => matches!(to, Inflight | Preempted),
        Preempted => matches!(to, Running | Loading(_)),
        Inflight => false,
    }
}

/// A job's stage. It is read as a [`Stage`] and changes through [`enter`](Self::enter) alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CurrentStage(Stage);

impl CurrentStage {
    pub(super) fn queued() -> Self {
        Self(Stage::Queued)
    }

    /// Moves the job on.
    pub(super) fn enter(&mut self, next: Stage) {
        debug_assert!(follows(&self.0, &next), "{:?} does not follow {:?}", next, self.0);
        self.0 = next;
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

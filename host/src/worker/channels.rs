//! What goes through the scheduler thread's channels: in, to the control plane, and to whoever asked.

use host_core::request::{Failure, FinishReason, Request, Usage};
use host_core::scheduler::Flushed;
use host_core::{Event, Instance, Sampled};
use tokio::sync::{mpsc, oneshot};

use super::agreement;

/// What happens to a request, as its client is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The prompt's KV is complete; tokens follow.
    Began {
        /// Prompt tokens whose KV was not computed for this request.
        cached_tokens: u32,
        /// Bytes of KV that came through the transfer plugin.
        transferred_bytes: u64,
    },
    /// One more token.
    Token(Sampled),
    /// The answer is complete.
    Finished {
        /// Why.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
        /// Bytes of KV that came through the transfer plugin.
        transferred_bytes: u64,
    },
    /// There will be no complete answer.
    Failed(Failure),
}

/// What the scheduler thread is told.
#[derive(Debug)]
pub(crate) enum Input {
    /// Something happened.
    Event(Event),
    /// Something happened on one rank.
    Transfer(agreement::Report),
    /// A request, and where its answer goes.
    Submit(Request, mpsc::UnboundedSender<Answer>),
    /// The radix cache is to be emptied.
    FlushCache(oneshot::Sender<Option<Flushed>>),
}

/// What the scheduler asks of the control plane.
#[derive(Debug)]
pub enum Outgoing {
    /// [`host_core::Action::Send`].
    Message {
        /// To whom.
        to: Instance,
        /// The lowest id still repeated.
        floor: u64,
        /// What.
        message: host_core::message::Message,
    },
    /// [`host_core::Action::Connect`].
    Connect {
        /// With whom.
        peer: host_core::request::PeerRef,
        /// For the peer.
        floor: u64,
    },
    /// [`host_core::Action::Fence`].
    Fence {
        /// Whom.
        peer: Instance,
        /// Which connection.
        session: u64,
    },
}

//! Messages through the scheduler thread's channels: inputs, and outputs to the control plane and to callers.

use std::sync::Arc;

use host_core::rank_barrier::Report;
use host_core::request::Request;
use host_core::scheduler::Flushed;
use host_core::{Event, Instance};
use host_wire::Answer;
use tokio::sync::{mpsc, oneshot};

use super::grammars::Followed;

/// An input of the scheduler thread.
#[derive(Debug)]
pub(crate) enum Input {
    /// An event.
    Event(Event),
    /// A report of one rank.
    Transfer(Report),
    /// A request, the channel for its answer, and its place in its grammar.
    Submit(Request, mpsc::UnboundedSender<Answer>, Option<Arc<Followed>>),
    /// Empties the radix cache.
    FlushCache(oneshot::Sender<Option<Flushed>>),
}

/// An action that the scheduler asks of the control plane.
#[derive(Debug)]
pub enum Outgoing {
    /// [`host_core::Action::Send`].
    Message {
        /// The receiver.
        to: Instance,
        /// The lowest id still repeated.
        floor: u64,
        /// The message.
        message: host_core::message::Message,
    },
    /// [`host_core::Action::Connect`].
    Connect {
        /// The peer to connect to.
        peer: host_core::request::PeerRef,
        /// The lowest id still repeated, for the peer.
        floor: u64,
    },
    /// [`host_core::Action::Fence`].
    Fence {
        /// The peer to fence.
        peer: Instance,
        /// The session of the connection.
        session: u64,
    },
}

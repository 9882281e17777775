//! Where one peer's writes come in.

use crate::capi::{Agent, Refusal};
use crate::notices::Notices;
use crate::wire::Random;

/// An agent that one sender knows. Dropping it closes its connections and takes its keys back: nothing that was sent to
/// it lands from then on, whatever the sender does.
pub struct Door {
    pub instance: Random,
    /// The sender's number for the connection.
    pub connection: u64,
    /// The name that the sender was opened under.
    pub peer_name: String,
    pub agent: Agent,
    /// A thread of NIXL's drives progress.
    pub has_thread: bool,
}

impl Door {
    /// Drives progress unless a thread does, and takes what came; true if anything did.
    pub fn look(&mut self, notices: &Notices) -> Result<bool, Refusal> {
        let mut any = false;
        let name = &self.peer_name;
        self.agent.received(|message| {
            any = true;
            notices.arrived(name, message);
        })?;
        Ok(any)
    }
}

//! The state that the host's threads and the driver share.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use host_plugin_api::{Result, TransferLimits};
use host_transfer_kit::{
    Event, Instance, LinkedInstance, LinkedPeer, RegionDescriptor, Reply, Request, locked,
};

use crate::config::Config;

/// With this many waiting notifications, no inbound endpoint is looked at. Senders then wait for a host that does not
/// fetch its notifications.
const NOTIFICATIONS: usize = 4096;

/// A connection on which this instance is the sender, as the hot calls see it.
pub type Peer = LinkedPeer<()>;

/// Requests of the host's threads to the driver. A caller waits for its answer, so there are no more requests than
/// threads that call.
pub enum Command {
    /// About connections.
    Connections(Request),
    /// Try whether NIXL takes this memory.
    Try { region: RegionDescriptor, reply: Reply<()> },
}

/// The shared state of one instance.
pub struct Shared {
    pub config: Config,
    pub linked: Arc<LinkedInstance<()>>,
    commands: Mutex<VecDeque<Command>>,
    /// Submissions that the driver has not seen yet.
    ready: Mutex<VecDeque<u32>>,
    /// Wakes the driver.
    pub wake: Event,
    /// Whether the driver sleeps, or is about to.
    pub sleeping: AtomicBool,
}

impl Shared {
    pub fn new(config: Config, name: &str) -> Result<Self> {
        let Config { max_writes, max_submissions, short_writes, .. } = config;
        let limits = TransferLimits { short_writes, ..TransferLimits::new(max_writes, max_submissions) };
        let instance = Instance::new(name, limits, NOTIFICATIONS)?;
        Ok(Self {
            linked: Arc::new(LinkedInstance::new(instance, true)),
            commands: Mutex::default(),
            ready: Mutex::new(VecDeque::with_capacity(max_submissions as usize)),
            wake: Event::new()?,
            sleeping: AtomicBool::new(false),
            config,
        })
    }

    pub fn instance(&self) -> &Instance<Peer> {
        &self.linked.instance
    }

    pub fn tell(&self, command: Command) {
        locked(&self.commands).push_back(command);
        self.wake();
    }

    pub fn next_command(&self) -> Option<Command> {
        locked(&self.commands).pop_front()
    }

    /// **Hot.** Hands a submission to the driver.
    pub fn start(&self, index: u32) {
        locked(&self.ready).push_back(index);
        self.wake();
    }

    pub fn next_ready(&self) -> Option<u32> {
        locked(&self.ready).pop_front()
    }

    /// Whether the driver has something to take.
    pub fn has_work(&self) -> bool {
        !locked(&self.ready).is_empty() || !locked(&self.commands).is_empty()
    }

    /// Wakes the driver if it sleeps. A driver that is about to sleep sets `sleeping`, and then looks again.
    fn wake(&self) {
        if self.sleeping.load(Ordering::SeqCst) {
            self.wake.signal();
        }
    }

    /// Tells the driver to end.
    pub fn stop(&self) {
        self.instance().stop();
        self.wake.signal();
    }

    /// Notes that the driver has ended. Threads that wait for an answer get none.
    pub fn set_ended(&self) {
        locked(&self.commands).clear();
        self.linked.set_ended();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submissions_reach_the_driver_in_their_order() {
        let shared = Shared::new(Config::default(), "test").unwrap();
        assert!(!shared.has_work());
        shared.start(1);
        shared.start(2);
        assert!(shared.has_work());
        assert_eq!([shared.next_ready(), shared.next_ready(), shared.next_ready()], [Some(1), Some(2), None]);
    }
}

//! The thread that seals full segments. A seal waits until the device has done its earlier work. The keeper, which
//! makes the next segments, must not wait for that.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::store::Store;
use crate::writer::OpenSegment;

/// While this many segments wait for their seals, no more are made. A segment without a seal cannot be evicted, is lost
/// in a power cut with `fsync = "segment"`, and after a crash another process has to read and seal it. Two more
/// segments may fill meanwhile, besides those that writes in flight still reach into.
pub const MOST: usize = 3;

/// A segment, and whether any page was in it when it was sealed.
pub type Sealed = (Arc<OpenSegment>, io::Result<bool>);

/// The keeper's end of the channels.
pub struct Sealer {
    pub jobs: Sender<Arc<OpenSegment>>,
    pub done: Receiver<Sealed>,
    /// Sent and not yet received.
    pub under_way: usize,
    /// Is told when the keeper begins to wait for a seal.
    #[cfg(test)]
    pub waits: Option<Sender<()>>,
}

/// The thread's end of the channels.
pub struct Work {
    jobs: Receiver<Arc<OpenSegment>>,
    done: Sender<Sealed>,
}

/// Both ends.
pub fn new() -> (Sealer, Work) {
    let ((jobs, next), (tell, done)) = (channel(), channel());
    let sealer = Sealer {
        jobs,
        done,
        under_way: 0,
        #[cfg(test)]
        waits: None,
    };
    (sealer, Work { jobs: next, done: tell })
}

impl Work {
    /// Calls `seal` for each segment, and wakes the keeper after it. Ends soon after the keeper.
    pub fn run(self, store: &Store, seal: impl Fn(&OpenSegment) -> io::Result<bool>) {
        for open in self.jobs {
            let sealed = seal(&open);
            if self.done.send((open, sealed)).is_err() {
                return;
            }
            store.call_keeper();
        }
    }
}

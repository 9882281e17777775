//! The thread that seals full segments. It waits for the device, for as long as that works on what was given to it before. The
//! keeper, which makes the next segments, must not wait for it.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use host_plugin_api::{Level, log};

use crate::keeper::{Keeper, Known};
use crate::store::Store;
use crate::writer::OpenSegment;

/// Segments that wait for their seals, from which on no more are made. What is not sealed cannot be evicted, is lost in a power cut
/// with `fsync = "segment"`, and after a crash another process has to read and seal it. Two more may fill
/// meanwhile, and there are those that writes in flight still reach into.
pub const MOST: usize = 3;

/// A segment, and whether any page was in it when it was sealed.
type Sealed = (Arc<OpenSegment>, io::Result<bool>);

/// The keeper's end.
pub struct Sealer {
    jobs: Sender<Arc<OpenSegment>>,
    done: Receiver<Sealed>,
    /// Sent and not yet received.
    pub under_way: usize,
}

/// The thread's end.
pub struct Work {
    jobs: Receiver<Arc<OpenSegment>>,
    done: Sender<Sealed>,
}

/// Both ends.
pub fn new() -> (Sealer, Work) {
    let ((jobs, next), (tell, done)) = (channel(), channel());
    (Sealer { jobs, done, under_way: 0 }, Work { jobs: next, done: tell })
}

impl Work {
    /// Calls `seal` for each segment, and the keeper after it. Ends soon after the keeper.
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

impl Keeper<'_> {
    /// Hands over what is full, and learns what was sealed. Says whether anything was.
    pub(crate) fn seal(&mut self) -> bool {
        while let Some(open) = self.store.writer.take_full() {
            // A thread that is gone has broken the instance.
            self.sealer.under_way += usize::from(self.sealer.jobs.send(open).is_ok());
        }
        let mut any = false;
        while let Ok(sealed) = self.sealer.done.try_recv() {
            self.learn(sealed);
            any = true;
        }
        any
    }

    /// Waits for one more to be sealed. False when none is under way.
    pub(crate) fn await_sealed(&mut self) -> bool {
        if self.sealer.under_way == 0 {
            return false;
        }
        let sealed = self.sealer.done.recv();
        let any = sealed.is_ok();
        sealed.into_iter().for_each(|sealed| self.learn(sealed));
        any
    }

    /// Seals all that is full and not written to.
    pub(crate) fn seal_all(&mut self) {
        while self.seal() || self.await_sealed() {}
    }

    fn learn(&mut self, (open, sealed): Sealed) {
        self.sealer.under_way -= 1;
        let (store, name) = (self.store, open.segment.name);
        // Its descriptor goes with its writer. Readers open it again, within the bound on open files.
        store.files.close(&open.segment);
        let known = match sealed {
            Ok(true) => {
                store.sealed(&open.segment);
                Some(Known::Sealed(open.segment.clone()))
            }
            Ok(false) => {
                store.directory.remove(name);
                store.forget(&open.segment);
                None
            }
            // Its lock goes with its writer, so the next look adopts it, and that is ours.
            Err(e) => {
                log!(Level::WARN, "cannot seal {}, which is tried again: {e}", name.index());
                Some(Known::Open(open.segment.clone(), open.next()))
            }
        };
        if let Some(known) = known {
            self.known.insert(name, known);
        }
        // Only now: until it is known as sealed, its records are removed through its writer.
        store.writer.forget(&open);
    }
}

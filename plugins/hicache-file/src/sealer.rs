//! The thread that seals full segments. It waits for the device, for as long as that works on what was given to it before; the
//! keeper, which makes the next segments, must not.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, Scope};

use host_plugin_api::{Level, log};

use crate::keeper::{Keeper, Known};
use crate::store::Store;
use crate::writer::OpenSegment;

/// Segments that wait for their seals, from which on no more are made: each has two open files, and after a crash another process
/// reads what they hold.
pub const MOST: usize = 8;

/// A segment, and whether any page was in it when it was sealed.
type Sealed = (Arc<OpenSegment>, io::Result<bool>);

/// The keeper's end.
pub struct Sealer {
    jobs: Sender<Arc<OpenSegment>>,
    done: Receiver<Sealed>,
    /// Sent and not yet received.
    pub under_way: usize,
}

impl Sealer {
    /// Starts the thread, which ends when this is dropped. It calls `seal`, and the keeper after each.
    pub fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        store: &'scope Store,
        seal: impl Fn(&OpenSegment) -> io::Result<bool> + Send + 'scope,
    ) -> io::Result<Self> {
        let (jobs, next) = channel::<Arc<OpenSegment>>();
        let (tell, done) = channel();
        let work = move || {
            for open in next {
                let sealed = seal(&open);
                if tell.send((open, sealed)).is_err() {
                    return;
                }
                store.call_keeper();
            }
        };
        Builder::new().name("tier-sealer".to_owned()).spawn_scoped(scope, work)?;
        Ok(Self { jobs, done, under_way: 0 })
    }
}

impl Keeper<'_> {
    /// Hands over what is full, and learns what was sealed; whether anything was.
    pub(crate) fn seal(&mut self) -> bool {
        while let Some(open) = self.store.writer.take_full() {
            // If the thread is gone, so is the instance in a moment.
            self.sealer.under_way += usize::from(self.sealer.jobs.send(open).is_ok());
        }
        let mut any = false;
        while let Ok(sealed) = self.sealer.done.try_recv() {
            self.learn(sealed);
            any = true;
        }
        any
    }

    /// Waits for one more to be sealed; false when none is under way.
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
        // Its descriptor goes with its writer; who reads it opens it again, within the bound on open files.
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
            // Its lock goes with its writer, so it is adopted by whoever looks next: by us.
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

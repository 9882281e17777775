//! What the keeper has of [the thread that seals](crate::sealer).

use host_plugin_api::{Level, log};

use super::{Keeper, Known};
use crate::sealer::Sealed;

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

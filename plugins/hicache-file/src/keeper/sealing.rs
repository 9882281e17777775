//! The keeper's side of [the thread that seals](crate::sealer).

use host_plugin_api::{Level, log};

use super::{Keeper, Known};
use crate::sealer::Sealed;

impl Keeper<'_> {
    /// Hands over full segments, and takes back sealed ones. Returns whether any was sealed.
    pub(crate) fn seal(&mut self) -> bool {
        while let Some(open) = self.store.writer.take_full() {
            // The send fails when the thread is gone, and then the instance is broken.
            self.sealer.under_way += usize::from(self.sealer.jobs.send(open).is_ok());
        }
        let mut any = false;
        while let Ok(sealed) = self.sealer.done.try_recv() {
            self.learn(sealed);
            any = true;
        }
        any
    }

    /// Waits for one more segment to be sealed. False when none is under way.
    pub(crate) fn await_sealed(&mut self) -> bool {
        if self.sealer.under_way == 0 {
            return false;
        }
        #[cfg(test)]
        if let Some(waits) = &self.sealer.waits {
            let _no_longer_heard = waits.send(()).is_err();
        }
        let sealed = self.sealer.done.recv();
        let any = sealed.is_ok();
        sealed.into_iter().for_each(|sealed| self.learn(sealed));
        any
    }

    /// Seals all segments that are full and that no write reaches into.
    pub(crate) fn seal_all(&mut self) {
        while self.seal() || self.await_sealed() {}
    }

    fn learn(&mut self, (open, sealed): Sealed) {
        self.sealer.under_way -= 1;
        let (store, name) = (self.store, open.segment.name);
        // Closes the descriptor together with the writer. Readers open it again, within the bound on open files.
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
            // The segment's lock goes with its writer, so this keeper adopts the segment at its next look.
            Err(e) => {
                log!(Level::WARN, "cannot seal {}, which is tried again: {e}", name.index());
                Some(Known::Open(open.segment.clone(), open.next()))
            }
        };
        if let Some(known) = known {
            self.known.insert(name, known);
        }
        // Not earlier: until the segment is known as sealed, its records are removed through its writer.
        store.writer.forget(&open);
    }
}

//! Copying pages and window parts from host memory into a request's pages.

use super::fetch::FetchState;
use super::{Direction, Hierarchy, HostSlot, Op, PageEnd, TierAction, Work};
use crate::ids::{PageId, Room, Time};

impl Hierarchy {
    /// Begins as many loads as fit, oldest first. A batch holds pages of one request.
    pub(super) fn start_loads(&mut self, now: Time, actions: &mut Vec<TierAction>) {
        while let Some(room) = self.loadable.front().copied() {
            let left = self.config.copy_bytes.saturating_sub(self.loading_bytes) / self.config.page_bytes;
            let most = if self.loading_bytes == 0 { left.max(1) } else { left };
            let most = usize::try_from(most).unwrap_or(usize::MAX).min(self.config.batch_pages as usize);
            let tag = self.next_tag();
            let Some(fetch) = self.fetches.get_mut(&room) else {
                self.loadable.pop_front();
                continue;
            };
            let mut batch: Vec<(usize, HostSlot, PageId)> = Vec::new();
            let ready = fetch.items.iter_mut().filter(|(_, item)| matches!(item, FetchState::Ready(_)));
            for (page, item) in ready.take(most) {
                if let FetchState::Ready(slot) = std::mem::replace(item, FetchState::Loading(tag)) {
                    batch.push((*page, slot, fetch.table[page]));
                }
            }
            if batch.is_empty() {
                if most == 0 {
                    return;
                }
                self.loadable.pop_front();
                continue;
            }
            let carried = self.loading_bytes + self.bytes(batch.len());
            self.loading_bytes = carried;
            // From here on the batch holds the items' pins.
            let slots = batch.iter().map(|(_, slot, _)| Some(*slot)).collect();
            let work = Work::Load { room, first: batch.iter().map(|(page, _, _)| *page).collect() };
            self.ops.insert(tag, Op { work, slots, left: batch.len(), since: now, until: None, carried });
            let pages = batch.into_iter().map(|(_, slot, page)| (page, slot)).collect();
            actions.push(TierAction::Copy { tag, direction: Direction::Load, pages });
        }
    }

    pub(super) fn page_loaded(&mut self, room: Room, page: usize, slot: HostSlot, end: PageEnd) {
        self.host.unpin(slot);
        let Some(fetch) = self.fetches.get_mut(&room) else { return };
        if let Some(item) = fetch.items.get_mut(&page) {
            *item = if end == PageEnd::Done { FetchState::Loaded } else { FetchState::Gone };
            let from_storage = fetch.stored(page).is_some();
            if end == PageEnd::Done {
                self.unloaded -= 1;
                self.stats.loaded += 1;
                self.stats.loaded_from_storage += u64::from(from_storage);
            }
        }
    }
}

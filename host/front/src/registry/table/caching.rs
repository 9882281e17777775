//! Updates the table with events of the workers' caches.

use host_core::radix::PageHash;
use host_core::routing::Applied;
use host_core::{Instance, Room};
use host_wire::cache_news::News;
use host_wire::clock::Instant;
use tonic::transport::Channel;

use super::{Policy, WorkerTable};

/// Most kinds of caches that one prompt is looked up in. Each needs the prompt hashed once more.
const MAX_IDENTITIES: usize = 4;

/// How far a worker's cache is followed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Following {
    /// The worker has no cache, or sends no events.
    #[default]
    Nothing,
    /// The worker is not followed at the moment, for this reason.
    Lost(String),
    /// The worker is followed up to this event.
    At(u64),
}

impl WorkerTable {
    /// Notes that a request's prompt was computed.
    pub fn computed(&mut self, room: Room) {
        self.accounts.computed(room);
    }

    /// Notes that a request's answer is complete.
    pub fn answered(&mut self, room: Room) {
        self.accounts.answered(room);
    }

    /// Whether a worker is known.
    pub fn knows(&self, instance: Instance) -> bool {
        self.workers.contains_key(&instance)
    }

    /// The event after which to follow a worker's cache, or `None` when the worker is not known any more.
    pub fn resume(&mut self, instance: Instance) -> Option<u64> {
        let entry = self.workers.get(&instance)?;
        Some(self.accounts.resume(entry.slot))
    }

    /// The channel to a worker, if its cache can be followed.
    pub fn channel_to_follow(&self, instance: Instance) -> Option<Channel> {
        let entry = self.workers.get(&instance).filter(|entry| entry.info.cache_events)?;
        Some(entry.chosen.channel.clone())
    }

    /// Takes in events of a worker's cache.
    pub fn hear(&mut self, instance: Instance, news: &News) -> Applied {
        let Some(entry) = self.workers.get_mut(&instance) else { return Applied::Unknown };
        let heard = match news {
            News::Events(first, events) => self.accounts.hear(entry.slot, *first, events),
            News::Part(part) => self.accounts.hear_part(entry.slot, part),
        };
        entry.following = Following::At(match news {
            // A worker may send any number as `first`, and an empty list.
            News::Events(first, events) => first.saturating_add(events.len() as u64).saturating_sub(1),
            News::Part(part) => part.number,
        });
        heard
    }

    /// Notes that a worker's cache is followed, after this event.
    pub fn in_sight(&mut self, instance: Instance, after: u64) {
        if let Some(entry) = self.workers.get_mut(&instance) {
            entry.following = Following::At(after);
        }
    }

    /// Notes that a worker's cache cannot be followed. Forgets its pages.
    pub fn lost_sight(&mut self, instance: Instance, why: &str) {
        let Some(entry) = self.workers.get_mut(&instance) else { return };
        entry.following = Following::Lost(why.to_owned());
        self.accounts.forget(entry.slot);
    }

    /// The identities of caches in which prompts are looked up, with the tokens of their pages.
    pub fn identities(&self, now: Instant) -> Vec<(PageHash, u32)> {
        let mut found: Vec<(PageHash, u32)> = Vec::new();
        if self.terms.policy != Policy::Prefix {
            return found;
        }
        for entry in self.live(now).filter(|entry| entry.info.cache_events) {
            let page_tokens = entry.chosen.page_tokens;
            if !found.contains(&(entry.identity, page_tokens)) {
                found.push((entry.identity, page_tokens));
            }
        }
        found.truncate(MAX_IDENTITIES);
        found
    }
}

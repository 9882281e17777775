//! What a storage tier needs beside its store: a queue of batches, threads, registered memory, completions.
//!
//! The host calls a tier from threads that may not wait. A store does wait: for a disk, a database, a network. [`Tier`]
//! stands between the two. It copies a batch into memory that was taken when the tier opened. Threads of its own take
//! pages from there, and call the store for one value each.
//!
//! ```text
//!  host ──batch──▶ queue ──page──▶ thread ──get, put──▶ Store
//!    ▲                               │
//!    └───poll── completions ◀────────┘
//! ```
//!
//! The author writes a [`Store`], whose calls may block, allocate and fail:
//!
//! ```
//! use std::{collections::BTreeMap, ops::Bound, sync::Mutex};
//!
//! use host_plugin_api::{Error, ErrorCode, Key, Opening, Result, TierUsage};
//! use host_tier_kit::{Limits, Store, Tier};
//!
//! struct Map(Mutex<BTreeMap<Key, Vec<u8>>>);
//!
//! impl Store for Map {
//!     fn get(&self, key: &Key, to: &mut [u8]) -> Result<bool> {
//!         let map = self.0.lock().unwrap();
//!         let Some(value) = map.get(key) else { return Ok(false) };
//!         if value.len() != to.len() {
//!             return Err(host_tier_kit::other_length(value.len() as u64, to.len()));
//!         }
//!         to.copy_from_slice(value);
//!         Ok(true)
//!     }
//!     fn put(&self, key: &Key, from: &[u8]) -> Result<()> {
//!         self.0.lock().unwrap().entry(*key).or_insert_with(|| from.to_vec());
//!         Ok(())
//!     }
//!     fn exists(&self, key: &Key) -> Result<Option<u64>> {
//!         Ok(self.0.lock().unwrap().get(key).map(|value| value.len() as u64))
//!     }
//!     fn delete(&self, key: &Key) -> Result<Option<u64>> {
//!         Ok(self.0.lock().unwrap().remove(key).map(|value| value.len() as u64))
//!     }
//!     fn usage(&self) -> Result<TierUsage> {
//!         let map = self.0.lock().unwrap();
//!         let bytes = map.values().map(|value| value.len() as u64).sum();
//!         Ok(TierUsage { values: map.len() as u64, bytes, ..TierUsage::default() })
//!     }
//! }
//!
//! fn open(_opening: &Opening) -> Result<Tier<Map>> {
//!     Tier::start(Map(Mutex::default()), Limits::default())
//! }
//! // host_plugin_api::export_plugin! { manifest: include_str!("../plugin.toml"), tier: open }
//! # let opening = Opening { name: "map".into(), config: String::new() };
//! # assert!(open(&opening).is_ok());
//! ```
//!
//! `plugin.toml` must have `threads = "own"`. The capability `settled` holds. `scan` holds if the store lists keys.
//!
//! The kit guarantees for every store:
//!
//! - Hot calls allocate nothing and wait for no store.
//! - A page that names no region, leaves it, is too long or not aligned ends with `INVALID_ARGUMENT`. The store never
//!   sees it.
//! - Each page of an accepted batch ends in exactly one completion, also when the batch is cancelled. The host is woken
//!   for it.
//! - Deregistering a region waits until no call of the store uses it. It is a fence.
//! - A panic in the store ends the tier. No further call of the store begins. From then on every call answers
//!   `PANICKED`, also `poll`, except for calls that deregister memory and shut down. Completions that the host has not
//!   fetched are lost, as the contract says for any plugin that panics.
//! - A shutdown lets running calls of the store come to their end, and begins no other.

mod cursors;
mod queue;
mod regions;
mod store;
mod tier;

pub use regions::MAX_REGIONS;
pub use store::{Limits, Store, other_length};
pub use tier::{FENCE_SECONDS, Tier};

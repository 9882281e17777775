//! A storage tier that keeps values in this process's memory. The tier kit brings queue, threads and registered memory.
//!
//! To make it yours: put your storage into the calls of [`Store`]. They take one value each, and may block, allocate and fail.
//! Declare `persistent` in plugin.toml when values outlive the process, and `shared` when other machines see them.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};

use host_plugin_api::{Error, ErrorCode, Key, Opening, Result, TierUsage};
use host_tier_kit::{Limits, Store, Tier, other_length};

/// Most bytes of all values. Puts beyond it are refused.
const CAPACITY: u64 = 1 << 30;

/// The values, by their keys.
#[derive(Debug, Default)]
pub struct Map(Mutex<Values>);

#[derive(Debug, Default)]
struct Values {
    by_key: BTreeMap<Key, Vec<u8>>,
    bytes: u64,
}

/// Opens an instance. `opening.config` is the user's `[plugin.NAME]` table as TOML. This tier has no keys. To add some, declare
/// each in plugin.toml, which lets the host check them, and read the text with the crate `toml`.
///
/// # Errors
/// When no thread can be started.
pub fn open(_opening: &Opening) -> Result<Tier<Map>> {
    // Values of 64 MiB, which is a page of a large model, and four threads.
    Tier::start(Map::default(), Limits::default())
}

// The plugin's entry: writes plugin.toml into the file and exports the factory.
host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open,
}

impl Map {
    fn values(&self) -> MutexGuard<'_, Values> {
        // A poisoned lock is ignored: the values that a panicking thread left are still the best there are.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for Map {
    fn get(&self, key: &Key, to: &mut [u8]) -> Result<bool> {
        let values = self.values();
        let Some(value) = values.by_key.get(key) else { return Ok(false) };
        if value.len() != to.len() {
            return Err(other_length(value.len() as u64, to.len()));
        }
        to.copy_from_slice(value);
        Ok(true)
    }

    fn put(&self, key: &Key, from: &[u8]) -> Result<()> {
        let mut values = self.values();
        if values.by_key.contains_key(key) {
            return Ok(());
        }
        if values.bytes + from.len() as u64 > CAPACITY {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{CAPACITY} bytes are full")));
        }
        values.bytes += from.len() as u64;
        values.by_key.insert(*key, from.to_vec());
        Ok(())
    }

    fn exists(&self, key: &Key) -> Result<Option<u64>> {
        Ok(self.values().by_key.get(key).map(|value| value.len() as u64))
    }

    fn delete(&self, key: &Key) -> Result<Option<u64>> {
        let mut values = self.values();
        let length = values.by_key.remove(key).map(|value| value.len() as u64);
        values.bytes -= length.unwrap_or(0);
        Ok(length)
    }

    fn scan(&self, after: Option<&Key>, keys: &mut [Key]) -> Result<usize> {
        let values = self.values();
        let from = after.map_or(Bound::Unbounded, |key| Bound::Excluded(*key));
        let behind = values.by_key.range((from, Bound::Unbounded));
        Ok(keys.iter_mut().zip(behind).map(|(place, (key, _))| *place = *key).count())
    }

    fn usage(&self) -> Result<TierUsage> {
        let values = self.values();
        let count = values.by_key.len() as u64;
        Ok(TierUsage { values: count, bytes: values.bytes, capacity: CAPACITY, ..TierUsage::default() })
    }
}

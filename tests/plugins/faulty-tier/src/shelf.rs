//! Values with which the tier opens, from the files of a directory.
//!
//! A file is named by its key in 64 hex digits. An extension is a fault of this key.

use std::collections::BTreeMap;
use std::path::Path;

use host_plugin_api::tier::STORED;
use host_plugin_api::{
    Address, Error, ErrorCode, Key, Memory, MemoryKind, Result, StorageTier, Tag, TierCompletion, TierPage,
};
use host_plugin_memory::MemoryTier;
use serde::Deserialize;

use super::Fault;

/// Puts the files of a directory into the tier, and returns the faults of keys.
pub fn fill(tier: &MemoryTier, directory: &str) -> Result<BTreeMap<Key, Fault>> {
    let wrong = |what: String| Error::new(ErrorCode::CONFIG, format!("values_dir {directory}: {what}"));
    let mut faults = BTreeMap::new();
    for entry in std::fs::read_dir(directory).map_err(|error| wrong(error.to_string()))? {
        let path = entry.map_err(|error| wrong(error.to_string()))?.path();
        let (key, fault) = named(&path).ok_or_else(|| wrong(format!("{} names no key", path.display())))?;
        let bytes = std::fs::read(&path).map_err(|error| wrong(error.to_string()))?;
        put(tier, key, &bytes)?;
        faults.extend(fault.map(|fault| (key, fault)));
    }
    Ok(faults)
}

fn named(path: &Path) -> Option<(Key, Option<Fault>)> {
    let hex = path.file_stem()?.to_str()?;
    let mut key = Key::default();
    for (at, byte) in key.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    let named: Option<std::result::Result<Fault, serde::de::value::Error>> = path.extension().map(|word| {
        Fault::deserialize(serde::de::value::StrDeserializer::new(word.to_str().unwrap_or_default()))
    });
    Some((key, named.transpose().ok()?))
}

fn put(tier: &MemoryTier, key: Key, bytes: &[u8]) -> Result<()> {
    let length =
        u32::try_from(bytes.len()).map_err(|error| Error::new(ErrorCode::CONFIG, error.to_string()))?;
    let region = tier.register(&Memory {
        address: Address::of(bytes.as_ptr()),
        length: bytes.len() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: -1,
        generation: 1,
        fd_offset: 0,
    })?;
    let code = tier.put(Tag(1), &[TierPage { key, region, length, offset: 0 }]);
    let mut done = [TierCompletion::default()];
    let count = tier.poll(&mut done);
    tier.deregister(region)?;
    match (code, count, done[0].status) {
        (0, 1, STORED) => Ok(()),
        ended => Err(Error::new(ErrorCode::CONFIG, format!("value {key} cannot be stored: {ended:?}"))),
    }
}

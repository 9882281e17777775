//! Scans that are under way.

use std::collections::BTreeMap;
use std::sync::Mutex;

use host_plugin_api::{Error, ErrorCode, Key, Result, Scanned};
use host_transfer_kit::locked;

use super::store::Store;

/// Most scans at once. The oldest is given up for another.
const MOST: usize = 16;

/// A scan goes folder by folder, and remembers the keys that are left of the current folder. So a key that is there all
/// the time is seen once, while other keys come and go.
struct Scan {
    /// 256 when all folders were read.
    folder: u16,
    left: Vec<Key>,
}

#[derive(Default)]
pub struct Scans(Mutex<(u64, BTreeMap<u64, Scan>)>);

impl Scans {
    /// One step. See [`scan`](host_plugin_api::StorageTier::scan).
    pub fn step(&self, store: &Store, cursor: u64, keys: &mut [Key]) -> Result<Scanned> {
        let mut state = locked(&self.0);
        let (last, scans) = &mut *state;
        let mut scan = match cursor {
            0 => Scan { folder: 0, left: Vec::new() },
            known => scans.remove(&known).ok_or_else(|| {
                let text = format!("no scan goes on at {known}, or {MOST} others were started since");
                Error::new(ErrorCode::INVALID_ARGUMENT, text)
            })?,
        };
        let mut count = 0;
        while count < keys.len() {
            match scan.left.pop() {
                Some(key) => {
                    keys[count] = key;
                    count += 1;
                }
                None => {
                    let Ok(folder) = u8::try_from(scan.folder) else { break };
                    let io = |e| Error::new(ErrorCode::IO, format!("the directory cannot be read: {e}"));
                    scan.left = store.keys(folder).map_err(io)?;
                    scan.folder += 1;
                }
            }
        }
        let over = scan.left.is_empty() && scan.folder > u8::MAX.into();
        let mut cursor = 0;
        if !over {
            *last += 1;
            cursor = *last;
            scans.insert(cursor, scan);
            if scans.len() > MOST {
                scans.pop_first();
            }
        }
        Ok(Scanned { keys: count as u32, reserved: 0, cursor })
    }
}

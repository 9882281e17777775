//! Registered memory and the connections that may write to it. Both are under one lock, because removing either is a fence.
//!
//! The only `unsafe` of the crate is here. Memory belongs to the host. It stays mapped until `deregister` returns, so nothing may
//! touch a region once it is out of the table.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard};

use host_plugin_api::{Error, ErrorCode, Memory, RegionId, Result};

const MAX_REGIONS: usize = 1024;

#[derive(Default)]
pub struct Regions(Mutex<Table>);

#[derive(Default)]
struct Table {
    next: u32,
    regions: HashMap<u32, Memory>,
    /// Connections that peers made to this instance, by number, each with its peer's name.
    writers: HashMap<u64, (String, TcpStream)>,
    next_writer: u64,
}

/// The address of a range in a region, if the range lies inside.
fn place(region: &Memory, offset: u64, length: usize) -> Option<*mut u8> {
    let end = offset.checked_add(length as u64)?;
    (end <= region.length).then(|| region.address.pointer().wrapping_add(offset as usize))
}

impl Regions {
    fn table(&self) -> MutexGuard<'_, Table> {
        crate::lock(&self.0)
    }

    pub fn add(&self, memory: &Memory) -> Result<RegionId> {
        if memory.address.0 == 0 || memory.length == 0 || memory.address.checked_add(memory.length).is_none()
        {
            return Err(crate::invalid("the memory is empty or leaves the address space"));
        }
        let mut table = self.table();
        if table.regions.len() >= MAX_REGIONS {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_REGIONS} regions are registered")));
        }
        table.next += 1;
        let id = table.next;
        table.regions.insert(id, *memory);
        Ok(RegionId(id))
    }

    /// Removes a region. After the return no thread touches it, because threads touch regions only with the lock.
    pub fn remove(&self, region: RegionId) -> Result<()> {
        let removed = self.table().regions.remove(&region.0);
        removed.map(drop).ok_or_else(|| crate::invalid("no such region"))
    }

    /// Whether a range lies in a region, and in that generation of it when one is given.
    pub fn holds(&self, region: u32, generation: Option<u32>, offset: u64, length: u32) -> bool {
        let table = self.table();
        let region = table.regions.get(&region);
        let region = region.filter(|region| generation.is_none_or(|given| region.generation == given));
        length > 0 && region.is_some_and(|region| place(region, offset, length as usize).is_some())
    }

    /// Copies from a region of this instance, for sending.
    pub fn read(&self, region: u32, offset: u64, into: &mut [u8]) -> bool {
        let table = self.table();
        let from = table.regions.get(&region).and_then(|region| place(region, offset, into.len()));
        let Some(from) = from else { return false };
        // SAFETY: the range lies in a region, which the host keeps mapped until its removal. The removal needs the lock that is
        // held here.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        true
    }

    /// Copies what a peer sent into a region of that generation, unless the peer was cut off.
    pub fn land(&self, writer: u64, region: u32, generation: u32, offset: u64, bytes: &[u8]) -> bool {
        let table = self.table();
        let region = table.regions.get(&region).filter(|region| region.generation == generation);
        let to = region.and_then(|region| place(region, offset, bytes.len()));
        let Some(to) = to.filter(|_| table.writers.contains_key(&writer)) else { return false };
        // SAFETY: as in `read`. `bytes` is this plugin's buffer and overlaps nothing of the host's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        true
    }

    /// Lets a connection write, and returns the number that names it from now on.
    pub fn admit(&self, name: &str, stream: TcpStream) -> Option<u64> {
        let mut table = self.table();
        if table.writers.len() >= crate::MAX_PEERS {
            return None;
        }
        table.next_writer += 1;
        let id = table.next_writer;
        table.writers.insert(id, (name.to_owned(), stream));
        Some(id)
    }

    /// Ends one connection's right to write. Returns false when the connection was cut off before.
    pub fn dismiss(&self, writer: u64) -> bool {
        self.table().writers.remove(&writer).is_some()
    }

    /// Cuts off the connections of the chosen peers. After this returns nothing of these peers lands.
    pub fn cut(&self, chosen: impl Fn(&str) -> bool) {
        self.table().writers.retain(|_, (name, stream)| {
            let stays = !chosen(name);
            if !stays {
                // Wakes the thread that reads from the stream. The stream may have ended already.
                let _ended = stream.shutdown(Shutdown::Both);
            }
            stays
        });
    }
}
